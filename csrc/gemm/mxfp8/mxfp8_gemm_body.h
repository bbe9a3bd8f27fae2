// The body of mxfp8_gemm, on any back end: checks, allocation, the passes over the operands, and
// the kernels that multiply, of which some are those of gemm and fp8_gemm. Host C++ without torch.
#pragma once

#include <utility>

#include "csrc/common/accesses.h"
#include "csrc/gemm/common/checks.h"
#include "csrc/gemm/common/listed.h"
#include "csrc/gemm/dense/dispatch.h"
#include "csrc/gemm/fp8/dispatch.h"
#include "csrc/gemm/grouped/dispatch.h"
#include "csrc/gemm/mxfp8/quantised.h"

namespace thunderkittens::mxfp8_gemm {

constexpr const char* OP = "thunderkittens::mxfp8_gemm";

// What a call asks for beside the operands and their scales; what is kept of the operands.
template <class Tensor>
struct Options {
    std::optional<Tensor> bias = {};
    int64_t activation = 0;
    std::optional<typename Backend<Tensor>::ScalarType> out_type = {};
    bool rescaled = false, swizzle_a = true, swizzle_b = true;
    Kept<Tensor> a = {}, b = {};
    std::optional<Tensor> offs = {};
};

// One call, and what it is put together from.
template <class Tensor>
struct Product {
    const Backend<Tensor>& on;
    const Quantised<Tensor>&a, &b;  // b's transpose
    const Problem& problem;
    const Choice& choice;
    const std::optional<Tensor>&bias, &offs;
    int activation;
    const Tensor& out;
    const DeviceProperties& device;
    Stream stream;

    int64_t pitch() const { return round_up(std::max<int64_t>(problem.k, 1), 8); }
    Tensor rows(const Quantised<Tensor>& o) const {
        return empty({o.matrix.rows, pitch()}, DType::bf16, out);
    }

    template <class Launch>
    void multiplied_by(Launch& launch) const {
        launch.may_read("bias", bias);
        launch.may_write("out", out);
    }
    DequantizePass pass(const Quantised<Tensor>& o, const Tensor& to) const {
        return {.source = {.data = o.matrix,
                           .scale = o.scale.data_ptr(),
                           .out = to.data_ptr(),
                           .swizzle = o.swizzle},
                .e5m2 = o.dtype == DType::e5m2,
                .swap_ab_order = choice.kernel == Kernel::swap_ab_dequant,
                .pitch = to.size(-1),
                .tiles = static_cast<int>(
                    block_scaled::tiles(o.matrix.rows, o.matrix.columns, o.matrix.batch))};
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
                .epilogue = {.bias = data_as<void>(bias),
                             .activation = static_cast<gemm::Activation>(activation)},
                .schedule = choice.exact.schedule};
    }

