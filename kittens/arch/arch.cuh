// The hardware layer: every instruction that C++ has no word for, behind a plain function. This is
// the only folder with inline assembly and the only place that knows which back end is compiled:
// `cuda/` for nvcc, `emulated/` for a host compiler (kernels then run on the CPU). Both have the
// same function names, each in a namespace of its own, so that object files of two back ends never
// share a symbol.
#pragma once

#if defined(__CUDACC__)
#define KITTENS_BACKEND on_gpu
#include "cuda/cluster.cuh"
#include "cuda/cp_async.cuh"
#include "cuda/fast_math.cuh"
#include "cuda/fences.cuh"
#include "cuda/fp8.cuh"
#include "cuda/launch.cuh"
#include "cuda/launch_control.cuh"
#include "cuda/ldmatrix.cuh"
#include "cuda/mbarrier.cuh"
#include "cuda/memory.cuh"
#include "cuda/mma_sync.cuh"
#include "cuda/named_barrier.cuh"
#include "cuda/packed_math.cuh"
#include "cuda/prefetch.cuh"
#include "cuda/reduce.cuh"
#include "cuda/registers.cuh"
#include "cuda/require.cuh"
#include "cuda/shuffle.cuh"
#include "cuda/tensor_map.cuh"
#include "cuda/threads.cuh"
#include "cuda/tma.cuh"
#include "cuda/tma_5d.cuh"
#include "cuda/wgmma.cuh"
#else
#define KITTENS_BACKEND on_cpu
#include "emulated/cluster.cuh"
#include "emulated/cp_async.cuh"
#include "emulated/fast_math.cuh"
#include "emulated/fences.cuh"
#include "emulated/fp8.cuh"
#include "emulated/launch.cuh"
#include "emulated/launch_control.cuh"
#include "emulated/ldmatrix.cuh"
#include "emulated/mbarrier.cuh"
#include "emulated/memory.cuh"
#include "emulated/mma_sync.cuh"
#include "emulated/named_barrier.cuh"
#include "emulated/packed_math.cuh"
#include "emulated/prefetch.cuh"
#include "emulated/reduce.cuh"
#include "emulated/registers.cuh"
#include "emulated/require.cuh"
#include "emulated/shuffle.cuh"
#include "emulated/tensor_map.cuh"
#include "emulated/threads.cuh"
#include "emulated/tma.cuh"
#include "emulated/tma_5d.cuh"
#include "emulated/wgmma.cuh"
#endif
