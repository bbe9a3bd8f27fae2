// The body of nvfp4_dequantize, on any back end: checks, allocation, launch. Host C++ without
// torch.
#pragma once

#include "csrc/common/backend.h"
#include "csrc/gemm/quantize/block_scaled_dispatch.h"

namespace thunderkittens::block_scaled {

template <class Tensor>
Tensor nvfp4_dequantize_body(const Backend<Tensor>& on, const Tensor& data,
                             const Tensor& block_scale, const Tensor& global_scale,
                             typename Backend<Tensor>::ScalarType type, bool swizzle) {
    using Types = Backend<Tensor>;
    constexpr const char* OP = "thunderkittens::nvfp4_dequantize";
    constexpr int BLOCK = 16;
    check_cuda(OP, "data", data);
    TK_CHECK(data.scalar_type() == Types::E2M1X2 || data.scalar_type() == Types::BYTE, OP,
             ": data must be torch.float4_e2m1fn_x2 or torch.uint8, got ", dtype_text_of(data));
    check_dims(OP, "data", data, {2, 3});
    check_same_device(OP, "block_scale", block_scale, "data", data);
    check_same_device(OP, "global_scale", global_scale, "data", data);
    check_dtype(OP, "block_scale", block_scale, {DType::e4m3});
    check_dtype(OP, "global_scale", global_scale, {DType::fp32});
    const std::optional<DType> dtype = Types::dtype_of(type);
    const int64_t batch = data.dim() == 3 ? data.size(0) : 1;
    const int64_t rows = data.size(-2), columns = 2 * data.size(-1);
    const ScaleShape shape = scale_shape(rows, columns, BLOCK, swizzle);
    TK_CHECK(block_scale.dim() == data.dim() && block_scale.size(-1) == shape.columns &&
                 block_scale.size(-2) == shape.rows &&
                 (data.dim() == 2 || block_scale.size(0) == batch),
             OP, ": block_scale has shape ", shape_text(block_scale), "; expected ", shape.rows,
             " x ", shape.columns, " for data of shape ", shape_text(data));
    TK_CHECK(global_scale.dim() == data.dim() - 2 && global_scale.numel() == batch, OP,
             ": global_scale has shape ", shape_text(global_scale), ", data has shape ",
             shape_text(data), "; expected one value per matrix");
    const Nvfp4Problem problem{
        .rows = rows, .columns = columns, .batch = batch, .dtype = dtype.value_or(DType::int32)};
    const auto guard = on.guard(data);
    const DeviceProperties& device = on.device(data);
    if (const std::string reason = unsupported(problem, device); !reason.empty()) {
        throw std::runtime_error(concat(OP, ": ", reason));
    }
    const Tensor out = data.dim() == 3 ? empty({batch, rows, columns}, type, data)
                                       : empty({rows, columns}, type, data);
    if (out.numel() == 0) return out;
    const bool rows_adjacent = data.size(-1) == 1 || data.stride(-1) == 1;
    // As bytes, because torch has no copy of float4_e2m1fn_x2.
    const Tensor codes = rows_adjacent ? data : packed(Types::view_as(Types::BYTE, data));
    const Tensor scales = packed(block_scale);
    const Tensor globals = packed(global_scale);
    DequantizeParams params{.data = matrix_of(as_4d(codes)),
                            .scale = scales.data_ptr(),
                            .global_scale = globals.data_ptr(),
                            .out = out.data_ptr(),
                            .swizzle = swizzle};
    params.data.columns = columns;
    const Nvfp4Dequantize config =
        on.chosen("nvfp4_dequantize", choose_nvfp4_dequantize(problem, device));
    auto scope = on.launch("nvfp4_dequantize", config, data);
    scope.may_read("data", codes);
    scope.may_read("block_scale", scales);
    scope.may_read("global_scale", globals);
    scope.may_write("out", out);
    launch(config, params, scope.stream);
    return out;
}

}  // namespace thunderkittens::block_scaled
