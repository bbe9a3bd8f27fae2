// What the bodies of rms_norm_quantize and layer_norm_quantize share: checks, allocation, choice,
// launch. Host C++ without torch.
#pragma once

#include <vector>

#include "csrc/norm/bodies.h"
#include "csrc/norm/quantize/quantize.h"

namespace thunderkittens::norm {

template <class Tensor>
struct Quantized {
    Tensor data, scale, sum;
};

// Codes of x and their scales, without their values, beside the sum; what the kernel is told of
// them.
template <class Tensor>
Quantized<Tensor> allocate_codes(const Tensor& x, int64_t rows, Tensor sum,
                                 QuantizeParams& params) {
    using On = Backend<Tensor>;
    const std::span<const int64_t> sizes = sizes_of(x);
    const int64_t width = sizes.back();
    std::vector<int64_t> shape(sizes.begin(), sizes.end());
    switch (params.output) {
        case Output::tensor:
            return {empty(sizes, DType::e4m3, x),
                    empty(std::initializer_list<int64_t>{}, DType::fp32, x), std::move(sum)};
        case Output::row:
            shape.back() = 1;
            return {empty(sizes, DType::e4m3, x), empty(std::span(shape), DType::fp32, x),
                    std::move(sum)};
        case Output::row_block: {
            // Scales of neighbouring rows are adjacent, as products read them.
            std::vector<int64_t> strides(shape.size());
            int64_t packed = 1;
            for (std::size_t i = shape.size() - 1; i-- > 0;) {
                strides[i] = packed;
                packed *= std::max<int64_t>(shape[i], 1);
            }
            params.scale_pitch = std::max<int64_t>(round_up(rows, 4), 1);
            strides.back() = params.scale_pitch;
            shape.back() = ceil_div(width, GROUP);
            return {empty(sizes, DType::e4m3, x),
                    On::empty_strided(shape, strides, On::scalar_type(DType::fp32), x),
                    std::move(sum)};
        }
        case Output::nvfp4: break;
    }
    shape.back() = width / 2;
    const Tensor data = On::view_as(On::E2M1X2, empty(std::span(shape), On::BYTE, x));
    params.scale_pitch = ceil_div(width, NVFP4_BLOCK);
    if (params.swizzled) {
        params.scale_pitch = round_up(params.scale_pitch, 4);
        params.padded_rows = round_up(rows, GROUP);
        return {data, empty({params.padded_rows, params.scale_pitch}, DType::e4m3, x),
                std::move(sum)};
    }
    shape.back() = params.scale_pitch;
    return {data, empty(std::span(shape), DType::e4m3, x), std::move(sum)};
}

template <class Tensor>
void check_given_scale(const char* op, const std::optional<Tensor>& given, Output output,
                       const Tensor& x) {
    if (output == Output::tensor || output == Output::nvfp4) {
        TK_CHECK(given, op, ": output ", static_cast<int>(output), " needs a scale");
    } else {
        TK_CHECK(!given, op, ": output ", static_cast<int>(output),
                 " finds its scales, and takes none");
    }
    if (!given) return;
    check_same_device(op, "scale", *given, "x", x);
    check_dtype(op, "scale", *given, {DType::fp32});
    TK_CHECK(given->dim() == 0, op, ": scale has shape ", shape_text(*given), "; it must be ()");
}

template <class Tensor>
Quantized<Tensor> quantize_body(const Backend<Tensor>& on, const char* op, const Tensor& x,
                                const Options<Tensor>& o, const std::optional<Tensor>& given,
                                int64_t output, bool swizzle) {
    QuantizeParams params;
    const DType dtype = check_dtype(op, "x", x, {DType::bf16, DType::fp16, DType::fp32});
    const Problem checked = check_call(op, x, dtype, o, params.norm);
    QuantizeProblem problem{.width = checked.width,
                            .dtype = dtype,
                            .sum_dtype = dtype,
                            .output = static_cast<int>(output),
                            .layer = o.layer};
    check_like(op, "residual", o.residual, x);
    if (o.residual) {
        problem.sum_dtype = check_dtype(op, "residual", *o.residual, {dtype, DType::fp32});
    }
    const auto guard = on.guard(x);
    const DeviceProperties& device = on.device(x);
    TK_CHECK(output >= 0 && output < OUTPUTS, op, ": output is ", output, "; it must be from 0 to ",
             OUTPUTS - 1);
    params.output = static_cast<Output>(output);
    check_given_scale(op, given, params.output, x);
    const RowOperands<Tensor> rows(x, 1, {{&o.residual, &params.norm.residual}}, &params.norm.x);
    problem.rows = rows.rows.count;
    check_supported(op, unsupported_quantize(problem, device));
    params.swizzled = swizzle && params.output == Output::nvfp4;
    Tensor sum = o.residual ? empty(sizes_of(x), o.residual->scalar_type(), x)
                            : empty({0}, x.scalar_type(), x);
    Quantized<Tensor> result = allocate_codes(x, problem.rows, std::move(sum), params);
    if (problem.rows == 0) {
        if (params.output == Output::tensor) copy_(result.scale, *given);
        return result;
    }
    const std::optional<Tensor> weight = packed(o.weight), bias = packed(o.bias);
    Params& norm = params.norm;
    norm.rows = rows.rows;
    norm.weight = data_as<const void>(weight), norm.bias = data_as<const void>(bias);
    norm.out = result.data.data_ptr();
    norm.sum = o.residual ? result.sum.data_ptr() : nullptr;
    params.dtype = dtype, params.sum_dtype = problem.sum_dtype;
    params.weight_dtype = norm.wide_weight ? DType::fp32 : dtype;
    params.scale = result.scale.data_ptr();
    params.given = data_as<const float>(given);
    problem.aligned = rows.aligned && aligned16(norm.weight) && aligned16(norm.bias);
    norm.aligned = problem.aligned;
    const QuantizeConfig config = on.chosen("rms_norm_quantize", choose_quantize(problem, device));
    set_team(norm, {.path = config.path});
    auto launch = on.launch("rms_norm_quantize", config, x);
    for (const auto& [tensor, place] : rows.all()) launch.may_read("x or residual", tensor);
    launch.may_read("weight", weight);
    launch.may_read("bias", bias);
    launch.may_read("scale", given);
    launch.may_write("data", result.data);
    launch.may_write("scales", result.scale);
    if (o.residual) launch.may_write("sum", result.sum);
    const bool found =
        gemm::launch_listed<quantize_at, QUANTIZE_CONFIGS>(config, [&]<QuantizeConfig c>() {
            if constexpr (!c.portable || BUILDS_PORTABLE) {
                norm::launch_quantize<c>(params, launch.stream);
            }
            return true;
        });
    TK_CHECK(found, op, ": no kernel ", kernel_name(config));
    return result;
}

}  // namespace thunderkittens::norm
