// The op of LoLCATS's decoding for CUDA.
#include "csrc/common/tensor.h"
#include "csrc/linear_attention/lolcats/lolcats_decode_body.h"

namespace thunderkittens::linear_attention {

Tensor lolcats_decode(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& q_map,
                      const Tensor& k_map, const Tensor& alpha, const Tensor& beta,
                      const Tensor& numerator, const Tensor& denominator, const Tensor& keys,
                      const Tensor& values, const Tensor& lengths, bool sliding) {
    return lolcats_decode_body<Tensor>(gpu, {q, k, v, q_map, k_map, alpha, beta},
                                       {numerator, denominator, keys, values, lengths}, sliding);
}

STABLE_TORCH_LIBRARY_IMPL(thunderkittens, CUDA, m) {
    m.impl("lolcats_decode", TORCH_BOX(&lolcats_decode));
}

}  // namespace thunderkittens::linear_attention
