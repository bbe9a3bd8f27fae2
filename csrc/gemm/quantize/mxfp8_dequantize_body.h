// The body of mxfp8_dequantize, on any back end: checks, allocation, launch. Host C++ without
// torch.
#pragma once

#include "csrc/common/backend.h"
#include "csrc/gemm/quantize/block_scaled_dispatch.h"

namespace thunderkittens::block_scaled {

template <class Tensor>
Tensor mxfp8_dequantize_body(const Backend<Tensor>& on, const Tensor& data, const Tensor& scale,
                             typename Backend<Tensor>::ScalarType type, bool swizzle) {
    constexpr const char* OP = "thunderkittens::mxfp8_dequantize";
    constexpr int BLOCK = 32;
    check_cuda(OP, "data", data);
    const DType data_dtype = check_dtype(OP, "data", data, {DType::e4m3, DType::e5m2});
    check_dims(OP, "data", data, {2, 3});
    check_same_device(OP, "scale", scale, "data", data);
    TK_CHECK(scale.element_size() == 1, OP, ": scale must be torch.float8_e8m0fnu, got ",
             dtype_text_of(scale));
    const std::optional<DType> dtype = Backend<Tensor>::dtype_of(type);
    const int64_t batch = data.dim() == 3 ? data.size(0) : 1;
    const int64_t rows = data.size(-2), columns = data.size(-1);
    const ScaleShape shape = scale_shape(rows, columns, BLOCK, swizzle);
    TK_CHECK(scale.dim() == data.dim() && scale.size(-1) == shape.columns &&
                 scale.size(-2) == shape.rows && (data.dim() == 2 || scale.size(0) == batch),
             OP, ": scale has shape ", shape_text(scale), "; expected ", shape.rows, " x ",
             shape.columns, " for data of shape ", shape_text(data));
    const Mxfp8Problem problem{.rows = rows,
                               .columns = columns,
                               .batch = batch,
                               .dtype = dtype.value_or(DType::int32),
                               .data_dtype = data_dtype};
    const auto guard = on.guard(data);
    const DeviceProperties& device = on.device(data);
    if (const std::string reason = unsupported(problem, device); !reason.empty()) {
        throw std::runtime_error(concat(OP, ": ", reason));
    }
    const Tensor out = data.dim() == 3 ? empty({batch, rows, columns}, type, data)
                                       : empty({rows, columns}, type, data);
    if (out.numel() == 0) return out;
    const bool rows_adjacent = columns == 1 || data.stride(-1) == 1;
    const Tensor codes = rows_adjacent ? data : packed(data);
    const Tensor scales = packed(scale);
    const DequantizeParams params{.data = matrix_of(as_4d(codes)),
                                  .scale = scales.data_ptr(),
                                  .out = out.data_ptr(),
                                  .swizzle = swizzle};
    const Mxfp8Dequantize config =
        on.chosen("mxfp8_dequantize", choose_mxfp8_dequantize(problem, device));
    auto scope = on.launch("mxfp8_dequantize", config, data);
    scope.may_read("data", codes);
    scope.may_read("scale", scales);
    scope.may_write("out", out);
    launch(config, params, scope.stream);
    return out;
}

}  // namespace thunderkittens::block_scaled
