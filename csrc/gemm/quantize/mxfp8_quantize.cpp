// thunderkittens::mxfp8_quantize on CUDA: checks, a copy of what cannot be read in words of 16
// bytes, allocation, launch.
#include "csrc/common/tensor.h"
#include "csrc/gemm/quantize/block_scaled_dispatch.h"

namespace thunderkittens::block_scaled {
namespace {

constexpr const char* OP = "thunderkittens::mxfp8_quantize";
constexpr int BLOCK = 32;

struct Outputs {
    Tensor data, scale;
};
Outputs outputs(const Tensor& x, int64_t batch, int64_t rows, int64_t columns, ScalarType type,
                bool swizzle) {
    const ScaleShape scale = scale_shape(rows, columns, BLOCK, swizzle);
    constexpr ScalarType E8M0 = ScalarType::Float8_e8m0fnu;
    if (x.dim() == 2) {
        return {empty({rows, columns}, type, x), empty({scale.rows, scale.columns}, E8M0, x)};
    }
    return {empty({batch, rows, columns}, type, x),
            empty({batch, scale.rows, scale.columns}, E8M0, x)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> mxfp8_quantize(const Tensor& x, ScalarType type,
                                                          bool floor, bool swizzle,
                                                          bool transpose) {
    check_cuda(OP, "x", x);
    const DType dtype = check_dtype(OP, "x", x, {DType::bf16, DType::fp16, DType::fp32});
    check_dims(OP, "x", x, {2, 3});
    TK_CHECK(type == ScalarType::Float8_e4m3fn || type == ScalarType::Float8_e5m2, OP,
             ": dtype is ", dtype_text(type),
             "; supported are torch.float8_e4m3fn and torch.float8_e5m2");
    const DeviceGuard guard(x.get_device_index());
    const int64_t batch = x.dim() == 3 ? x.size(0) : 1, rows = x.size(-2), columns = x.size(-1);
    const auto [data, scale] = outputs(x, batch, rows, columns, type, swizzle);
    const auto [data_t, scale_t] =
        transpose ? outputs(x, batch, columns, rows, type, swizzle)
                  : Outputs{empty({0}, type, x), empty({0}, ScalarType::Float8_e8m0fnu, x)};
    if (x.numel() == 0) return {data, scale, data_t, scale_t};

    const Tensor source = for_tensor_map(x, true);
    View view = as_4d(source);
    const bool row_major = fits_tensor_map(view, static_cast<int>(x.element_size()));
    if (!row_major) view = transposed(view);
    const Mxfp8Problem problem{.rows = rows,
                               .columns = columns,
                               .batch = batch,
                               .dtype = dtype,
                               .data_dtype = *dtype_of(type),
                               .transpose = transpose,
                               .row_major = row_major};
    const DeviceProperties& device = device_properties(x.get_device_index());
    if (const std::string reason = unsupported(problem, device); !reason.empty()) {
        throw std::runtime_error(concat(OP, ": ", reason));
    }
    Mxfp8Params params{.x = matrix_of(view), .swizzle = swizzle, .floor = floor};
    params.data = data.data_ptr();
    params.scale = scale.data_ptr();
    if (transpose) {
        params.down_data = data_t.data_ptr();
        params.down_scale = scale_t.data_ptr();
    }
    if (!row_major) {
        std::swap(params.data, params.down_data);
        std::swap(params.scale, params.down_scale);
    }
    launch(choose_mxfp8_quantize(problem, device), params, current_stream(x));
    return {data, scale, data_t, scale_t};
}

}  // namespace
}  // namespace thunderkittens::block_scaled

STABLE_TORCH_LIBRARY_IMPL(thunderkittens, CUDA, m) {
    m.impl("mxfp8_quantize", TORCH_BOX(&thunderkittens::block_scaled::mxfp8_quantize));
}
