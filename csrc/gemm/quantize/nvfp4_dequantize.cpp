// thunderkittens::nvfp4_dequantize on CUDA.
#include "csrc/common/tensor.h"
#include "csrc/gemm/quantize/nvfp4_dequantize_body.h"

STABLE_TORCH_LIBRARY_IMPL(thunderkittens, CUDA, m) {
    using namespace thunderkittens;
    m.impl("nvfp4_dequantize",
           TORCH_BOX(&OnGpu<&block_scaled::nvfp4_dequantize_body<Tensor>>::call));
}
