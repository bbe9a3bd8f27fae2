// The kernels of the family for every GPU from compute capability 8.0 on: those of Hopper, compiled
// once more. They are bound by memory, here as there.
#pragma once

#include "csrc/norm/backward_sm90.cuh"
#include "csrc/norm/forward_sm90.cuh"
