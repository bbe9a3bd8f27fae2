// thunderkittens::nvfp4_quantize on CUDA.
#include "csrc/common/tensor.h"
#include "csrc/gemm/quantize/nvfp4_quantize_body.h"

STABLE_TORCH_LIBRARY_IMPL(thunderkittens, CUDA, m) {
    using namespace thunderkittens;
    m.impl("nvfp4_quantize", TORCH_BOX(&OnGpu<&block_scaled::nvfp4_quantize_body<Tensor>>::call));
}
