// mxfp8_gemm and mxfp8_prepare on the emulator, as mxfp8_gemm.cpp does them on CUDA tensors. Scales
// and tile masks travel as bytes.
#include "csrc/common/emulated.h"
#include "csrc/gemm/dense/dispatch.h"
#include "csrc/gemm/fp8/split_k.h"
#include "csrc/gemm/mxfp8/mxfp8_gemm.h"
#include "csrc/gemm/quantize/block_scaled_dispatch.h"

namespace thunderkittens::mxfp8_gemm {
namespace {

using emulated::Array;

constexpr DType BYTE = DType::e4m3;  // as what bytes travel

Array packed(const Array& a) {
    Array copy = emulated::allocate(a.size, a.dtype);
    emulated::copy_elements(copy, a);
    return copy;
}

struct Quantised {
    Array data, scale;
    block_scaled::Matrix matrix;
    bool swizzle;

    Quantised(const Array& given, const Array& scales, bool swizzled)
        : data(given), scale(packed(scales)), swizzle(swizzled) {
        if (given.size.back() > 1 && given.stride.back() != 1) data = packed(given);
        matrix = block_scaled::matrix_of(data.view());
        const auto shape = block_scaled::scale_shape(matrix.rows, matrix.columns, BLOCK, swizzle);
        TK_CHECK(scale.elements() == matrix.batch * shape.rows * shape.columns,
                 "tk.mxfp8_gemm: scale and data do not match");
    }
    bool short_rows() const { return matrix.row_stride <= INT32_MAX; }
    bool readable() const {
        return swizzle && aligned_scales(scale.data) && fits_tensor_map(data.view(), 1);
    }
};
struct Prepared {
    Array codes, factor, mask;

    explicit Prepared(const Quantised& o) {
        const block_scaled::Matrix& m = o.matrix;
        const auto make = [&](std::vector<int64_t> sizes, DType dtype) {
            if (o.data.dims() == 2) sizes.erase(sizes.begin());
            return emulated::allocate(sizes, dtype);
        };
        codes = make({m.batch, m.rows, round_up(m.columns, 16)}, BYTE);
        factor = make({m.batch, m.rows}, DType::fp32);
        mask = make({m.batch, mask_words(m.rows), MASK_BYTES}, BYTE);
    }
    Prepared(const Array& c, const Array& f, const Array& m)
        : codes(packed(c)), factor(packed(f)), mask(packed(m)) {}
};

Rescale rescale(const Quantised& o, const Prepared& to) {
    return {.data = o.matrix,
            .scale = o.scale.data,
            .swizzle = o.swizzle,
            .e5m2 = o.data.dtype == DType::e5m2,
            .codes = to.codes.data,
            .pitch = round_up(o.matrix.columns, 16),
            .factor = reinterpret_cast<float*>(to.factor.data),
            .mask = to.mask.data,
            .blocks = rescale_blocks(o.matrix)};
}
void access(emulated::Launch& scope, const Quantised& o, const Prepared& to) {
    scope.may_read("data", o.data);
    scope.may_read("scale", o.scale);
    scope.may_write("codes", to.codes);
    scope.may_write("factor", to.factor);
    scope.may_write("marks", to.mask);
}

emulated::Result run_prepare(const emulated::Call& call) {
    const Quantised operand(call.array("data"), call.array("scale"), call.scalar("swizzle", true));
    const Prepared prepared(operand);
    emulated::Result result;
    result.arrays = {
        {"codes", prepared.codes}, {"factor", prepared.factor}, {"marks", prepared.mask}};
    if (prepared.factor.elements() == 0) return result;
    emulated::Launch scope("mxfp8_prepare rescale");
    access(scope, operand, prepared);
    run_pass(RescaleParams{.operands = {rescale(operand, prepared)}}, nullptr);
    result.choice = detail::fields_of(PrepareChoice{});
    result.choice.emplace("kernel", "rescale");
    return result;
}

struct Product {
    const Quantised &a, &b;
    Problem problem;
    Choice choice;
    std::optional<Array> bias, offs;
    int activation;
    Array out;
    const DeviceProperties& device;

