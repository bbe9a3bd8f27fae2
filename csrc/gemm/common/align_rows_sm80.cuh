// The kernel of align_rows.h for every GPU from compute capability 8.0 on.
#pragma once

#include "csrc/gemm/common/align_rows_sm90.cuh"

namespace thunderkittens::gemm {
namespace sm80 {

template <int matrices>
__global__ __launch_bounds__(ALIGN_THREADS, 3) void portable_align_rows_kernel(
    const __grid_constant__ sm90::AlignRowsGlobals g) {
    sm90::align_rows(g, [] {});
}

}  // namespace sm80

template <int matrices>
void launch_portable_align_rows(const AlignRows (&copies)[matrices], Stream stream) {
    launch_align_rows(sm80::portable_align_rows_kernel<matrices>, false, copies, stream);
}

}  // namespace thunderkittens::gemm
