// The body of fp8_quantize, on any back end: checks, allocation, the passes. Host C++ without
// torch.
#pragma once

#include "csrc/common/accesses.h"
#include "csrc/common/backend.h"
#include "csrc/gemm/common/run_listed.h"
#include "csrc/gemm/quantize/fp8_quantize.h"

namespace thunderkittens::fp8_quantize {

constexpr const char* OP = "thunderkittens::fp8_quantize";

// The results; the last two, of the transpose, have no elements where it is not asked for.
template <class Tensor>
struct Quantised {
    Tensor out, scale, out_t, scale_t;
};

template <class Tensor>
Tensor allocate_scales(const Problem& p, int64_t m, int64_t k, const Tensor& like) {
    const auto type = Backend<Tensor>::scalar_type(DType::fp32);
    const ScaleShape shape = scale_shape(p.granularity, m, k);
    if (static_cast<Granularity>(p.granularity) == Granularity::tensor) {
        return empty(std::initializer_list<int64_t>{}, type, like);
    }
    const int64_t pitch = std::max<int64_t>(scale_pitch(shape), 1);
    const std::array<int64_t, 2> sizes{shape.rows, shape.cols};
    const std::array<int64_t, 2> strides{shape.rows_adjacent ? 1 : pitch,
                                         shape.rows_adjacent ? pitch : 1};
    return Backend<Tensor>::empty_strided(sizes, strides, type, like);
}

// What a call is, once it has been checked.
template <class Tensor>
Problem check_call(const Tensor& x, int64_t granularity,
                   std::optional<typename Backend<Tensor>::ScalarType> out_type,
                   const std::optional<Tensor>& given) {
    using Types = Backend<Tensor>;
    check_cuda(OP, "x", x);
    check_dims(OP, "x", x, {2});
    const DType dtype = check_dtype(OP, "x", x, {DType::bf16, DType::fp16, DType::fp32});
    TK_CHECK(granularity >= 0 && granularity <= 3, OP, ": granularity is ", granularity,
             "; it must be from 0 to 3");
    const std::optional<DType> out_dtype = out_type ? Types::dtype_of(*out_type) : DType::e4m3;
    TK_CHECK(out_dtype && is_fp8(*out_dtype), OP, ": dtype is ", Types::dtype_text(*out_type),
             "; supported are torch.float8_e4m3fn and torch.float8_e5m2");
    if (given) {
        check_same_device(OP, "scale", *given, "x", x);
        check_dtype(OP, "scale", *given, {DType::fp32});
        TK_CHECK(given->numel() == 1 && granularity == 0, OP,
                 ": a scale can be given for granularity 0 only, and has one element; got shape ",
                 shape_text(*given));
    }
    return {.m = x.size(0),
            .k = x.size(1),
            .dtype = dtype,
            .out_dtype = *out_dtype,
            .granularity = static_cast<int>(granularity),
            .given_scale = given.has_value()};
}

template <class Tensor>
Quantised<Tensor> fp8_quantize_body(const Backend<Tensor>& on, const Tensor& input,
                                    int64_t granularity,
                                    std::optional<typename Backend<Tensor>::ScalarType> out_type,
                                    const std::optional<Tensor>& given, bool transposed) {
    Problem problem = check_call(input, granularity, out_type, given);
    problem.transposed = transposed;
    const auto guard = on.guard(input);
    const int64_t m = problem.m, k = problem.k;
    const Tensor x = k <= 1 || input.stride(1) == 1 ? input : packed(input);
    check_supported(OP, unsupported(problem, on.device(input)));
    const auto type = Backend<Tensor>::scalar_type(problem.out_dtype);
    Quantised<Tensor> result{
        empty({m, k}, type, input), allocate_scales(problem, m, k, input),
        transposed ? empty({k, m}, type, input) : empty({0}, type, input),
        transposed ? allocate_scales(problem, k, m, input) : empty({0}, DType::fp32, input)};
    Tensor amax = empty({amax_words(problem)}, DType::int32, input);
    if (amax.numel() > 0) zero_(amax);
    const Params params{
        .x = x.data_ptr(),
        .m = m,
        .k = k,
        .stride = m > 1 ? x.stride(0) : k,
        .out = result.out.data_ptr(),
        .out_t = transposed ? result.out_t.data_ptr() : nullptr,
        .scales = data_as<float>(result.scale),
        .scales_t = transposed ? data_as<float>(result.scale_t) : nullptr,
        .scale_stride = scale_pitch(scale_shape(problem.granularity, m, k)),
        .scale_stride_t = scale_pitch(scale_shape(problem.granularity, k, m)),
        .amax = data_as<uint32_t>(amax),
        .given = data_as<const float>(given),
        .out_dtype = problem.out_dtype,
        .aligned = k % 8 == 0 && reinterpret_cast<uintptr_t>(x.data_ptr()) % 16 == 0 &&
                   (m <= 1 || x.stride(0) * size_in_bytes(problem.dtype) % 16 == 0),
        .pitch_t = m,
    };
    const auto stream = on.stream(input);
    run_passes(problem, params, on.sms_of_pass(input), !runs_native(on.device(input)),
               [&](const Config& config, const Params& pass) {
                   auto launch = on.launch("fp8_quantize", config, stream);
                   reads(launch, "x", x, "scale", given);
                   writes(launch, "amax", amax, "out", result.out, "scales", result.scale, "out_t",
                          result.out_t, "scales_t", result.scale_t);
                   gemm::run_listed<config_at, CONFIGS>(
                       OP, config, [&]<Config c>() { fp8_quantize::launch<c>(pass, stream); });
               });
    return result;
}

}  // namespace thunderkittens::fp8_quantize
