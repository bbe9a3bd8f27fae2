// thunderkittens::mxfp8_dequantize on CUDA.
#include "csrc/common/tensor.h"
#include "csrc/gemm/quantize/mxfp8_dequantize_body.h"

STABLE_TORCH_LIBRARY_IMPL(thunderkittens, CUDA, m) {
    using namespace thunderkittens;
    m.impl("mxfp8_dequantize",
           TORCH_BOX(&OnGpu<&block_scaled::mxfp8_dequantize_body<Tensor>>::call));
}
