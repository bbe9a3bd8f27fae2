// Checks of block-scaled operands that bodies share, on any back end. Host C++ without torch.
#pragma once

#include "csrc/common/backend.h"
#include "csrc/gemm/quantize/block_scaled.h"

namespace thunderkittens::block_scaled {

// The scales of blocks of `block` neighbours of the rows of an operand, of `columns` elements each.
template <class Tensor>
void check_scale_shape(const char* op, const char* name, const Tensor& scale, const Tensor& data,
                       int64_t columns, int block, bool swizzle) {
    const ScaleShape shape = scale_shape(data.size(-2), columns, block, swizzle);
    TK_CHECK(scale.dim() == data.dim() && scale.size(-1) == shape.columns &&
                 scale.size(-2) == shape.rows && (data.dim() == 2 || scale.size(0) == data.size(0)),
             op, ": the scale of ", name, " has shape ", shape_text(scale), "; expected ",
             shape.rows, " x ", shape.columns, " for ", shape_text(data));
}

// An MXFP8 operand; its dtype.
template <class Tensor>
DType check_mxfp8(const char* op, const char* name, const Tensor& data, const Tensor& scale,
                  bool swizzle) {
    const DType dtype = check_dtype(op, name, data, {DType::e4m3, DType::e5m2});
    TK_CHECK(scale.element_size() == 1, op, ": the scale of ", name,
             " must be torch.float8_e8m0fnu, got ", dtype_text_of(scale));
    check_scale_shape(op, name, scale, data, data.size(-1), 32, swizzle);
    return dtype;
}

// NVFP4 codes, two a byte, and the scales of their blocks.
template <class Tensor>
void check_nvfp4(const char* op, const Tensor& data, const Tensor& block_scale, bool swizzle) {
    using Types = Backend<Tensor>;
    TK_CHECK(data.scalar_type() == Types::E2M1X2 || data.scalar_type() == Types::BYTE, op,
             ": data must be torch.float4_e2m1fn_x2 or torch.uint8, got ", dtype_text_of(data));
    check_dims(op, "data", data, {2, 3});
    check_same_device(op, "block_scale", block_scale, "data", data);
    check_dtype(op, "block_scale", block_scale, {DType::e4m3});
    check_scale_shape(op, "data", block_scale, data, 2 * data.size(-1), 16, swizzle);
}

}  // namespace thunderkittens::block_scaled
