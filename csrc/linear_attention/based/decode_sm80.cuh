// The step of decode_sm90.cuh for every GPU from compute capability 8.0 on.
#pragma once

#include "csrc/linear_attention/based/decode_sm90.cuh"

namespace thunderkittens::linear_attention {
namespace sm80 {

template <class T>
__global__ __launch_bounds__(MAX_BASED_DECODE_THREADS) void based_portable_decode_kernel(
    const __grid_constant__ BasedDecodeGlobals<T> g) {
    decode_token(g);
}

}  // namespace sm80

template <DType dtype>
void launch_portable_based_decode(const BasedDecodeParams& params, Stream stream) {
    launch_decode(sm80::based_portable_decode_kernel<type_of<dtype>>, params, stream);
}

}  // namespace thunderkittens::linear_attention
