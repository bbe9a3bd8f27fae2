// The body of nvfp4_gemm, on any back end: checks, allocation, choice, launch. Host C++ without
// torch.
#pragma once

#include "csrc/common/accesses.h"
#include "csrc/gemm/common/checks.h"
#include "csrc/gemm/common/listed.h"
#include "csrc/gemm/common/workspace.h"
#include "csrc/gemm/fused_dequant/fused_dequant.h"
#include "csrc/gemm/nvfp4/dispatch_portable.h"

namespace thunderkittens::nvfp4_gemm {

constexpr const char* OP = "thunderkittens::nvfp4_gemm";

// What a call asks for beside the operands and the factor of the weight.
template <class Tensor>
struct Options {
    std::optional<Tensor> bias = {};
    int64_t activation = 0;
    std::optional<typename Backend<Tensor>::ScalarType> out_type = {};
    std::optional<Tensor> offs = {};
};

// What a call is, once it has been checked.
struct Shape {
    int64_t m, n, k, groups;
    DType dtype, out_dtype;
};

template <class Tensor>
Shape check_operands(const Tensor& a, const Tensor& b, const Tensor& global_scale, int64_t n,
                     bool grouped) {
    check_cuda(OP, "a", a);
    const DType dtype = check_dtype(OP, "a", a, {DType::bf16, DType::fp16});
    check_dims(OP, "a", a, {2});
    check_same_device(OP, "b", b, "a", a);
    TK_CHECK(b.scalar_type() == Backend<Tensor>::BYTE, OP, ": b must be torch.uint8, got ",
             dtype_text_of(b));
    check_dims(OP, "b", b, {grouped ? 4 : 3});
    const int64_t m = a.size(0), k = a.size(1), groups = grouped ? b.size(0) : 1;
    TK_CHECK(
        n >= 0 && b.size(-3) == pieces(n) && b.size(-2) == pieces(k) && b.size(-1) == PIECE_BYTES,
        OP, ": b has shape ", shape_text(b), "; it is no prepared weight of ", n, " x ", k);
    gemm::check_global_scale(OP, global_scale, "a", a, grouped, groups);
    return {.m = m, .n = n, .k = k, .groups = groups, .dtype = dtype, .out_dtype = dtype};
}

// The rest of a call: `shape` learns the type of the output.
template <class Tensor>
void check_options(const Tensor& a, const Options<Tensor>& options, Shape& shape) {
    gemm::check_activation(OP, options.activation);
    shape.out_dtype = gemm::checked_out_dtype<Tensor>(OP, options.out_type, shape.dtype);
    if (options.bias) gemm::check_bias(OP, *options.bias, a, shape.n, {shape.dtype});
    if (options.offs) gemm::check_ends(OP, *options.offs, a, shape.groups);
}

// A call as the fused dequantization sees it: a product of 16-bit operands, whose weight is
// dequantized on the way. Its rows and columns in the workspace are whole pieces.
inline gemm::FusedDequantParams<gemm::Nvfp4Source> fused_dequant_params(const Params& p,
                                                                        int raster_group,
                                                                        void* workspace) {
    return {.product = {.a = p.a,
                        .b = workspace,
                        .out = p.out,
                        .m = p.m,
                        .n = p.n,
                        .k = p.k,
                        .a_stride = p.a_stride,
                        .b_stride = pieces(p.k) * PIECE,
                        .out_stride = p.n,
                        .out_dtype = p.out_dtype,
                        .epilogue = {.bias = p.bias,
                                     .alpha = gemm::NVFP4_ALPHA,
                                     .activation = static_cast<gemm::Activation>(p.activation)},
                        .schedule = {.raster_group = raster_group, .blocks = p.schedule.blocks}},
            .sources = {p.weight, p.scale}};
}

// Dequantizes the weight into a workspace under the product.
template <DType dtype, class Tensor, class Launch>
void multiply_fused_dequant(const Params& params, const Choice& choice, const Tensor& like,
                            Launch& launch) {
    constexpr gemm::Config config = gemm::fused_dequant_config(dtype);
    const Tensor workspace =
        empty({pieces(params.n) * PIECE, pieces(params.k) * PIECE}, like.scalar_type(), like);
    auto fused_dequant = fused_dequant_params(params, choice.raster_group, workspace.data_ptr());
    const Tensor counters =
        zeroed(empty({gemm::dequant_order(config, fused_dequant).counters()}, DType::int32, like));
    fused_dequant.counters = data_as<int>(counters);
    writes(launch, "dequantized", workspace, "counters", counters);
    gemm::launch_fused_dequant<config>(fused_dequant, launch.stream);
}

// Runs a kernel of the swap-AB family; false when there is no such.
inline bool launch_swap_ab(const Choice& choice, const Params& params, Stream stream) {
    return gemm::launch_listed<config_at, CONFIGS>(choice.config, [&]<Config c>() {
        if (choice.kernel != kernel_of(c)) return false;
        if constexpr (is_gemv(c))
            launch_gemv<c>(params, stream);
        else
            launch<c>(params, stream);
        return true;
    });
}

template <class Tensor>
Tensor nvfp4_gemm_body(const Backend<Tensor>& on, const Tensor& a, const Tensor& b,
                       const Tensor& global_scale, int64_t n, const Options<Tensor>& options) {
    constexpr auto BYTE = Backend<Tensor>::BYTE;
    const bool grouped = options.offs.has_value();
    Shape s = check_operands(a, b, global_scale, n, grouped);
    check_options(a, options, s);
    const auto guard = on.guard(a);
    Tensor out = empty({s.m, s.n}, Backend<Tensor>::scalar_type(s.out_dtype), a);
    if (out.numel() == 0) return out;
    if (s.groups == 0) return zeroed(out);
    // k = 0 is a product of zeros.
    const bool nothing = s.k == 0;
    const Tensor rows = nothing ? zeroed(empty({s.m, 16}, a.scalar_type(), a)) : for_tensor_map(a);
    const Tensor weight = nothing ? zeroed(empty({s.groups, pieces(s.n), 1, PIECE_BYTES}, BYTE, a))
                                  : aligned_and_contiguous(b);
    const Tensor scale = packed(global_scale);
    const auto row = packed(options.bias), ends = packed(options.offs);
    std::optional<Tensor> workspace;
    const Problem problem{.m = s.m,
                          .n = s.n,
                          .k = rows.size(1),
                          .groups = s.groups,
                          .dtype = s.dtype,
                          .out_dtype = s.out_dtype,
                          .grouped = grouped};
    const DeviceProperties& device = on.device(a);
    check_supported(OP, unsupported(problem, device));
    const Choice choice = on.chosen("nvfp4_gemm", choose(problem, device));
    if (const int64_t bytes = workspace_bytes(choice.config, choice.schedule); bytes > 0) {
        workspace = empty({bytes}, BYTE, a);
    }
    const Params params{.a = rows.data_ptr(),
                        .weight = weight.data_ptr(),
                        .scale = data_as<const float>(scale),
                        .bias = data_as<void>(row),
                        .offs = data_as<const int32_t>(ends),
                        .out = out.data_ptr(),
                        .m = s.m,
                        .n = s.n,
                        .k = rows.size(1),
                        .groups = s.groups,
                        .a_stride = rows.stride(0),
                        .out_dtype = s.out_dtype,
                        .activation = static_cast<int>(options.activation),
                        .workspace = data_as<void>(workspace),
                        .epoch = workspace ? on.drawn(gemm::new_epoch()) : 0,
                        .schedule = choice.schedule};
    auto launch = on.launch("nvfp4_gemm", choice, a);
    reads(launch, "a", rows, "b", weight, "global_scale", scale, "bias", row, "offs", ends);
    writes(launch, "out", out, "workspace", workspace);
    if (is_portable(choice.kernel)) {
        TK_CHECK(launch_portable(choice, params, launch.stream), OP, ": no kernel ",
                 kernel_name(choice));
        return out;
    }
    if (choice.kernel == Kernel::fused_dequant) {
        if (s.dtype == DType::bf16)
            multiply_fused_dequant<DType::bf16>(params, choice, a, launch);
        else
            multiply_fused_dequant<DType::fp16>(params, choice, a, launch);
        return out;
    }
    TK_CHECK(launch_swap_ab(choice, params, launch.stream), OP, ": no kernel ",
             kernel_name(choice));
    return out;
}

}  // namespace thunderkittens::nvfp4_gemm
