// thunderkittens::mxfp8_gemm and mxfp8_prepare on CUDA: checks, allocation, the passes over the
// operands, and the kernels of gemm and fp8_gemm.
#include "csrc/gemm/mxfp8/mxfp8_gemm.h"

#include <tuple>
#include <utility>

#include "csrc/common/tensor.h"
#include "csrc/gemm/dense/dispatch.h"
#include "csrc/gemm/fp8/split_k.h"
#include "csrc/gemm/quantize/block_scaled_dispatch.h"

namespace thunderkittens::mxfp8_gemm {
namespace {

constexpr const char* OP = "thunderkittens::mxfp8_gemm";
constexpr const char* PREPARE = "thunderkittens::mxfp8_prepare";

// An operand (rows, K), or a batch of them, whose K is adjacent, with its scales.
struct Quantised {
    Tensor data, scale;
    block_scaled::Matrix matrix;
    DType dtype;
    bool swizzle;

    Quantised(const char* op, const char* name, const Tensor& given, const Tensor& scales,
              bool swizzled)
        : swizzle(swizzled) {
        dtype = check_dtype(op, name, given, {DType::e4m3, DType::e5m2});
        TK_CHECK(scales.element_size() == 1, op, ": the scale of ", name,
                 " must be torch.float8_e8m0fnu, got ", dtype_text(scales.scalar_type()));
        const int64_t rows = given.size(-2), columns = given.size(-1);
        const auto shape = block_scaled::scale_shape(rows, columns, BLOCK, swizzle);
        TK_CHECK(scales.dim() == given.dim() && scales.size(-2) == shape.rows &&
                     scales.size(-1) == shape.columns &&
                     (given.dim() == 2 || scales.size(0) == given.size(0)),
                 op, ": the scale of ", name, " has shape ", shape_text(scales), "; expected ",
                 shape.rows, " x ", shape.columns, " for ", shape_text(given));
        const bool adjacent = columns <= 1 || given.stride(-1) == 1;
        data = adjacent ? given : packed(given);
        scale = aligned_and_contiguous(scales);
        matrix = block_scaled::matrix_of(as_4d(data));
    }
    bool short_rows() const { return matrix.row_stride <= INT32_MAX; }
    // Whether TMA can load the operand, and bulk copies its scales, in the 128x4 layout.
    bool readable() const {
        return swizzle && aligned_scales(scale.data_ptr()) && fits_tensor_map(as_4d(data), 1);
    }
};

// What mxfp8_prepare makes of an operand.
struct Prepared {
    Tensor codes, factor, mask;

    static Prepared allocate(const Quantised& o) {
        const block_scaled::Matrix& m = o.matrix;
        const int64_t pitch = round_up(m.columns, 16), words = mask_words(m.rows);
        const auto make = [&](std::initializer_list<int64_t> whole, ScalarType type) {
            const std::span<const int64_t> sizes(whole.begin(), whole.size());
            return empty(sizes.subspan(o.data.dim() == 3 ? 0 : 1), type, o.data);
        };
        return {make({m.batch, m.rows, pitch}, ScalarType::Float8_e4m3fn),
                make({m.batch, m.rows}, ScalarType::Float),
                make({m.batch, words, MASK_BYTES}, ScalarType::Byte)};
    }
};

Rescale rescale(const Quantised& o, const Prepared& to) {
    return {.data = o.matrix,
            .scale = o.scale.data_ptr(),
            .swizzle = o.swizzle,
            .e5m2 = o.dtype == DType::e5m2,
            .codes = to.codes.data_ptr(),
            .pitch = round_up(o.matrix.columns, 16),
            .factor = static_cast<float*>(to.factor.data_ptr()),
            .mask = static_cast<uint8_t*>(to.mask.data_ptr()),
            .blocks = rescale_blocks(o.matrix)};
}

std::tuple<Tensor, Tensor, Tensor> mxfp8_prepare(const Tensor& data, const Tensor& scale,
                                                 bool swizzle) {
    check_cuda(PREPARE, "data", data);
    check_dims(PREPARE, "data", data, {2, 3});
    check_same_device(PREPARE, "scale", scale, "data", data);
    const DeviceGuard guard(data.get_device_index());
    const Quantised operand(PREPARE, "data", data, scale, swizzle);
    const PrepareProblem problem{.rows = operand.matrix.rows,
                                 .columns = operand.matrix.columns,
                                 .batch = operand.matrix.batch,
                                 .data_dtype = operand.dtype};
    const DeviceProperties& device = device_properties(data.get_device_index());
    if (const std::string reason = unsupported_operand(problem, device); !reason.empty()) {
        throw std::runtime_error(concat(PREPARE, ": ", reason));
    }
    const Prepared prepared = Prepared::allocate(operand);
    if (prepared.factor.numel() > 0) {
        run_pass(RescaleParams{.operands = {rescale(operand, prepared)}}, current_stream(data));
    }
    return {prepared.codes, prepared.factor, prepared.mask};
}

// One call, and what it is put together from.
struct Product {
    const Quantised &a, &b;  // b's transpose
    Problem problem;
    Choice choice;
    const void* bias;
    const int32_t* offs;
    int activation;
    Tensor out;
    const DeviceProperties& device;
    Stream stream;

