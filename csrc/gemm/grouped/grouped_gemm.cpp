// thunderkittens::grouped_gemm and its twin without autograd on CUDA.
#include "csrc/common/tensor.h"
#include "csrc/gemm/grouped/grouped_gemm_body.h"

STABLE_TORCH_LIBRARY_IMPL(thunderkittens, CUDA, m) {
    using namespace thunderkittens;
    m.impl("grouped_gemm", TORCH_BOX(&OnGpu<&grouped_gemm::grouped_gemm_body<Tensor>>::call));
    m.impl("grouped_gemm_forward",
           TORCH_BOX(&OnGpu<&grouped_gemm::grouped_gemm_body<Tensor>>::call));
}
