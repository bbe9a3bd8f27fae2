// The body of nvfp4_gemm, on any back end: checks, allocation, choice, launch. Host C++ without
// torch.
#pragma once

#include "csrc/common/backend.h"
#include "csrc/gemm/common/listed.h"
#include "csrc/gemm/common/workspace.h"
#include "csrc/gemm/nvfp4/dequant_params.h"

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

template <class Tensor, class Type>
Tensor zeros(std::initializer_list<int64_t> sizes, Type type, const Tensor& like) {
    Tensor result = empty(sizes, type, like);
    zero_(result);
    return result;
}

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
    check_same_device(OP, "global_scale", global_scale, "a", a);
    check_dtype(OP, "global_scale", global_scale, {DType::fp32});
    TK_CHECK(global_scale.dim() == (grouped ? 1 : 0) && global_scale.numel() == groups, OP,
             ": global_scale has shape ", shape_text(global_scale),
             "; expected one value per matrix of b");
    return {.m = m, .n = n, .k = k, .groups = groups, .dtype = dtype, .out_dtype = dtype};
}

// The rest of a call: `shape` learns the type of the output.
template <class Tensor>
void check_options(const Tensor& a, const Options<Tensor>& options, Shape& shape) {
    using Types = Backend<Tensor>;
    if (options.bias) {
        const Tensor& bias = *options.bias;
        check_same_device(OP, "bias", bias, "a", a);
        check_same_dtype(OP, "bias", bias, "a", a);
        TK_CHECK(bias.dim() == 1 && bias.size(0) == shape.n, OP, ": bias has shape ",
                 shape_text(bias), "; expected (", shape.n, ",)");
    }
    if (options.offs) {
        const Tensor& offs = *options.offs;
        check_same_device(OP, "offs", offs, "a", a);
        check_dtype(OP, "offs", offs, {DType::int32});
        TK_CHECK(offs.dim() == 1 && offs.size(0) == shape.groups, OP, ": offs has shape ",
                 shape_text(offs), "; expected (", shape.groups, ",)");
    }
    TK_CHECK(options.activation >= 0 && options.activation <= 4, OP, ": activation is ",
             options.activation, "; it is 0 to 4");
    const std::optional<DType> out_dtype =
        options.out_type ? Types::dtype_of(*options.out_type) : shape.dtype;
    TK_CHECK(out_dtype == DType::bf16 || out_dtype == DType::fp16 || out_dtype == DType::fp32, OP,
             ": out_dtype must be torch.bfloat16, torch.float16 or torch.float32, got ",
             Types::dtype_text(*options.out_type));
    shape.out_dtype = *out_dtype;
}

// Dequantizes the weight into a workspace under the product.
template <DType dtype, class Tensor, class Launch>
void multiply_fused_dequant(const Params& params, const Choice& choice, const Tensor& like,
                            Launch& launch) {
    constexpr gemm::Config config = gemm::fused_dequant_config(dtype);
    const Tensor workspace =
        empty({pieces(params.n) * PIECE, pieces(params.k) * PIECE}, like.scalar_type(), like);
    auto fused_dequant =
        gemm::fused_dequant_params(params, choice.raster_group, workspace.data_ptr());
    const Tensor counters =
        zeros({gemm::dequant_order(config, fused_dequant).counters()}, DType::int32, like);
    fused_dequant.counters = data_as<int>(counters);
    launch.may_write("dequantized", workspace);
    launch.may_write("counters", counters);
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
    if (s.groups == 0) {
        zero_(out);
        return out;
    }
    // k = 0 is a product of zeros.
    const bool nothing = s.k == 0;
    const Tensor rows = nothing ? zeros({s.m, 16}, a.scalar_type(), a) : for_tensor_map(a);
    const Tensor weight = nothing ? zeros({s.groups, pieces(s.n), 1, PIECE_BYTES}, BYTE, a)
                                  : aligned_and_contiguous(b);
    const Tensor scale = packed(global_scale);
    std::optional<Tensor> row, ends, workspace;
    if (options.bias) row = packed(*options.bias);
    if (options.offs) ends = packed(*options.offs);
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
    launch.may_read("a", rows);
    launch.may_read("b", weight);
    launch.may_read("global_scale", scale);
    launch.may_read("bias", row);
    launch.may_read("offs", ends);
    launch.may_write("out", out);
    launch.may_write("workspace", workspace);
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
