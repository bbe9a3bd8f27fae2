// The order of NVFP4 weights, and the way back, as portable kernels: those of Hopper, which need
// nothing of it.
#pragma once

#include "csrc/gemm/nvfp4/prepare_sm90.cuh"
