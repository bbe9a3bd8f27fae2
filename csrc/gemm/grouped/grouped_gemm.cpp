// thunderkittens::grouped_gemm and its twin without autograd on CUDA.
#include "csrc/common/tensor.h"
#include "csrc/gemm/grouped/grouped_gemm_body.h"

namespace thunderkittens::grouped_gemm {
namespace {

Tensor grouped_gemm(const Tensor& a, const Tensor& b, const Tensor& offs) {
    return grouped_gemm_body(gpu, a, b, offs);
}

}  // namespace
}  // namespace thunderkittens::grouped_gemm

STABLE_TORCH_LIBRARY_IMPL(thunderkittens, CUDA, m) {
    m.impl("grouped_gemm", TORCH_BOX(&thunderkittens::grouped_gemm::grouped_gemm));
    m.impl("grouped_gemm_forward", TORCH_BOX(&thunderkittens::grouped_gemm::grouped_gemm));
}
