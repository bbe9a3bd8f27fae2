// The step of decode_sm90.cuh for every GPU from compute capability 8.0 on.
#pragma once

#include "csrc/linear_attention/lolcats/decode_sm90.cuh"

namespace thunderkittens::linear_attention {

template <DType dtype, int head_dim, int features>
void launch_portable_lolcats_decode(const LolcatsDecodeParams& params, Stream stream) {
    launch_decode_kernels<LolcatsKernel<dtype, head_dim, features>, true>(params, stream);
}

}  // namespace thunderkittens::linear_attention
