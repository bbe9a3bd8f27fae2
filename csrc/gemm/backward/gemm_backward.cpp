// thunderkittens::gemm_backward on CUDA.
#include "csrc/common/tensor.h"
#include "csrc/gemm/backward/gemm_backward_body.h"

STABLE_TORCH_LIBRARY_IMPL(thunderkittens, CUDA, m) {
    using namespace thunderkittens;
    m.impl("gemm_backward", TORCH_BOX(&OnGpu<&gemm_backward::gemm_backward_body<Tensor>>::call));
}
