// The prefix sums of scan_sm90.cuh for every GPU from compute capability 8.0 on.
#pragma once

#include "csrc/linear_attention/based/scan_sm90.cuh"

namespace thunderkittens::linear_attention {
namespace sm80 {

template <class Word>
__global__ __launch_bounds__(SCAN_THREADS) void based_portable_scan_kernel(
    const __grid_constant__ ScanGlobals g) {
    scan_states<Word>(g);
}

}  // namespace sm80

template <bool denominator>
void launch_portable_based_scan(const BasedParams& params, const ScanParams& scan, Stream stream) {
    using Word = scan_word<denominator>;
    launch_scan<Word>({}, sm80::based_portable_scan_kernel<Word>,
                      scan_globals<denominator>(params, scan),
                      params.problem.batch * params.problem.heads, stream);
}

}  // namespace thunderkittens::linear_attention
