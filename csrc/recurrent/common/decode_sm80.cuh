// The kernel of decode_sm90.cuh for every GPU from compute capability 8.0 on.
#pragma once

#include "csrc/recurrent/common/decode_sm90.cuh"

namespace thunderkittens::recurrent {

template <DType dtype, bool wide_state, bool keys_first, int columns>
void launch_portable_recurrent_decode(const DecodeParams& params, Stream stream) {
    launch_decode<dtype, wide_state, keys_first, columns, true>(params, stream);
}

}  // namespace thunderkittens::recurrent
