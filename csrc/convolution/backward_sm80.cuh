// The kernels of backward_sm90.cuh for every GPU from compute capability 8.0 on: they need nothing
// of Hopper's, and are compiled once more.
#pragma once

#include "csrc/convolution/backward_sm90.cuh"
