// The body of fp8_gemm, on any back end: checks, operands in the order that wgmma takes,
// allocation, choice, launch. Host C++ without torch.
#pragma once

#include <limits>

#include "csrc/common/backend.h"
#include "csrc/gemm/common/checks.h"
#include "csrc/gemm/fp8/dispatch.h"
#include "csrc/gemm/quantize/fp8_quantize.h"

namespace thunderkittens::fp8_gemm {

constexpr const char* OP = "thunderkittens::fp8_gemm";

// What a call asks for beside the operands and their scales.
template <class Tensor>
struct Options {
    std::optional<Tensor> bias = {};
    int64_t activation = 0;
    std::optional<typename Backend<Tensor>::ScalarType> out_type = {};
    bool accurate = true;
    std::optional<Tensor> offs = {};
};

// An operand, K-major: (groups, rows, k).
template <class Tensor>
struct Operand {
    Tensor tensor;  // keeps a copy alive
    const void* data = nullptr;
    int64_t stride = 0, group_stride = 0;
};

// The transpose of a view of bytes (groups, rows, k) whose rows are adjacent instead of its k.
template <class Tensor>
Tensor transposed_by_kernel(const Backend<Tensor>& on, const Tensor& tensor, const View& view,
                            int64_t pitch) {
    namespace q = fp8_quantize;
    const int64_t groups = view.size[1], rows = view.size[2], k = view.size[3];
    const View columns = transposed(view);
    const bool aligned = reinterpret_cast<uintptr_t>(view.data) % 8 == 0 && rows % 8 == 0 &&
                         columns.stride[2] % 8 == 0 && columns.stride[1] % 8 == 0;
    const int64_t blocks = q::blocks_of(q::Pass::transpose, k, rows, 0);
    TK_CHECK(double(blocks) * double(groups) <= std::numeric_limits<int32_t>::max(), OP, ": ",
             groups, " operands of ", rows, " x ", k, " are too large to be transposed");
    const Tensor copy = empty({groups, rows, pitch}, tensor.scalar_type(), tensor);
    auto launch = on.launch("fp8_gemm transpose", tensor);
    launch.may_read("operand", tensor);
    launch.may_write("copy", copy);
    const q::Params params{.x = view.data,
                           .m = k,
                           .k = rows,
                           .stride = columns.stride[2],
                           .out_t = copy.data_ptr(),
                           .aligned = aligned,
                           .pitch_t = pitch,
                           .batch_stride = columns.stride[1],
                           .batches = static_cast<int>(groups),
                           .blocks = static_cast<int>(blocks)};
    if (runs_native(on.device(tensor))) {
        q::launch<q::TRANSPOSE>(params, launch.stream);
    } else if constexpr (BUILDS_PORTABLE) {
        q::launch<q::PORTABLE_TRANSPOSE>(params, launch.stream);
    }
    return copy;
}

// The operand of a view (groups, rows, k) of a tensor, whose last two dimensions may be swapped.
// What neither TMA nor the kernel that transposes can read is copied.
template <class Tensor>
Operand<Tensor> operand(const Backend<Tensor>& on, const Tensor& tensor, bool swapped) {
    const View view = swapped ? transposed(as_4d(tensor)) : as_4d(tensor);
    if (fits_tensor_map(view, 1)) {
        return {tensor, view.data, view.stride[2], view.size[1] > 1 ? view.stride[1] : 0};
    }
    const int64_t rows = view.size[2], pitch = (view.size[3] + 15) / 16 * 16;
    Tensor copy = view.stride[2] == 1
                      ? transposed_by_kernel(on, tensor, view, pitch)
                      : copy_for_tensor_map(swapped ? transpose(tensor, -2, -1) : tensor);
    const void* data = copy.data_ptr();
    return {std::move(copy), data, pitch, rows * pitch};
}

// What a call is, once it has been checked.
struct Shape {
    int64_t m, n, k, groups;
    ScaleKind kind;
    DType a_dtype, b_dtype, out_dtype;
    DType bias_dtype = DType::bf16;
};

template <class Tensor>
Shape check_operands(const Tensor& a, const Tensor& b, const Tensor& scale_a, const Tensor& scale_b,
                     bool grouped) {
    check_cuda(OP, "a", a);
    check_same_device(OP, "b", b, "a", a);
    const DType a_dtype = check_dtype(OP, "a", a, {DType::e4m3, DType::e5m2});
    const DType b_dtype = check_dtype(OP, "b", b, {DType::e4m3, DType::e5m2});
    check_same_device(OP, "scale_a", scale_a, "a", a);
    check_same_device(OP, "scale_b", scale_b, "a", a);
    check_dtype(OP, "scale_a", scale_a, {DType::fp32});
    check_dtype(OP, "scale_b", scale_b, {DType::fp32});
    check_dims(OP, "a", a, {2});
    check_dims(OP, "b", b, {grouped ? 3 : 2});
    check_dims(OP, "scale_a", scale_a, {2});
    check_dims(OP, "scale_b", scale_b, {2, grouped ? 3 : 2});
    TK_CHECK(a.size(1) == b.size(-2), OP, ": a has shape ", shape_text(a), " and b has shape ",
             shape_text(b), "; a's columns must be b's rows");
    const int64_t m = a.size(0), k = a.size(1), n = b.size(-1), groups = grouped ? b.size(0) : 1;
    const ScaleKind kind =
        scale_kind({scale_a.size(0), scale_a.size(1), scale_b.size(-2), scale_b.size(-1)}, m, n, k);
    TK_CHECK(kind.valid && (scale_b.dim() == 2 || scale_b.size(0) == groups), OP,
             ": the scales have shapes ", shape_text(scale_a), " and ", shape_text(scale_b),
             ", which do not fit a of shape ", shape_text(a), " and b of shape ", shape_text(b));
    return {.m = m,
            .n = n,
            .k = k,
            .groups = groups,
            .kind = kind,
            .a_dtype = a_dtype,
            .b_dtype = b_dtype,
            .out_dtype = DType::bf16};
}

// The rest of a call: `shape` learns the types of the output and the bias.
template <class Tensor>
void check_options(const Tensor& a, const Options<Tensor>& options, Shape& shape) {
    gemm::check_activation(OP, options.activation);
    shape.out_dtype = gemm::checked_out_dtype<Tensor>(OP, options.out_type);
    if (options.bias) {
        shape.bias_dtype = gemm::check_bias(OP, *options.bias, a, shape.n,
                                            {DType::bf16, DType::fp16, DType::fp32});
    }
    if (options.offs) gemm::check_ends(OP, *options.offs, a, shape.groups);
}

template <class Tensor>
Tensor fp8_gemm_body(const Backend<Tensor>& on, const Tensor& a, const Tensor& b,
                     const Tensor& scale_a, const Tensor& scale_b, const Options<Tensor>& options) {
    Shape s = check_operands(a, b, scale_a, scale_b, options.offs.has_value());
    check_options(a, options, s);
    const auto row = packed(options.bias), ends = packed(options.offs);

    const auto guard = on.guard(a);
    Tensor out = empty({s.m, s.n}, Backend<Tensor>::scalar_type(s.out_dtype), a);
    if (s.m == 0 || s.n == 0) return out;
    if (s.groups == 0) return zeroed(out);
    // Without k all sums are zero, which the kernel of promoted sums begins with.
    const bool blockwise = s.kind.blockwise, nothing = s.k == 0;
    const Problem problem{.m = s.m,
                          .n = s.n,
                          .k = s.k,
                          .groups = s.groups,
                          .a_dtype = s.a_dtype,
                          .b_dtype = s.b_dtype,
                          .out_dtype = s.out_dtype,
                          .accurate = options.accurate || nothing,
                          .blockwise = blockwise,
                          .blockwise_1d1d = s.kind.is_1d1d,
                          .grouped = options.offs.has_value(),
                          .activated = options.activation != 0};
    const DeviceProperties& device = on.device(a);
    check_supported(OP, unsupported(problem, device));
    const auto left = nothing ? Operand<Tensor>{out, out.data_ptr(), 16, 0} : operand(on, a, false);
    const auto right = nothing ? left : operand(on, b, true);
    const Choice chosen = on.chosen("fp8_gemm", choose(problem, device));
    const bool row_scales = blockwise || scale_a.size(0) > 1;
    const bool column_scales = blockwise || scale_b.size(-1) > 1;
    const Params params{
        .a = left.data,
        .b = right.data,
        .bias = data_as<void>(row),
        .offs = data_as<const int32_t>(ends),
        .out = out.data_ptr(),
        .m = s.m,
        .n = s.n,
        .k = s.k,
        .groups = s.groups,
        .a_stride = left.stride,
        .b_stride = right.stride,
        .b_group_stride = right.group_stride,
        .scale_a = {data_as<const float>(scale_a), row_scales ? scale_a.stride(0) : 0,
                    scale_a.stride(1)},
        .scale_b = {data_as<const float>(scale_b), column_scales ? scale_b.stride(-1) : 0,
                    scale_b.stride(-2),
                    scale_b.dim() == 3 && scale_b.size(0) > 1 ? scale_b.stride(0) : 0},
        .blockwise = blockwise,
        .is_1d1d = s.kind.is_1d1d,
        .out_dtype = s.out_dtype,
        .bias_dtype = s.bias_dtype,
        .activation = static_cast<int>(options.activation),
        .schedule = chosen.schedule};
    const Choice choice = runnable(chosen, params);
    auto launch = on.launch("fp8_gemm", choice, a);
    if (!nothing) {
        launch.may_read("a", left.tensor);
        launch.may_read("b", right.tensor);
    }
    launch.may_read("scale_a", scale_a);
    launch.may_read("scale_b", scale_b);
    launch.may_read("bias", row);
    launch.may_read("offs", ends);
    launch.may_write("out", out);
    TK_CHECK(launch_choice(choice, params, launch.stream), OP, ": no kernel ", kernel_name(choice));
    return out;
}

}  // namespace thunderkittens::fp8_gemm
