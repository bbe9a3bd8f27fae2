// The step of decode_sm90.cuh for every GPU from compute capability 8.0 on.
#pragma once

#include "csrc/recurrent/gated_delta_rule/decode_sm90.cuh"

namespace thunderkittens::recurrent {
namespace delta::sm80 {

template <class T, bool wide_state, bool keys_inner>
__global__ __launch_bounds__(
    DELTA_DECODE_THREADS,
    DECODE_BLOCKS<wide_state, true>) void delta_portable_decode_kernel(const __grid_constant__
                                                                           DecodeGlobals<T>
                                                                               g) {
    decode_tokens<T, wide_state, keys_inner>(g);
}

}  // namespace delta::sm80

template <DType dtype, bool wide_state, bool keys_inner>
void launch_portable_gated_delta_rule_decode(const DeltaRuleDecodeParams& params, Stream stream) {
    using T = delta::type_of<dtype>;
    delta::launch_decode<T, wide_state, keys_inner, true>(
        delta::sm80::delta_portable_decode_kernel<T, wide_state, keys_inner>, params, stream);
}

}  // namespace thunderkittens::recurrent
