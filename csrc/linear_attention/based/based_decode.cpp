// The op based_decode for CUDA.
#include "csrc/common/tensor.h"
#include "csrc/linear_attention/based/based_decode_body.h"

namespace thunderkittens::linear_attention {

Tensor based_decode(const Tensor& q, const Tensor& k, const Tensor& v, Tensor numerator,
                    Tensor denominator, bool normalize, double eps) {
    return based_decode_body(gpu, q, k, v, numerator, denominator, normalize, eps);
}

STABLE_TORCH_LIBRARY_IMPL(thunderkittens, CUDA, m) {
    m.impl("based_decode", TORCH_BOX(&based_decode));
}

}  // namespace thunderkittens::linear_attention
