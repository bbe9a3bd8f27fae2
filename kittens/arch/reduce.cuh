// Additions to single floats in memory, for kernels that GPUs before Hopper run: of the back end
// that is compiled.
#pragma once

#include "arch.cuh"

#if defined(__CUDACC__)
#include "cuda/reduce.cuh"
#else
#include "emulated/reduce.cuh"
#endif
