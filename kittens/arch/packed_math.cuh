// Packed arithmetic of pairs that few kernels need: not in the umbrella arch.cuh.
#pragma once

#include "arch.cuh"

#if defined(__CUDACC__)
#include "cuda/packed_math.cuh"
#else
#include "emulated/packed_math.cuh"
#endif
