// thunderkittens::gemm_backward on CUDA.
#include "csrc/common/tensor.h"
#include "csrc/gemm/dense/gemm_backward_body.h"

namespace thunderkittens::gemm_backward {
namespace {

Tensor gemm_backward(const Tensor& grad, const Tensor& z, int64_t activation, int64_t gate) {
    return gemm_backward_body(gpu, grad, z, activation, gate);
}

}  // namespace
}  // namespace thunderkittens::gemm_backward

STABLE_TORCH_LIBRARY_IMPL(thunderkittens, CUDA, m) {
    m.impl("gemm_backward", TORCH_BOX(&thunderkittens::gemm_backward::gemm_backward));
}
