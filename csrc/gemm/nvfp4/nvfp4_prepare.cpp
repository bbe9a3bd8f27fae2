// thunderkittens::nvfp4_prepare on CUDA, and its inverse.
#include "csrc/common/tensor.h"
#include "csrc/gemm/nvfp4/nvfp4_prepare_body.h"

namespace thunderkittens::nvfp4_gemm {
namespace {

Tensor nvfp4_prepare(const Tensor& data, const Tensor& block_scale, bool swizzle) {
    return nvfp4_prepare_body(gpu, data, block_scale, swizzle);
}

Tensor nvfp4_restore(const Tensor& data, const Tensor& global_scale, int64_t rows, int64_t columns,
                     ScalarType type) {
    return nvfp4_restore_body(gpu, data, global_scale, rows, columns, type);
}

}  // namespace
}  // namespace thunderkittens::nvfp4_gemm

STABLE_TORCH_LIBRARY_IMPL(thunderkittens, CUDA, m) {
    m.impl("nvfp4_prepare", TORCH_BOX(&thunderkittens::nvfp4_gemm::nvfp4_prepare));
    m.impl("nvfp4_dequantize.prepared", TORCH_BOX(&thunderkittens::nvfp4_gemm::nvfp4_restore));
}
