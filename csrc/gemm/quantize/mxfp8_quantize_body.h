// The body of mxfp8_quantize, on any back end: checks, a copy of what has neither rows nor columns
// of adjacent elements, allocation, launch. Host C++ without torch.
#pragma once

#include <tuple>
#include <utility>

#include "csrc/common/accesses.h"
#include "csrc/common/backend.h"
#include "csrc/gemm/quantize/block_scaled_dispatch.h"

namespace thunderkittens::block_scaled {

template <class Tensor>
struct Mxfp8Outputs {
    Tensor data, scale;
};
template <class Tensor>
Mxfp8Outputs<Tensor> mxfp8_outputs(const Tensor& x, int64_t batch, int64_t rows, int64_t columns,
                                   DType type, bool swizzle) {
    const ScaleShape scale = scale_shape(rows, columns, 32, swizzle);
    const bool batched = x.dim() == 3;
    return {empty_batch(batched, {batch, rows, columns}, type, x),
            empty_batch(batched, {batch, scale.rows, scale.columns}, Backend<Tensor>::E8M0, x)};
}

template <class Tensor>
std::tuple<Tensor, Tensor, Tensor, Tensor> mxfp8_quantize_body(
    const Backend<Tensor>& on, const Tensor& x, typename Backend<Tensor>::ScalarType type,
    bool floor, bool swizzle, bool transpose) {
    constexpr const char* OP = "thunderkittens::mxfp8_quantize";
    check_cuda(OP, "x", x);
    const DType dtype = check_dtype(OP, "x", x, {DType::bf16, DType::fp16, DType::fp32});
    check_dims(OP, "x", x, {2, 3});
    const std::optional<DType> data_dtype = Backend<Tensor>::dtype_of(type);
    TK_CHECK(data_dtype && is_fp8(*data_dtype), OP, ": dtype is ",
             Backend<Tensor>::dtype_text(type),
             "; supported are torch.float8_e4m3fn and torch.float8_e5m2");
    const auto guard = on.guard(x);
    const int64_t batch = x.dim() == 3 ? x.size(0) : 1, rows = x.size(-2), columns = x.size(-1);
    const auto [data, scale] = mxfp8_outputs(x, batch, rows, columns, *data_dtype, swizzle);
    const auto [data_t, scale_t] =
        transpose ? mxfp8_outputs(x, batch, columns, rows, *data_dtype, swizzle)
                  : Mxfp8Outputs<Tensor>{empty({0}, type, x), empty({0}, Backend<Tensor>::E8M0, x)};
    if (x.numel() == 0) return {data, scale, data_t, scale_t};

    // As it lies in memory; where both orders can be read, by that which is faster.
    const auto fits = [&](const View& view) {
        return fits_tensor_map(view, static_cast<int>(x.element_size()));
    };
    const View given = as_4d(x);
    const bool down = !fits(given) && (fits(transposed(given)) ||
                                       (!rows_adjacent(given) && rows_adjacent(transposed(given))));
    const Tensor source = down || rows_adjacent(given) ? x : copy_for_tensor_map(x);
    const bool row_major = !down;
    const View view = down ? transposed(given) : as_4d(source);
    const Mxfp8Problem problem{.rows = rows,
                               .columns = columns,
                               .batch = batch,
                               .dtype = dtype,
                               .data_dtype = *data_dtype,
                               .transpose = transpose,
                               .row_major = row_major};
    const DeviceProperties& device = on.device(x);
    check_supported(OP, unsupported(problem, device));
    Mxfp8Params params{.x = matrix_of(view),
                       .data = data.data_ptr(),
                       .scale = scale.data_ptr(),
                       .down_data = transpose ? data_t.data_ptr() : nullptr,
                       .down_scale = transpose ? scale_t.data_ptr() : nullptr,
                       .swizzle = swizzle,
                       .floor = floor};
    if (!row_major) {
        std::swap(params.data, params.down_data);
        std::swap(params.scale, params.down_scale);
    }
    const Mxfp8Quantize config =
        on.chosen("mxfp8_quantize", choose_mxfp8_quantize(problem, device));
    auto scope = on.launch("mxfp8_quantize", config, x);
    scope.may_read("x", source);
    writes(scope, "data", data, "scale", scale, "data_t", data_t, "scale_t", scale_t);
    launch(config, params, scope.stream);
    return {data, scale, data_t, scale_t};
}

}  // namespace thunderkittens::block_scaled