    int64_t pitch() const { return round_up(std::max<int64_t>(problem.k, 1), 8); }

    DequantizePass pass(const Quantised& o, const Tensor& to) const {
        return {.source = {.data = o.matrix,
                           .scale = o.scale.data_ptr(),
                           .out = to.data_ptr(),
                           .swizzle = o.swizzle},
                .e5m2 = o.dtype == DType::e5m2,
                .swap_ab_order = choice.skinny,
                .pitch = to.size(-1),
                .tiles = static_cast<int>(
                    block_scaled::tiles(o.matrix.rows, o.matrix.columns, o.matrix.batch))};
    }
    // Dequantizes the operands to bf16; with a mask only if it has a tile.
    std::pair<Tensor, Tensor> dequantize(const gemm::TileMask& mask) const {
        const auto make = [&](const Quantised& o) {
            return empty({o.matrix.rows, pitch()}, ScalarType::BFloat16, out);
        };
        std::pair<Tensor, Tensor> wide{make(a), make(b)};
        if (problem.k == 0) {
            torch::stable::zero_(wide.first);
            torch::stable::zero_(wide.second);
            return wide;
        }
        DequantizePassParams params{.operands = {pass(a, wide.first), pass(b, wide.second)},
                                    .mask = mask,
                                    .m = problem.m,
                                    .n = problem.n};
        params.blocks = dequantize_blocks(params, device);
        run_pass(params, stream);
        return wide;
    }
    void multiply_swap_ab() const {
        const Tensor wide =
            empty({problem.m, round_up(problem.k, CHUNK_K)}, ScalarType::BFloat16, out);
        const Tensor ones = empty({b.matrix.batch}, ScalarType::Float, out);
        DequantizePassParams dequantize{.operands = {pass(a, wide)},
                                        .ones = static_cast<float*>(ones.data_ptr()),
                                        .ones_count = b.matrix.batch};
        dequantize.blocks = dequantize_blocks(dequantize, device);
        run_pass(dequantize, stream);
        const DequantParams params{.a = wide.data_ptr(),
                                   .weight = b.matrix.data,
                                   .scales = b.scale.data_ptr(),
                                   .scale = dequantize.ones,
                                   .bias = bias,
                                   .offs = offs,
                                   .out = out.data_ptr(),
                                   .m = problem.m,
                                   .n = problem.n,
                                   .k = problem.k,
                                   .groups = problem.groups,
                                   .weight_stride = b.matrix.row_stride,
                                   .group_stride = b.matrix.batch_stride,
                                   .out_dtype = problem.out_dtype,
                                   .activation = activation,
                                   .schedule = choice.swap_ab_schedule};
        TK_CHECK(launch_any_dequant(choice.dequant_config, params, stream), OP, ": no kernel ",
                 kernel_name(choice));
    }
    void multiply_native() const {
        const NativeParams params{.a = a.matrix.data,
                                  .weight = b.matrix.data,
                                  .scales_a = a.scale.data_ptr(),
                                  .scales_weight = b.scale.data_ptr(),
                                  .bias = bias,
                                  .out = out.data_ptr(),
                                  .m = problem.m,
                                  .n = problem.n,
                                  .k = problem.k,
                                  .a_stride = a.matrix.row_stride,
                                  .weight_stride = b.matrix.row_stride,
                                  .out_dtype = problem.out_dtype,
                                  .activation = activation,
                                  .schedule = choice.swap_ab_schedule};
        TK_CHECK(launch_any_native(choice.native_shape, params, stream), OP, ": no kernel ",
                 kernel_name(choice));
    }
    gemm::Params product(const Tensor& left, const Tensor& right) const {
        return {.a = left.data_ptr(),
                .b = right.data_ptr(),
                .out = out.data_ptr(),
                .m = problem.m,
                .n = problem.n,
                .k = std::max<int64_t>(problem.k, 1),
                .a_stride = pitch(),
                .b_stride = pitch(),
                .out_stride = problem.n,
                .out_dtype = problem.out_dtype,
                .epilogue = {.bias = bias, .activation = static_cast<gemm::Activation>(activation)},
                .schedule = choice.exact.schedule};
    }
    void multiply_fused_dequant() const {
        const auto make = [&](const Quantised& o) {
            return empty({o.matrix.rows, pitch()}, ScalarType::BFloat16, out);
        };
        const auto source = [](const Quantised& o) {
            return gemm::Mxfp8Source{.codes = o.matrix.data,
                                     .scales = o.scale.data_ptr(),
                                     .stride = static_cast<int>(o.matrix.row_stride),
                                     .e5m2 = o.dtype == DType::e5m2};
        };
        const Tensor left = make(a), right = make(b);
        gemm::FusedDequantParams<gemm::Mxfp8Sources> params{.product = product(left, right),
                                                            .sources = {source(a), source(b)}};
        Tensor counters = empty({gemm::dequant_order(choice.exact.config, params).counters()},
                                ScalarType::Int, out);
        torch::stable::zero_(counters);
        params.counters = static_cast<int*>(counters.data_ptr());
        TK_CHECK(launch_any_fused_dequant(choice.exact.config, params, stream), OP, ": no kernel ",
                 kernel_name(choice));
    }
    void multiply_exactly(const gemm::TileMask& mask) const {
        const auto [left, right] = dequantize(mask);
        gemm::Params params = product(left, right);
        params.mask = mask;
        TK_CHECK(gemm::launch_any(choice.exact.config, params, stream), OP, ": no kernel ",
                 gemm::kernel_name(choice.exact));
    }
    void multiply_rescaled(const Prepared& left, const Prepared& right) const {
        const fp8_gemm::Params params{
            .a = left.codes.data_ptr(),
            .b = right.codes.data_ptr(),
            .bias = bias,
            .out = out.data_ptr(),
            .m = problem.m,
            .n = problem.n,
            .k = problem.k,
            .a_stride = left.codes.size(-1),
            .b_stride = right.codes.size(-1),
            .scale_a = {static_cast<const float*>(left.factor.data_ptr()), 1, 0},
            .scale_b = {static_cast<const float*>(right.factor.data_ptr()), 1, 0},
            .out_dtype = problem.out_dtype,
            .bias_dtype = DType::bf16,
            .activation = activation,
            .schedule = choice.product.schedule};
        TK_CHECK(fp8_gemm::launch_choice(choice.product.config, params, stream), OP, ": no kernel ",
                 fp8_gemm::kernel_name(choice.product));
        multiply_exactly({.rows = static_cast<const uint64_t*>(left.mask.data_ptr()),
                          .columns = static_cast<const uint64_t*>(right.mask.data_ptr())});
    }
};

// What has been prepared of an operand, if it has been.
std::optional<Prepared> given(const char* name, const Quantised& o,
                              const std::optional<Tensor>& codes,
                              const std::optional<Tensor>& factor,
                              const std::optional<Tensor>& mask) {
    TK_CHECK(codes.has_value() == factor.has_value() && codes.has_value() == mask.has_value(), OP,
             ": of what is prepared of ", name, " a part is missing");
    if (!codes) return std::nullopt;
    const std::tuple<const char*, const Tensor&, ScalarType, int64_t, int64_t> parts[] = {
        {"codes", *codes, ScalarType::Float8_e4m3fn, o.matrix.rows, round_up(o.matrix.columns, 16)},
        {"factor", *factor, ScalarType::Float, o.matrix.rows, 1},
        {"marks", *mask, ScalarType::Byte, mask_words(o.matrix.rows), MASK_BYTES}};
    for (const auto& [part, tensor, type, rows, columns] : parts) {
        check_same_device(OP, part, tensor, name, o.data);
        TK_CHECK(tensor.scalar_type() == type && tensor.size(0) == rows &&
                     tensor.numel() == rows * columns,
                 OP, ": ", part, " prepared of ", name, " is ", dtype_text(tensor.scalar_type()),
                 ' ', shape_text(tensor), "; expected ", dtype_text(type), " of ", rows, " x ",
                 columns);
    }
    return Prepared{aligned_and_contiguous(*codes), aligned_and_contiguous(*factor),
                    aligned_and_contiguous(*mask)};
}

Tensor mxfp8_gemm(const Tensor& a, const Tensor& b, const Tensor& scale_a, const Tensor& scale_b,
                  const std::optional<Tensor>& bias, int64_t activation,
                  std::optional<ScalarType> out_type, bool rescaled, bool swizzle_a, bool swizzle_b,
                  const std::optional<Tensor>& codes_a, const std::optional<Tensor>& factor_a,
                  const std::optional<Tensor>& marks_a, const std::optional<Tensor>& codes_b,
                  const std::optional<Tensor>& factor_b, const std::optional<Tensor>& marks_b,
                  const std::optional<Tensor>& offs) {
    check_cuda(OP, "a", a);
    check_same_device(OP, "b", b, "a", a);
    check_same_device(OP, "scale_a", scale_a, "a", a);
    check_same_device(OP, "scale_b", scale_b, "a", a);
    check_dims(OP, "a", a, {2});
    check_dims(OP, "b", b, {offs ? 3 : 2});
    const int64_t m = a.size(0), k = a.size(1), n = b.size(-1), groups = offs ? b.size(0) : 1;
    TK_CHECK(b.size(-2) == k, OP, ": a has shape ", shape_text(a), " and b has shape ",
             shape_text(b), "; a's columns must be b's rows");
    TK_CHECK(activation >= 0 && activation <= 4, OP, ": activation is ", activation,
             "; it must be from 0 to 4");
    const ScalarType type = out_type.value_or(ScalarType::BFloat16);
    const std::optional<DType> out_dtype = dtype_of(type);
    TK_CHECK(out_dtype && (*out_dtype == DType::bf16 || *out_dtype == DType::fp16 ||
                           *out_dtype == DType::fp32),
             OP, ": out_dtype is ", dtype_text(type),
             "; supported are torch.bfloat16, torch.float16 and torch.float32");
    std::optional<Tensor> row;
    if (bias) {
        check_same_device(OP, "bias", *bias, "a", a);
        check_dtype(OP, "bias", *bias, {DType::bf16});
        TK_CHECK(bias->dim() == 1 && bias->size(0) == n, OP, ": bias has shape ", shape_text(*bias),
                 "; expected (", n, ",)");
        row = packed(*bias);
    }
    std::optional<Tensor> ends;
    if (offs) {
        check_same_device(OP, "offs", *offs, "a", a);
        check_dtype(OP, "offs", *offs, {DType::int32});
        TK_CHECK(offs->dim() == 1 && offs->size(0) == groups, OP, ": offs has shape ",
                 shape_text(*offs), "; expected (", groups, ",), the end of each group's rows");
        ends = packed(*offs);
    }
    const DeviceGuard guard(a.get_device_index());
    const Quantised left(OP, "a", a, scale_a, swizzle_a);
    // Groups have only the swap-AB kernel, whose b TMA loads.
    const Tensor columns = torch::stable::transpose(b, -2, -1);
    const Quantised right(OP, "b", offs ? for_tensor_map(columns) : columns, scale_b, swizzle_b);
    Tensor out = empty({m, n}, type, a);
    if (m == 0 || n == 0) return out;
    if (groups == 0) {
        torch::stable::zero_(out);
        return out;
    }
    const Problem problem{.m = m,
                          .n = n,
                          .k = k,
                          .a_dtype = left.dtype,
                          .b_dtype = right.dtype,
                          .out_dtype = *out_dtype,
                          .fused = activation != 0,
                          .rescaled = rescaled && k > 0,
                          .readable_a = left.readable(),
                          .readable = right.readable(),
                          .short_rows = left.short_rows() && right.short_rows(),
                          .groups = groups,
                          .grouped = offs.has_value()};
    const DeviceProperties& device = device_properties(a.get_device_index());
    if (const std::string reason = unsupported(problem, device); !reason.empty()) {
        throw std::runtime_error(concat(OP, ": ", reason));
    }
    const Product product{.a = left,
                          .b = right,
                          .problem = problem,
                          .choice = choose(problem, device),
                          .bias = row ? row->data_ptr() : nullptr,
                          .offs = ends ? static_cast<const int32_t*>(ends->data_ptr()) : nullptr,
                          .activation = static_cast<int>(activation),
                          .out = out,
                          .device = device,
                          .stream = current_stream(a)};
    if (product.choice.native) {
        product.multiply_native();
        return out;
    }
    if (!problem.rescaled) {
        if (product.choice.skinny)
            product.multiply_swap_ab();
        else if (product.choice.fused_dequant)
            product.multiply_fused_dequant();
        else
            product.multiply_exactly({});
        return out;
    }
    auto prepared_a = given("a", left, codes_a, factor_a, marks_a);
    auto prepared_b = given("b", right, codes_b, factor_b, marks_b);
    RescaleParams pass;
    if (!prepared_a) {
        prepared_a = Prepared::allocate(left);
        pass.operands[0] = rescale(left, *prepared_a);
    }
    if (!prepared_b) {
        prepared_b = Prepared::allocate(right);
        pass.operands[1] = rescale(right, *prepared_b);
    }
    run_pass(pass, product.stream);
    product.multiply_rescaled(*prepared_a, *prepared_b);
    return out;
}

}  // namespace
}  // namespace thunderkittens::mxfp8_gemm

STABLE_TORCH_LIBRARY_IMPL(thunderkittens, CUDA, m) {
    m.impl("mxfp8_gemm", TORCH_BOX(&thunderkittens::mxfp8_gemm::mxfp8_gemm));
    m.impl("mxfp8_prepare", TORCH_BOX(&thunderkittens::mxfp8_gemm::mxfp8_prepare));
}