    // What the swap-AB kernels are given beside a.
    SwapAbParams swap_ab_params() const {
        return {.weight = b.matrix.data,
                .scales_weight = b.scale.data_ptr(),
                .bias = data_as<void>(bias),
                .offs = data_as<const int32_t>(offs),
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
    }
    void multiply_swap_ab_dequant() const {
        const Tensor wide = empty({problem.m, round_up(problem.k, CHUNK_K)}, DType::bf16, out);
        const Tensor ones = empty({b.matrix.batch}, DType::fp32, out);
        DequantizePassParams dequantize{.operands = {pass(a, wide)},
                                        .ones = data_as<float>(ones),
                                        .ones_count = b.matrix.batch};
        dequantize.blocks = dequantize_blocks(dequantize, device);
        {
            auto launch = on.launch("mxfp8_gemm dequantize", stream);
            a.read_by(launch);
            writes(launch, "a", wide, "ones", ones);
            run_pass(dequantize, device, stream);
        }
        SwapAbParams params = swap_ab_params();
        params.a = wide.data_ptr();
        params.scale = dequantize.ones;
        auto launch = on.launch("mxfp8_gemm", choice, stream);
        launch.may_read("a", wide);
        launch.may_read_early("b", b.data);
        launch.may_read_early("scale_b", b.scale);
        launch.may_read("ones", ones);
        launch.may_read_early("offs", offs);
        multiplied_by(launch);
        const bool found = gemm::launch_listed<dequant_config_at, DEQUANT_CONFIGS>(
            choice.dequant_config,
            [&]<DequantConfig c>() { return launch_dequant<c>(params, stream), true; });
        TK_CHECK(found, OP, ": no kernel ", kernel_name(choice));
    }

    void multiply_swap_ab_native() const {
        SwapAbParams params = swap_ab_params();
        params.a = a.matrix.data;
        params.scales_a = a.scale.data_ptr();
        params.a_stride = a.matrix.row_stride;
        auto launch = on.launch("mxfp8_gemm", choice, stream);
        a.read_by(launch);
        b.read_by(launch);
        multiplied_by(launch);
        const bool found = gemm::launch_listed<native_shape_at, std::size(NATIVE_SHAPES)>(
            choice.native_shape,
            [&]<NativeShape s>() { return launch_native<s>(params, stream), true; });
        TK_CHECK(found, OP, ": no kernel ", kernel_name(choice));
    }

    void multiply_fused_dequant() const {
        TK_CHECK(problem.can_fuse_dequant(), OP, ": the fused dequantization is not for this");
        const auto source = [](const Quantised<Tensor>& o) {
            return gemm::Mxfp8Source{.codes = o.matrix.data,
                                     .scales = o.scale.data_ptr(),
                                     .stride = static_cast<int>(o.matrix.row_stride),
                                     .e5m2 = o.dtype == DType::e5m2};
        };
        constexpr gemm::Config wide = gemm::fused_dequant_config(DType::bf16);
        constexpr gemm::Config narrow = gemm::narrow_fused_dequant_config(DType::bf16);
        const gemm::Config& config = choice.exact.config;
        const Tensor left = rows(a), right = rows(b);
        gemm::FusedDequantParams<gemm::Mxfp8Sources> params{.product = product(left, right),
                                                            .sources = {source(a), source(b)}};
        const Tensor counters =
            zeroed(empty({gemm::dequant_order(config, params).counters()}, DType::int32, out));
        params.counters = data_as<int>(counters);
        auto launch = on.launch("mxfp8_gemm", choice, stream);
        a.read_by(launch);
        b.read_by(launch);
        writes(launch, "a", left, "b", right, "counters", counters);
        multiplied_by(launch);
        TK_CHECK(config == wide || config == narrow, OP, ": no kernel ", kernel_name(choice));
        if (config == wide)
            gemm::launch_fused_dequant<wide>(params, stream);
        else
            gemm::launch_fused_dequant<narrow>(params, stream);
    }

    // Both operands to bf16 rows, in one launch; nothing where the mask has no tile.
    template <class Reads>
    void dequantize(const Tensor& wide_a, const Tensor& wide_b, const gemm::TileMask& mask,
                    Reads mask_read_by) const {
        DequantizePassParams params{.operands = {pass(a, wide_a), pass(b, wide_b)},
                                    .mask = mask,
                                    .m = problem.m,
                                    .n = problem.n};
        params.blocks = dequantize_blocks(params, device);
        auto launch = on.launch("mxfp8_gemm", choice, stream);
        a.read_by(launch);
        b.read_by(launch);
        writes(launch, "a", wide_a, "b", wide_b);
        mask_read_by(launch);
        run_pass(params, device, stream);
    }
    void multiply_dequantized_groups() const {
        const Tensor wide_a = rows(a);
        const Tensor wide_b = empty({problem.groups, problem.n, pitch()}, DType::bf16, out);
        dequantize(wide_a, wide_b, {}, [](auto&) {});
        grouped_gemm::Params params{.product = product(wide_a, wide_b),
                                    .offs = data_as<const int32_t>(offs)};
        params.product.batch = problem.groups;
        params.product.b_batch_stride = problem.n * pitch();
        auto launch = on.launch_part("mxfp8_gemm", choice.groups, stream);
        reads(launch, "a", wide_a, "b", wide_b, "offs", offs);
        multiplied_by(launch);
        TK_CHECK(grouped_gemm::launch_choice(choice.groups, params, stream), OP, ": no kernel ",
                 grouped_gemm::kernel_name(choice.groups));
    }

    // With what is prepared of the operands: the tiles of its mask alone.
    void multiply_dequantized(const Prepared<Tensor>* left, const Prepared<Tensor>* right) const {
        gemm::TileMask mask;
        if (left != nullptr)
            mask = {data_as<const uint64_t>(left->mask), data_as<const uint64_t>(right->mask)};
        const auto mask_read_by = [&](auto& launch) {
            if (left == nullptr) return;
            reads(launch, "marks_a", left->mask, "marks_b", right->mask);
        };
        Tensor wide_a = rows(a), wide_b = rows(b);
        if (problem.k == 0) {
            zero_(wide_a);
            zero_(wide_b);
        } else {
            dequantize(wide_a, wide_b, mask, mask_read_by);
        }
        gemm::Params params = product(wide_a, wide_b);
        params.mask = mask;
        const gemm::Choice exact = gemm::runnable(choice.exact, params);
        auto launch = on.launch_part("mxfp8_gemm", exact, stream);
        reads(launch, "a", wide_a, "b", wide_b);
        mask_read_by(launch);
        multiplied_by(launch);
        TK_CHECK(gemm::launch_choice(exact, params, {}, stream), OP, ": no kernel ",
                 gemm::kernel_name(exact));
    }

    void multiply_rescaled(const Prepared<Tensor>& left, const Prepared<Tensor>& right) const {
        const fp8_gemm::Params params{.a = left.codes.data_ptr(),
                                      .b = right.codes.data_ptr(),
                                      .bias = data_as<void>(bias),
                                      .out = out.data_ptr(),
                                      .m = problem.m,
                                      .n = problem.n,
                                      .k = problem.k,
                                      .a_stride = left.codes.size(-1),
                                      .b_stride = right.codes.size(-1),
                                      .scale_a = {data_as<const float>(left.factor), 1, 0},
                                      .scale_b = {data_as<const float>(right.factor), 1, 0},
                                      .out_dtype = problem.out_dtype,
                                      .bias_dtype = DType::bf16,
                                      .activation = activation,
                                      .schedule = choice.product.schedule};
        const fp8_gemm::Choice product = fp8_gemm::runnable(choice.product, params);
        auto launch = on.launch_part("mxfp8_gemm", product, stream);
        for (const Prepared<Tensor>* operand : {&left, &right}) {
            reads(launch, "codes", operand->codes, "factor", operand->factor);
        }
        multiplied_by(launch);
        TK_CHECK(fp8_gemm::launch_choice(product, params, stream), OP, ": no kernel ",
                 fp8_gemm::kernel_name(product));
    }

    // What has been kept of the operands need not be made.
    void rescale_and_multiply(const Kept<Tensor>& kept_a, const Kept<Tensor>& kept_b) const {
        auto left = kept_a.checked(OP, "a", a), right = kept_b.checked(OP, "b", b);
        {
            auto launch = on.launch("mxfp8_gemm rescale", stream);
            RescaleParams pass;
            if (!left) {
                left = Prepared<Tensor>::allocate(a);
                pass.operands[0] = rescale(a, *left, launch);
            }
            if (!right) {
                right = Prepared<Tensor>::allocate(b);
                pass.operands[1] = rescale(b, *right, launch);
            }
            run_pass(pass, device, stream);
        }
        multiply_rescaled(*left, *right);
        multiply_dequantized(&*left, &*right);
    }

    void multiply(const Options<Tensor>& options) const {
        switch (choice.kernel) {
            case Kernel::swap_ab_native: return multiply_swap_ab_native();
            case Kernel::swap_ab_dequant: return multiply_swap_ab_dequant();
            case Kernel::fused_dequant: return multiply_fused_dequant();
            case Kernel::rescale: return rescale_and_multiply(options.a, options.b);
            case Kernel::dequantize:
                return problem.grouped ? multiply_dequantized_groups()
                                       : multiply_dequantized(nullptr, nullptr);
        }
    }
};

// Checks all but the operands' dtypes and their scales; the dtype of the output.
template <class Tensor>
DType check_call(const Tensor& a, const Tensor& b, const Tensor& scale_a, const Tensor& scale_b,
                 const Options<Tensor>& options) {
    const bool grouped = options.offs.has_value();
    check_cuda(OP, "a", a);
    check_same_device(OP, "b", b, "a", a);
    check_same_device(OP, "scale_a", scale_a, "a", a);
    check_same_device(OP, "scale_b", scale_b, "a", a);
    check_dims(OP, "a", a, {2});
    check_dims(OP, "b", b, {grouped ? 3 : 2});
    TK_CHECK(b.size(-2) == a.size(1), OP, ": a has shape ", shape_text(a), " and b has shape ",
             shape_text(b), "; a's columns must be b's rows");
    gemm::check_activation(OP, options.activation);
    const DType out_dtype = gemm::checked_out_dtype<Tensor>(OP, options.out_type);
    if (options.bias) gemm::check_bias(OP, *options.bias, a, b.size(-1), {DType::bf16});
    if (grouped) gemm::check_ends(OP, *options.offs, a, b.size(0));
    return out_dtype;
}

template <class Tensor>
Tensor mxfp8_gemm_body(const Backend<Tensor>& on, const Tensor& a, const Tensor& b,
                       const Tensor& scale_a, const Tensor& scale_b,
                       const Options<Tensor>& options) {
    const DType out_dtype = check_call(a, b, scale_a, scale_b, options);
    const bool grouped = options.offs.has_value();
    const int64_t m = a.size(0), k = a.size(1), n = b.size(-1), groups = grouped ? b.size(0) : 1;
    const auto row = packed(options.bias), ends = packed(options.offs);
    const auto guard = on.guard(a);
    const Quantised<Tensor> left(OP, "a", a, scale_a, options.swizzle_a);
    // Groups have only the swap-AB kernel, whose b TMA loads.
    const Tensor columns = transpose(b, -2, -1);
    const Quantised<Tensor> right(OP, "b", grouped ? for_tensor_map(columns) : columns, scale_b,
                                  options.swizzle_b);
    Tensor out = empty({m, n}, Backend<Tensor>::scalar_type(out_dtype), a);
    if (m == 0 || n == 0) return out;
    if (groups == 0) return zeroed(out);
    const Problem problem{.m = m,
                          .n = n,
                          .k = k,
                          .a_dtype = left.dtype,
                          .b_dtype = right.dtype,
                          .out_dtype = out_dtype,
                          .fused = options.activation != 0,
                          .rescaled = options.rescaled && k > 0,
                          .readable_a = left.readable(),
                          .readable = right.readable(),
                          .short_rows = left.short_rows() && right.short_rows(),
                          .kept_b = options.b.codes.has_value(),
                          .groups = groups,
                          .grouped = grouped};
    const DeviceProperties& device = on.device(a);
    check_supported(OP, unsupported(problem, device));
    const Choice choice = on.chosen("mxfp8_gemm", choose(problem, device));
    Product<Tensor>{.on = on,
                    .a = left,
                    .b = right,
                    .problem = problem,
                    .choice = choice,
                    .bias = row,
                    .offs = ends,
                    .activation = static_cast<int>(options.activation),
                    .out = out,
                    .device = device,
                    .stream = on.stream(a)}
        .multiply(options);
    return out;
}

}  // namespace thunderkittens::mxfp8_gemm
