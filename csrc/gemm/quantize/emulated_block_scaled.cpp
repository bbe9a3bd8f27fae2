// The quantisers of the block-scaled formats and their inverses on the emulator, as mxfp8_*.cpp and
// nvfp4_*.cpp do them on CUDA tensors. Codes and scales travel as bytes, a seed as two words.
#include "csrc/common/emulated.h"
#include "csrc/gemm/quantize/block_scaled_dispatch.h"

namespace thunderkittens::block_scaled {
namespace {

using emulated::Array;

constexpr DType BYTE = DType::e4m3;  // as what bytes travel

struct Sizes {
    int64_t batch, rows, columns;
};
Sizes sizes_of(const char* op, const Array& a) {
    TK_CHECK(a.dims() == 2 || a.dims() == 3, op, ": 2 or 3 dimensions are expected");
    return {a.dims() == 3 ? a.size[0] : 1, a.size[a.size.size() - 2], a.size.back()};
}
Array like(const Array& a, int64_t rows, int64_t columns, DType dtype) {
    return a.dims() == 3 ? emulated::allocate({a.size[0], rows, columns}, dtype)
                         : emulated::allocate({rows, columns}, dtype);
}
// A copy without gaps, where there are any.
Array packed(const Array& a) {
    Array copy = emulated::allocate(a.size, a.dtype);
    emulated::copy_elements(copy, a);
    return copy;
}
template <typename Problem>
void check_supported(const char* op, const Problem& problem, const DeviceProperties& device) {
    const std::string reason = unsupported(problem, device);
    TK_CHECK(reason.empty(), op, ": ", reason);
}
template <typename Config>
void note(emulated::Result& result, const Config& config) {
    result.choice = detail::fields_of(config);
    result.choice.emplace("kernel", kernel_name(config));
}

emulated::Result mxfp8_quantize(const emulated::Call& call) {
    constexpr const char* OP = "tk.mxfp8_quantize";
    const Array& x = call.array("x");
    const Sizes sizes = sizes_of(OP, x);
    const bool swizzle = call.scalar("swizzle", true), transpose = call.scalar("transpose", false);
    Mxfp8Problem problem{.rows = sizes.rows,
                         .columns = sizes.columns,
                         .batch = sizes.batch,
                         .dtype = x.dtype,
                         .data_dtype = call.scalar("data_dtype", DType::e4m3),
                         .transpose = transpose};
    Array source = x;
    const int bytes = size_in_bytes(x.dtype);
    View view = source.view();
    if (!fits_tensor_map(view, bytes)) {
        if (fits_tensor_map(transposed(view), bytes)) {
            problem.row_major = false;
            view = transposed(view);
        } else {
            source = emulated::copy_for_tensor_map(x);
            view = source.view();
        }
    }
    check_supported(OP, problem, call.device);
    const auto outputs = [&](int64_t rows, int64_t columns) {
        const ScaleShape s = scale_shape(rows, columns, 32, swizzle);
        return std::pair{like(x, rows, columns, BYTE), like(x, s.rows, s.columns, BYTE)};
    };
    auto [data, scale] = outputs(sizes.rows, sizes.columns);
    emulated::Result result;
    result.arrays = {{"data", data}, {"scale", scale}};
    Array data_t, scale_t;
    if (transpose) {
        std::tie(data_t, scale_t) = outputs(sizes.columns, sizes.rows);
        result.arrays.emplace("data_t", data_t);
        result.arrays.emplace("scale_t", scale_t);
    }
    if (x.elements() == 0) return result;
    Mxfp8Params params{.x = matrix_of(view),
                       .data = data.data,
                       .scale = scale.data,
                       .down_data = data_t.data,
                       .down_scale = scale_t.data,
                       .swizzle = swizzle,
                       .floor = call.scalar("floor", false)};
    if (!problem.row_major) {
        std::swap(params.data, params.down_data);
        std::swap(params.scale, params.down_scale);
    }
    Mxfp8Quantize config = choose_mxfp8_quantize(problem, call.device);
    emulated::force(config, call);
    emulated::Launch scope("mxfp8_quantize " + kernel_name(config));
    scope.may_read("x", source);
    scope.may_write("data", data);
    scope.may_write("scale", scale);
    if (transpose) {
        scope.may_write("data_t", data_t);
        scope.may_write("scale_t", scale_t);
    }
    launch(config, params, nullptr);
    note(result, config);
    return result;
}

emulated::Result mxfp8_dequantize(const emulated::Call& call) {
    constexpr const char* OP = "tk.mxfp8_dequantize";
    const Array& data = call.array("data");
    const Array scale = packed(call.array("scale"));
    const Sizes sizes = sizes_of(OP, data);
    const Mxfp8Problem problem{.rows = sizes.rows,
                               .columns = sizes.columns,
                               .batch = sizes.batch,
                               .dtype = call.scalar("dtype", DType::bf16),
                               .data_dtype = call.scalar("data_dtype", DType::e4m3)};
    check_supported(OP, problem, call.device);
    const bool swizzle = call.scalar("swizzle", true);
    const ScaleShape shape = scale_shape(sizes.rows, sizes.columns, 32, swizzle);
    TK_CHECK(scale.elements() == sizes.batch * shape.rows * shape.columns, OP,
             ": scale and data do not match");
    Array out = like(data, sizes.rows, sizes.columns, problem.dtype);
    emulated::Result result;
    result.arrays["out"] = out;
    if (out.elements() == 0) return result;
    const Array codes = sizes.columns == 1 || data.stride.back() == 1 ? data : packed(data);
    const DequantizeParams params{
        .data = matrix_of(codes.view()), .scale = scale.data, .out = out.data, .swizzle = swizzle};
    Mxfp8Dequantize config = choose_mxfp8_dequantize(problem, call.device);
    emulated::force(config, call);
    emulated::Launch scope("mxfp8_dequantize " + kernel_name(config));
    scope.may_read("data", codes);
    scope.may_read("scale", scale);
    scope.may_write("out", out);
    launch(config, params, nullptr);
    note(result, config);
    return result;
}

emulated::Result nvfp4_quantize(const emulated::Call& call) {
    constexpr const char* OP = "tk.nvfp4_quantize";
    const Array& x = call.array("x");
    const Sizes sizes = sizes_of(OP, x);
    const Array *given = call.optional("global_scale"), *seed = call.optional("seed");
    const bool swizzle = call.scalar("swizzle", true);
    const Nvfp4Problem problem{.rows = sizes.rows,
                               .columns = sizes.columns,
                               .batch = sizes.batch,
                               .dtype = x.dtype,
                               .square = call.scalar("square", false),
                               .stochastic = seed != nullptr};
    check_supported(OP, problem, call.device);
    TK_CHECK(!given || given->elements() == sizes.batch, OP, ": one global scale per matrix");
    TK_CHECK(!seed || (seed->dtype == DType::int32 && seed->elements() == 2), OP,
             ": a seed is two words");
    const ScaleShape shape = scale_shape(sizes.rows, sizes.columns, 16, swizzle);
    Array data = like(x, sizes.rows, sizes.columns / 2, BYTE);
    Array scale = like(x, shape.rows, shape.columns, BYTE);
    Array global = emulated::allocate({sizes.batch}, DType::fp32);
    emulated::Result result;
    result.arrays = {{"data", data}, {"block_scale", scale}, {"global_scale", global}};
    std::optional<Array> values;
    if (given) values = packed(*given);
    if (x.elements() == 0) {
        const float one = 1;
        for (int64_t i = 0; i < sizes.batch; ++i) {
            std::memcpy(global.data + 4 * i,
                        values ? values->data + 4 * i : reinterpret_cast<const uint8_t*>(&one), 4);
        }
        return result;
    }
    const Array source = emulated::for_tensor_map(x);
    const int count = maxima_count(problem, call.device);
    Array maxima = emulated::allocate({sizes.batch, count}, DType::int32);
    const Nvfp4Params params{.x = matrix_of(source.view()),
                             .data = data.data,
                             .scale = scale.data,
                             .given_scale = values ? values->data : nullptr,
                             .global_scale = global.data,
                             .maxima = maxima.data,
                             .maxima_count = count,
                             .seed = seed ? seed->data : nullptr,
                             .swizzle = swizzle,
                             .blocks = ring_blocks(call.device)};
    Nvfp4Quantize config = choose_nvfp4_quantize(problem, call.device);
    emulated::force(config, call);
    emulated::Launch scope("nvfp4_quantize " + kernel_name(config));
    scope.may_read("x", source);
    if (values) scope.may_read("global_scale", *values);
    if (seed) scope.may_read("seed", *seed);
    scope.may_write("maxima", maxima);
    scope.may_write("data", data);
    scope.may_write("block_scale", scale);
    scope.may_write("scale", global);
    launch(config, params, nullptr);
    note(result, config);
    return result;
}

emulated::Result nvfp4_dequantize(const emulated::Call& call) {
    constexpr const char* OP = "tk.nvfp4_dequantize";
    const Array& data = call.array("data");
    const Array scale = packed(call.array("block_scale"));
    const Array global = packed(call.array("global_scale"));
    const Sizes sizes = sizes_of(OP, data);
    const int64_t columns = 2 * sizes.columns;
    const Nvfp4Problem problem{.rows = sizes.rows,
                               .columns = columns,
                               .batch = sizes.batch,
                               .dtype = call.scalar("dtype", DType::bf16)};
    check_supported(OP, problem, call.device);
    const bool swizzle = call.scalar("swizzle", true);
    const ScaleShape shape = scale_shape(sizes.rows, columns, 16, swizzle);
    TK_CHECK(scale.elements() == sizes.batch * shape.rows * shape.columns &&
                 global.elements() == sizes.batch,
             OP, ": the scales and data do not match");
    Array out = like(data, sizes.rows, columns, problem.dtype);
    emulated::Result result;
    result.arrays["out"] = out;
    if (out.elements() == 0) return result;
    const Array codes = sizes.columns == 1 || data.stride.back() == 1 ? data : packed(data);
    DequantizeParams params{.data = matrix_of(codes.view()),
                            .scale = scale.data,
                            .global_scale = global.data,
                            .out = out.data,
                            .swizzle = swizzle};
    params.data.columns = columns;
    Nvfp4Dequantize config = choose_nvfp4_dequantize(problem, call.device);
    emulated::force(config, call);
    emulated::Launch scope("nvfp4_dequantize " + kernel_name(config));
    scope.may_read("data", codes);
    scope.may_read("block_scale", scale);
    scope.may_read("global_scale", global);
    scope.may_write("out", out);
    launch(config, params, nullptr);
    note(result, config);
    return result;
}

const bool registered = emulated::register_run("mxfp8_quantize", &mxfp8_quantize) &&
                        emulated::register_run("mxfp8_dequantize", &mxfp8_dequantize) &&
                        emulated::register_run("nvfp4_quantize", &nvfp4_quantize) &&
                        emulated::register_run("nvfp4_dequantize", &nvfp4_dequantize);

}  // namespace
}  // namespace thunderkittens::block_scaled
