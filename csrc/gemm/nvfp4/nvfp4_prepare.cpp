// thunderkittens::nvfp4_prepare on CUDA, and its inverse.
#include "csrc/common/tensor.h"
#include "csrc/gemm/nvfp4/nvfp4_prepare_body.h"

STABLE_TORCH_LIBRARY_IMPL(thunderkittens, CUDA, m) {
    using namespace thunderkittens;
    m.impl("nvfp4_prepare", TORCH_BOX(&OnGpu<&nvfp4_gemm::nvfp4_prepare_body<Tensor>>::call));
    m.impl("nvfp4_dequantize.prepared",
           TORCH_BOX(&OnGpu<&nvfp4_gemm::nvfp4_restore_body<Tensor>>::call));
}
