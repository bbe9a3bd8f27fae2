// thunderkittens::fp8_quantize on CUDA: checks, allocation, the passes.
#include "csrc/gemm/quantize/fp8_quantize.h"

#include <tuple>
#include <utility>

#include "csrc/common/tensor.h"

namespace thunderkittens::fp8_quantize {
namespace {

constexpr const char* OP = "thunderkittens::fp8_quantize";

constexpr DType DTYPES[] = {DType::bf16, DType::fp16, DType::fp32};
constexpr Config config_at(std::size_t i) { return {DTYPES[i / 8], PASSES[i % 8]}; }
template <std::size_t... indices>
void launch_any(const Config& config, const Params& params, Stream stream,
                std::index_sequence<indices...>) {
    const bool found =
        ((config == config_at(indices) ? (launch<config_at(indices)>(params, stream), true)
                                       : false) ||
         ...);
    TK_CHECK(found, OP, ": no kernel ", kernel_name(config));
}

Tensor allocate_scales(int granularity, int64_t m, int64_t k, const Tensor& like) {
    const ScaleShape shape = scale_shape(granularity, m, k);
    if (static_cast<Granularity>(granularity) == Granularity::tensor) {
        return empty({}, ScalarType::Float, like);
    }
    const int64_t pitch = std::max<int64_t>(scale_pitch(shape), 1);
    const std::array<int64_t, 2> sizes{shape.rows, shape.cols};
    const std::array<int64_t, 2> strides{shape.rows_adjacent ? 1 : pitch,
                                         shape.rows_adjacent ? pitch : 1};
    return empty_strided(sizes, strides, ScalarType::Float, like);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> fp8_quantize(const Tensor& input, int64_t granularity,
                                                        std::optional<ScalarType> out_type,
                                                        const std::optional<Tensor>& given,
                                                        bool transposed) {
    check_cuda(OP, "x", input);
    check_dims(OP, "x", input, {2});
    const DType dtype = check_dtype(OP, "x", input, {DType::bf16, DType::fp16, DType::fp32});
    TK_CHECK(granularity >= 0 && granularity <= 3, OP, ": granularity is ", granularity,
             "; it must be from 0 to 3");
    const ScalarType type = out_type.value_or(ScalarType::Float8_e4m3fn);
    const std::optional<DType> out_dtype = dtype_of(type);
    TK_CHECK(out_dtype && is_fp8(*out_dtype), OP, ": dtype is ", dtype_text(type),
             "; supported are torch.float8_e4m3fn and torch.float8_e5m2");
    if (given) {
        check_same_device(OP, "scale", *given, "x", input);
        check_dtype(OP, "scale", *given, {DType::fp32});
        TK_CHECK(given->numel() == 1 && granularity == 0, OP,
                 ": a scale can be given for granularity 0 only, and has one element; got shape ",
                 shape_text(*given));
    }
    const DeviceGuard guard(input.get_device_index());
    const int64_t m = input.size(0), k = input.size(1);
    const bool adjacent = k <= 1 || input.stride(1) == 1;
    const Tensor x = adjacent ? input : packed(input);
    const Problem problem{.m = m,
                          .k = k,
                          .dtype = dtype,
                          .out_dtype = *out_dtype,
                          .granularity = static_cast<int>(granularity),
                          .given_scale = given.has_value(),
                          .transposed = transposed};
    const DeviceProperties& device = device_properties(input.get_device_index());
    if (const std::string reason = unsupported(problem, device); !reason.empty()) {
        throw std::runtime_error(concat(OP, ": ", reason));
    }
    Tensor out = empty({m, k}, type, input);
    Tensor scales = allocate_scales(problem.granularity, m, k, input);
    Tensor out_t = transposed ? empty({k, m}, type, input) : empty({0}, type, input);
    Tensor scales_t = transposed ? allocate_scales(problem.granularity, k, m, input)
                                 : empty({0}, ScalarType::Float, input);
    Tensor amax = empty({amax_words(problem)}, ScalarType::Int, input);
    if (amax.numel() > 0) torch::stable::zero_(amax);
    const int64_t bytes = size_in_bytes(dtype);
    const bool aligned = k % 8 == 0 && reinterpret_cast<uintptr_t>(x.data_ptr()) % 16 == 0 &&
                         (m <= 1 || x.stride(0) * bytes % 16 == 0);
    const Params params{
        .x = x.data_ptr(),
        .m = m,
        .k = k,
        .stride = m > 1 ? x.stride(0) : k,
        .out = out.data_ptr(),
        .out_t = transposed ? out_t.data_ptr() : nullptr,
        .scales = static_cast<float*>(scales.data_ptr()),
        .scales_t = transposed ? static_cast<float*>(scales_t.data_ptr()) : nullptr,
        .scale_stride = scale_pitch(scale_shape(problem.granularity, m, k)),
        .scale_stride_t = scale_pitch(scale_shape(problem.granularity, k, m)),
        .amax = static_cast<uint32_t*>(amax.data_ptr()),
        .given = given ? static_cast<const float*>(given->data_ptr()) : nullptr,
        .out_dtype = *out_dtype,
        .aligned = aligned,
        .pitch_t = m,
    };
    const Stream stream = current_stream(input);
    run_passes(problem, params, device.sm_count, [&](const Config& config, const Params& pass) {
        launch_any(config, pass, stream, std::make_index_sequence<24>());
    });
    return {out, scales, out_t, scales_t};
}

}  // namespace
}  // namespace thunderkittens::fp8_quantize

STABLE_TORCH_LIBRARY_IMPL(thunderkittens, CUDA, m) {
    m.impl("fp8_quantize", TORCH_BOX(&thunderkittens::fp8_quantize::fp8_quantize));
}
