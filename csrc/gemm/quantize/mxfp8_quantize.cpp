// thunderkittens::mxfp8_quantize on CUDA.
#include "csrc/common/tensor.h"
#include "csrc/gemm/quantize/mxfp8_quantize_body.h"

STABLE_TORCH_LIBRARY_IMPL(thunderkittens, CUDA, m) {
    using namespace thunderkittens;
    m.impl("mxfp8_quantize", TORCH_BOX(&OnGpu<&block_scaled::mxfp8_quantize_body<Tensor>>::call));
}
