// The hardware layer: every instruction that C++ has no word for, behind a plain function.
// This is the only folder with inline assembly and the only place that knows which back end is compiled:
// `cuda/` for nvcc; other back ends implement the same function names in a namespace of their own, so that
// object files of two back ends never share a symbol.
#pragma once

#if defined(__CUDACC__)
#define KITTENS_BACKEND on_gpu
#include "cuda/cluster.cuh"
#include "cuda/cp_async.cuh"
#include "cuda/fast_math.cuh"
#include "cuda/fences.cuh"
#include "cuda/launch_control.cuh"
#include "cuda/ldmatrix.cuh"
#include "cuda/mbarrier.cuh"
#include "cuda/memory.cuh"
#include "cuda/mma_sync.cuh"
#include "cuda/named_barrier.cuh"
#include "cuda/registers.cuh"
#include "cuda/shuffle.cuh"
#include "cuda/threads.cuh"
#include "cuda/tma.cuh"
#include "cuda/wgmma.cuh"
#else
#error "kittens: compile with nvcc; this version of the library has a CUDA back end only"
#endif
