// The body of mxfp8_dequantize, on any back end: checks, allocation, launch. Host C++ without
// torch.
#pragma once

#include "csrc/common/accesses.h"
#include "csrc/gemm/quantize/block_scaled_checks.h"
#include "csrc/gemm/quantize/block_scaled_dispatch.h"

namespace thunderkittens::block_scaled {

template <class Tensor>
Tensor mxfp8_dequantize_body(const Backend<Tensor>& on, const Tensor& data, const Tensor& scale,
                             typename Backend<Tensor>::ScalarType type, bool swizzle) {
    constexpr const char* OP = "thunderkittens::mxfp8_dequantize";
    check_cuda(OP, "data", data);
    check_dims(OP, "data", data, {2, 3});
    check_same_device(OP, "scale", scale, "data", data);
    const DType data_dtype = check_mxfp8(OP, "data", data, scale, swizzle);
    const std::optional<DType> dtype = Backend<Tensor>::dtype_of(type);
    const int64_t batch = data.dim() == 3 ? data.size(0) : 1;
    const int64_t rows = data.size(-2), columns = data.size(-1);
    const Mxfp8Problem problem{.rows = rows,
                               .columns = columns,
                               .batch = batch,
                               .dtype = dtype.value_or(DType::int32),
                               .data_dtype = data_dtype};
    const auto guard = on.guard(data);
    const DeviceProperties& device = on.device(data);
    check_supported(OP, unsupported(problem, device));
    const Tensor out = empty_batch(data.dim() == 3, {batch, rows, columns}, type, data);
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
    reads(scope, "data", codes, "scale", scales);
    scope.may_write("out", out);
    launch(config, params, scope.stream);
    return out;
}

}  // namespace thunderkittens::block_scaled
