// Bringing memory into the L2 cache ahead of its use, for the few kernels that do.
#pragma once

#include "arch.cuh"

#if defined(__CUDACC__)
#include "cuda/prefetch.cuh"
#else
#include "emulated/prefetch.cuh"
#endif