    DequantizePass pass(const Quantised& o, const Array& to) const {
        return {.source = {.data = o.matrix,
                           .scale = o.scale.data,
                           .out = to.data,
                           .swizzle = o.swizzle},
                .e5m2 = o.data.dtype == DType::e5m2,
                .swap_ab_order = choice.skinny,
                .pitch = to.size.back(),
                .tiles = static_cast<int>(block_scaled::tiles(o.matrix.rows, o.matrix.columns, 1))};
    }
    void multiply_swap_ab() const {
        const Array wide =
            emulated::allocate({problem.m, round_up(problem.k, CHUNK_K)}, DType::bf16);
        const Array ones = emulated::allocate({problem.groups}, DType::fp32);
        DequantizePassParams dequantize{.operands = {pass(a, wide)},
                                        .ones = reinterpret_cast<float*>(ones.data),
                                        .ones_count = problem.groups};
        dequantize.blocks = dequantize_blocks(dequantize, device);
        {
            emulated::Launch scope("mxfp8_gemm dequantize");
            scope.may_read("data", a.data);
            scope.may_read("scale", a.scale);
            scope.may_write("a", wide);
            scope.may_write("ones", ones);
            run_pass(dequantize, nullptr);
        }
        const DequantParams params{
            .a = wide.data,
            .weight = b.matrix.data,
            .scales = b.scale.data,
            .scale = dequantize.ones,
            .bias = bias ? bias->data : nullptr,
            .offs = offs ? reinterpret_cast<const int32_t*>(offs->data) : nullptr,
            .out = out.data,
            .m = problem.m,
            .n = problem.n,
            .k = problem.k,
            .groups = problem.groups,
            .weight_stride = b.matrix.row_stride,
            .group_stride = b.matrix.batch_stride,
            .out_dtype = problem.out_dtype,
            .activation = activation,
            .schedule = choice.swap_ab_schedule};
        emulated::Launch scope("mxfp8_gemm " + kernel_name(choice));
        scope.may_read("a", wide);
        scope.may_read_early("b", b.data);
        scope.may_read_early("scale_b", b.scale);
        scope.may_read("ones", ones);
        if (bias) scope.may_read("bias", *bias);
        if (offs) scope.may_read_early("offs", *offs);
        scope.may_write("out", out);
        TK_CHECK(launch_any_dequant(choice.dequant_config, params, nullptr),
                 "tk.mxfp8_gemm: no kernel ", kernel_name(choice));
    }
    void multiply_native() const {
        const NativeParams params{.a = a.matrix.data,
                                  .weight = b.matrix.data,
                                  .scales_a = a.scale.data,
                                  .scales_weight = b.scale.data,
                                  .bias = bias ? bias->data : nullptr,
                                  .out = out.data,
                                  .m = problem.m,
                                  .n = problem.n,
                                  .k = problem.k,
                                  .a_stride = a.matrix.row_stride,
                                  .weight_stride = b.matrix.row_stride,
                                  .out_dtype = problem.out_dtype,
                                  .activation = activation,
                                  .schedule = choice.swap_ab_schedule};
        emulated::Launch scope("mxfp8_gemm " + kernel_name(choice));
        for (const Quantised* operand : {&a, &b}) {
            scope.may_read("data", operand->data);
            scope.may_read("scale", operand->scale);
        }
        if (bias) scope.may_read("bias", *bias);
        scope.may_write("out", out);
        TK_CHECK(launch_any_native(choice.native_shape, params, nullptr),
                 "tk.mxfp8_gemm: no kernel ", kernel_name(choice));
    }
    void multiply_exactly(const Prepared* left, const Prepared* right) const {
        const int64_t pitch = round_up(std::max<int64_t>(problem.k, 1), 8);
        gemm::TileMask mask;
        if (left != nullptr) {
            mask = {reinterpret_cast<const uint64_t*>(left->mask.data),
                    reinterpret_cast<const uint64_t*>(right->mask.data)};
        }
        const auto allow_mask = [&](emulated::Launch& scope) {
            if (left == nullptr) return;
            scope.may_read("marks_a", left->mask);
            scope.may_read("marks_b", right->mask);
        };
        const Array wide_a = emulated::allocate({problem.m, pitch}, DType::bf16);
        const Array wide_b = emulated::allocate({problem.n, pitch}, DType::bf16);
        if (problem.k == 0) {
            for (const Array* x : {&wide_a, &wide_b}) {
                std::memset(x->data, 0, static_cast<std::size_t>(x->extent()));
            }
        } else {
            emulated::Launch scope("mxfp8_gemm dequantize");
            for (const Quantised* o : {&a, &b}) {
                scope.may_read("data", o->data);
                scope.may_read("scale", o->scale);
            }
            scope.may_write("a", wide_a);
            scope.may_write("b", wide_b);
            allow_mask(scope);
            DequantizePassParams params{.operands = {pass(a, wide_a), pass(b, wide_b)},
                                        .mask = mask,
                                        .m = problem.m,
                                        .n = problem.n};
            params.blocks = dequantize_blocks(params, device);
            run_pass(params, nullptr);
        }
        gemm::Params params = product_of(wide_a, wide_b);
        params.mask = mask;
        emulated::Launch scope("mxfp8_gemm " + gemm::kernel_name(choice.exact));
        scope.may_read("a", wide_a);
        scope.may_read("b", wide_b);
        if (bias) scope.may_read("bias", *bias);
        allow_mask(scope);
        scope.may_write("out", out);
        TK_CHECK(gemm::launch_any(choice.exact.config, params, nullptr),
                 "tk.mxfp8_gemm: no kernel ", gemm::kernel_name(choice.exact));
    }
    gemm::Params product_of(const Array& wide_a, const Array& wide_b) const {
        const int64_t pitch = wide_a.size.back();
        return {.a = wide_a.data,
                .b = wide_b.data,
                .out = out.data,
                .m = problem.m,
                .n = problem.n,
                .k = std::max<int64_t>(problem.k, 1),
                .a_stride = pitch,
                .b_stride = pitch,
                .out_stride = problem.n,
                .out_dtype = problem.out_dtype,
                .epilogue = {.bias = bias ? bias->data : nullptr,
                             .activation = static_cast<gemm::Activation>(activation)},
                .schedule = choice.exact.schedule};
    }
    void multiply_fused_dequant() const {
        const auto source = [](const Quantised& o) {
            return gemm::Mxfp8Source{.codes = o.matrix.data,
                                     .scales = o.scale.data,
                                     .stride = static_cast<int>(o.matrix.row_stride),
                                     .e5m2 = o.data.dtype == DType::e5m2};
        };
        const Array wide_a = emulated::allocate({problem.m, problem.k}, DType::bf16);
        const Array wide_b = emulated::allocate({problem.n, problem.k}, DType::bf16);
        gemm::FusedDequantParams<gemm::Mxfp8Sources> params{.product = product_of(wide_a, wide_b),
                                                            .sources = {source(a), source(b)}};
        const Array counters = emulated::allocate(
            {gemm::dequant_order(choice.exact.config, params).counters()}, DType::int32);
        std::memset(counters.data, 0, static_cast<std::size_t>(counters.extent()));
        params.counters = reinterpret_cast<int*>(counters.data);
        emulated::Launch scope("mxfp8_gemm fused_dequant");
        for (const Quantised* o : {&a, &b}) {
            scope.may_read("data", o->data);
            scope.may_read("scale", o->scale);
        }
        scope.may_write("a", wide_a);
        scope.may_write("b", wide_b);
        scope.may_write("counters", counters);
        if (bias) scope.may_read("bias", *bias);
        scope.may_write("out", out);
        TK_CHECK(launch_any_fused_dequant(choice.exact.config, params, nullptr),
                 "tk.mxfp8_gemm: no kernel ", kernel_name(choice));
    }
    void multiply_rescaled(const Prepared& left, const Prepared& right) const {
        const fp8_gemm::Params params{
            .a = left.codes.data,
            .b = right.codes.data,
            .bias = bias ? bias->data : nullptr,
            .out = out.data,
            .m = problem.m,
            .n = problem.n,
            .k = problem.k,
            .a_stride = left.codes.size.back(),
            .b_stride = right.codes.size.back(),
            .scale_a = {reinterpret_cast<const float*>(left.factor.data), 1, 0},
            .scale_b = {reinterpret_cast<const float*>(right.factor.data), 1, 0},
            .out_dtype = problem.out_dtype,
            .activation = activation,
            .schedule = choice.product.schedule};
        {
            emulated::Launch scope("mxfp8_gemm " + fp8_gemm::kernel_name(choice.product));
            for (const Prepared* p : {&left, &right}) {
                scope.may_read("codes", p->codes);
                scope.may_read("factor", p->factor);
            }
            if (bias) scope.may_read("bias", *bias);
            scope.may_write("out", out);
            TK_CHECK(fp8_gemm::launch_choice(choice.product.config, params, nullptr),
                     "tk.mxfp8_gemm: no kernel ", fp8_gemm::kernel_name(choice.product));
        }
        multiply_exactly(&left, &right);
    }
};

std::optional<Prepared> given(const emulated::Call& call, const std::string& name) {
    const Array* codes = call.optional("codes_" + name);
    if (codes == nullptr) return std::nullopt;
    return Prepared(*codes, call.array("factor_" + name), call.array("marks_" + name));
}

emulated::Result run_gemm(const emulated::Call& call) {
    Array b = call.array("b");
    const std::size_t dims = b.size.size();
    std::swap(b.size[dims - 2], b.size[dims - 1]);
    std::swap(b.stride[dims - 2], b.stride[dims - 1]);
    const Array* ends = call.optional("offs");
    const Quantised left(call.array("a"), call.array("scale_a"), call.scalar("swizzle_a", true));
    const Quantised right(ends ? emulated::for_tensor_map(b) : b, call.array("scale_b"),
                          call.scalar("swizzle_b", true));
    const int64_t m = left.matrix.rows, n = right.matrix.rows, k = left.matrix.columns;
    const int activation = call.scalar("activation", 0);
    const Problem problem{.m = m,
                          .n = n,
                          .k = k,
                          .a_dtype = left.data.dtype,
                          .b_dtype = right.data.dtype,
                          .out_dtype = call.scalar("out_dtype", DType::bf16),
                          .fused = activation != 0,
                          .rescaled = call.scalar("rebased", false) && k > 0,
                          .readable_a = left.readable(),
                          .readable = right.readable(),
                          .short_rows = left.short_rows() && right.short_rows(),
                          .groups = ends ? b.size[0] : 1,
                          .grouped = ends != nullptr};
    const Array out = emulated::allocate({m, n}, problem.out_dtype);
    emulated::Result result;
    result.arrays["out"] = out;
    if (out.elements() == 0) return result;
    if (problem.groups == 0) {
        std::memset(out.data, 0, static_cast<std::size_t>(out.extent()));
        return result;
    }
    if (const std::string reason = unsupported(problem, call.device); !reason.empty()) {
        throw std::runtime_error(concat("tk.mxfp8_gemm: ", reason));
    }
    std::optional<Array> bias;
    if (const Array* row = call.optional("bias")) bias = packed(*row);
    std::optional<Array> offs;
    if (ends) offs = packed(*ends);
    Choice choice = choose(problem, call.device);
    emulated::force(choice, call);
    if (choice.fused_dequant) {
        TK_CHECK(problem.can_fuse_dequant(),
                 "tk.mxfp8_gemm: the fused dequantization is not for this");
        const bool narrow = choice.exact.config.block_n == 176;
        const gemm::Config config = narrow ? gemm::narrow_fused_dequant_config(DType::bf16)
                                           : gemm::fused_dequant_config(DType::bf16);
        const int64_t tiles = gemm::regions(m, config.block_m) * gemm::regions(n, config.block_n);
        choice.exact = {config,
                        {.raster_group = 2,
                         .blocks = static_cast<int>(
                             std::min<int64_t>(tiles, std::max(1, call.device.sm_count)))}};
    }
    const Product product{left, right, problem, choice, bias, offs, activation, out, call.device};
    result.choice = detail::fields_of(product.choice);
    result.choice.emplace("kernel", kernel_name(product.choice));
    if (choice.native) {
        product.multiply_native();
        return result;
    }
    if (!problem.rescaled) {
        if (choice.skinny)
            product.multiply_swap_ab();
        else if (choice.fused_dequant)
            product.multiply_fused_dequant();
        else
            product.multiply_exactly(nullptr, nullptr);
        return result;
    }
    auto prepared_a = given(call, "a"), prepared_b = given(call, "b");
    RescaleParams pass;
    {
        emulated::Launch scope("mxfp8_gemm rescale");
        if (!prepared_a) {
            prepared_a.emplace(left);
            pass.operands[0] = rescale(left, *prepared_a);
            access(scope, left, *prepared_a);
        }
        if (!prepared_b) {
            prepared_b.emplace(right);
            pass.operands[1] = rescale(right, *prepared_b);
            access(scope, right, *prepared_b);
        }
        run_pass(pass, nullptr);
    }
    product.multiply_rescaled(*prepared_a, *prepared_b);
    return result;
}

const bool registered = emulated::register_run("mxfp8_prepare", &run_prepare) &&
                        emulated::register_run("mxfp8_gemm", &run_gemm);

}  // namespace
}  // namespace thunderkittens::mxfp8_gemm
