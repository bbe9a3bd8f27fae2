// The kernel for every GPU from compute capability 8.0 on: that of Hopper, compiled once more.
#pragma once

#include "csrc/rotary/rotary_sm90.cuh"
