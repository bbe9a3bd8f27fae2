// The body of gemm, on any back end: checks, copies of what TMA cannot read, allocation, choice,
// launch. Host C++ without torch.
#pragma once

#include "csrc/gemm/common/checks.h"
#include "csrc/gemm/common/operands.h"
#include "csrc/gemm/dense/dispatch.h"

namespace thunderkittens::gemm {

constexpr const char* OP = "thunderkittens::gemm";

// What a call asks for beside the operands.
template <class Tensor>
struct Options {
    std::optional<Tensor> residual = {};
    int64_t activation = 0, gate = 0;
    double alpha = 1, beta = 1;
    bool store_aux = false;
    std::optional<Tensor> out = {};
};
template <class Tensor>
struct Outputs {
    Tensor out;
    std::optional<Tensor> aux = {};
};

// A copy of b with its columns adjacent along k. TMA reads rows from multiples of 16 bytes on only,
// and values to a gate begin in the middle of b's rows.
template <class Tensor>
Operand<Tensor> along_k(const Tensor& b) {
    Operand<Tensor> result{.tensor = copy_for_tensor_map(transpose(b, -2, -1)), .swapped = true};
    result.view = as_4d(result.tensor);
    return result;
}

// An operand in place of one without elements, k being 0: the same 8 zeros along k for every row or
// column.
template <class Tensor>
Operand<Tensor> zeros(const Tensor& like, bool swapped) {
    Operand<Tensor> result{.tensor = zeroed(empty({8}, like.scalar_type(), like)),
                           .swapped = swapped};
    result.view = as_4d(result.tensor);
    return result;
}

template <class Tensor>
bool fits_short_k(const Operand<Tensor>& x) {
    const auto& size = x.view.size;
    return short_k_extent(x.batch_stride() != 0 ? size[1] : 1, size[2], size[3], x.stride(),
                          x.batch_stride()) <= SHORT_K_EXTENT;
}

// What a call is, once it has been checked.
struct Shape {
    int64_t m, n, k, batch, out_n;
    DType dtype, out_dtype;
    Gate gate;
};

template <class Tensor>
DType check_operands(const Tensor& a, const Tensor& b, const std::optional<Tensor>& bias) {
    check_cuda(OP, "a", a);
    check_same_device(OP, "b", b, "a", a);
    const DType dtype = check_dtype(OP, "a", a, {DType::bf16, DType::fp16});
    check_same_dtype(OP, "b", b, "a", a);
    check_dims(OP, "a", a, {2, 3});
    check_dims(OP, "b", b, {2, 3});
    const bool batches_match = b.dim() == 2 || (a.dim() == 3 && a.size(0) == b.size(0));
    TK_CHECK(batches_match && a.size(-1) == b.size(-2), OP, ": a has shape ", shape_text(a),
             " and b has shape ", shape_text(b),
             "; expected (M, K) @ (K, N), (B, M, K) @ (K, N) or (B, M, K) @ (B, K, N)");
    if (bias) check_bias(OP, *bias, a, b.size(-1), {dtype});
    return dtype;
}

template <class Tensor>
Shape check_call(const Tensor& a, const Tensor& b, const std::optional<Tensor>& bias,
                 std::optional<typename Backend<Tensor>::ScalarType> out_type,
                 const Options<Tensor>& options) {
    const DType dtype = check_operands(a, b, bias);
    const DType out_dtype = checked_out_dtype<Tensor>(OP, out_type, dtype);
    check_activation(OP, options.activation);
    TK_CHECK(options.gate >= 0 && options.gate <= int64_t(Gate::interleaved), OP, ": gate is ",
             options.gate, "; expected 0 to ", int(Gate::interleaved));
    const Gate gate = static_cast<Gate>(options.gate);
    const int64_t n = b.size(-1);
    TK_CHECK(gate == Gate::none || n % 2 == 0, OP, ": b has ", n,
             " columns; a gated activation needs an even number");
    return {.m = a.size(-2),
            .n = n,
            .k = a.size(-1),
            .batch = a.dim() == 3 ? a.size(0) : 1,
            .out_n = gate == Gate::none ? n : n / 2,
            .dtype = dtype,
            .out_dtype = out_dtype,
            .gate = gate};
}

template <class Tensor>
void check_like_out(const char* name, const Tensor& x, const Tensor& a, const Shape& s) {
    using Types = Backend<Tensor>;
    check_same_device(OP, name, x, "a", a);
    const auto type = Types::scalar_type(s.out_dtype);
    const bool matches = x.dim() == a.dim() && x.size(-1) == s.out_n && x.size(-2) == s.m &&
                         (a.dim() == 2 || x.size(0) == s.batch);
    TK_CHECK(matches && x.scalar_type() == type, OP, ": ", name, " is ",
             Types::dtype_text(x.scalar_type()), ' ', shape_text(x), "; expected ",
             Types::dtype_text(type), " and the result's shape, with rows of ", s.out_n);
}

template <class Tensor>
Outputs<Tensor> allocate_outputs(const Tensor& a, const Shape& s, const Options<Tensor>& options) {
    const auto allocate = [&](int64_t columns) {
        const auto type = Backend<Tensor>::scalar_type(s.out_dtype);
        return a.dim() == 3 ? empty({s.batch, s.m, columns}, type, a)
                            : empty({s.m, columns}, type, a);
    };
    Outputs<Tensor> result{.out = options.out ? *options.out : allocate(s.out_n)};
    if (options.store_aux) result.aux = allocate(s.n);
    return result;
}

// The residual as the kernel reads it: by TMA, or with swap-AB as rows of adjacent elements.
template <class Tensor>
std::optional<Tensor> readable_residual(const std::optional<Tensor>& residual, Kernel kernel) {
    if (!residual) return std::nullopt;
    const View view = as_4d(*residual);
    // The others load it by TMA.
    const bool by_threads = kernel == Kernel::swap_ab || kernel == Kernel::cluster_tile ||
                            kernel == Kernel::short_k || kernel == Kernel::portable;
    const bool readable = by_threads
                              ? view.size[3] <= 1 || view.stride[3] == 1
                              : fits_tensor_map(view, static_cast<int>(residual->element_size()));
    return readable ? *residual : copy_for_tensor_map(*residual);
}

// Makes the rows of a batch those of one matrix, where they lie evenly.
inline bool merge_rows(View& view) {
    const bool even =
        view.size[1] == 1 || view.size[2] == 1 || view.stride[1] == view.size[2] * view.stride[2];
    if (!even) return false;
    if (view.size[2] == 1) view.stride[2] = view.stride[1];
    view.size[2] *= view.size[1];
    view.size[1] = 1;
    view.stride[1] = view.size[2] * view.stride[2];
    return true;
}

template <class Tensor>
Outputs<Tensor> gemm_body(const Backend<Tensor>& on, const Tensor& a, const Tensor& b,
                          const std::optional<Tensor>& bias,
                          std::optional<typename Backend<Tensor>::ScalarType> out_type,
                          const Options<Tensor>& options) {
    Shape s = check_call(a, b, bias, out_type, options);
    const auto guard = on.guard(a);
    if (options.residual) check_like_out("residual", *options.residual, a, s);
    if (options.out) check_like_out("out", *options.out, a, s);
    const Outputs<Tensor> result = allocate_outputs(a, s, options);
    if (s.batch == 0 || s.m == 0 || s.n == 0) return result;

    // k = 0 is a product of zeros.
    const bool nothing = s.k == 0;
    Operand<Tensor> left = nothing ? zeros(a, false) : operand_in_place(a);
    Operand<Tensor> right = nothing ? zeros(b, true) : operand_in_place(b);
    if (s.gate == Gate::blocked && !right.swapped && s.out_n % 8 != 0) right = along_k(b);
    std::optional<Tensor> row;
    if (bias) row = s.n > 1 && bias->stride(0) != 1 ? packed(*bias) : *bias;
    TK_CHECK(s.out_n == 1 || result.out.stride(-1) == 1, OP,
             ": out must have adjacent elements in its last dimension");
    View out = as_4d(result.out), rows = left.view;
    if (b.dim() == 2 && !left.swapped && !options.residual && !options.out && merge_rows(rows) &&
        (!left.needs_copy || can_align(copy_of_rows(rows, a.element_size()))) && merge_rows(out)) {
        left.view = rows;
        s.m *= s.batch, s.batch = 1;
    }
    const bool counts =
        fits_short_k(left) && fits_short_k(right) && out.stride[2] <= SHORT_K_OUT_STRIDE;
    const Problem problem{.m = s.m,
                          .n = s.n,
                          .k = nothing ? 8 : s.k,
                          .batch = s.batch,
                          .dtype = s.dtype,
                          .out_dtype = s.out_dtype,
                          .a_m_major = left.swapped,
                          .b_n_major = !right.swapped,
                          .gate = s.gate,
                          .fused = options.residual || options.activation != 0 ||
                                   s.gate != Gate::none || options.store_aux,
                          .a_alignment = left.alignment(),
                          .b_alignment = right.alignment(),
                          .a_needs_copy = left.needs_copy,
                          .b_needs_copy = right.needs_copy};
    const DeviceProperties& device = on.device(a);
    check_supported(OP, unsupported(problem, device));
    // The kernel for a short k cannot count all strides.
    const Choice found = counts ? choose(problem, device) : choose_simple(problem, device);
    const Choice chosen = on.chosen("gemm", found);
    if (chosen.kernel != Kernel::short_k) left = readable(left), right = readable(right);
    align(on, left, a, right, b);
    const auto residual = readable_residual(options.residual, chosen.kernel);
    const View added = residual ? as_4d(*residual) : View{};
    const Params params{.a = left.view.data,
                        .b = right.view.data,
                        .out = result.out.data_ptr(),
                        .m = s.m,
                        .n = s.n,
                        .k = problem.k,
                        .batch = s.batch,
                        .a_stride = nothing ? 0 : left.stride(),
                        .a_batch_stride = nothing ? 0 : left.batch_stride(),
                        .b_stride = nothing ? 0 : right.stride(),
                        .b_batch_stride = nothing ? 0 : right.batch_stride(),
                        .out_stride = out.stride[2],
                        .out_batch_stride = out.stride[1],
                        .out_dtype = s.out_dtype,
                        .epilogue = {.bias = data_as<void>(row),
                                     .residual = added.data,
                                     .aux = data_as<void>(result.aux),
                                     .residual_stride = added.stride[2],
                                     .residual_batch_stride = added.stride[1],
                                     .alpha = static_cast<float>(options.alpha),
                                     .beta = static_cast<float>(options.beta),
                                     .activation = static_cast<Activation>(options.activation),
                                     .gate = s.gate},
                        .schedule = chosen.schedule};
    const Choice choice = runnable(chosen, params);
    std::optional<Tensor> memory;
    Workspace workspace;
    if (const int64_t bytes = workspace_bytes(choice, s.m, s.n); bytes > 0) {
        memory = empty({bytes}, Backend<Tensor>::BYTE, a);
        workspace = {memory->data_ptr(), on.drawn(new_epoch())};
    }
    auto launch = on.launch("gemm", choice, a);
    launch.may_read("a", left.tensor);
    launch.may_read("b", right.tensor);
    launch.may_read("bias", row);
    // It may be what is written.
    if (added.data != params.out) launch.may_read("residual", residual);
    launch.may_write("out", result.out);
    launch.may_write("workspace", memory);
    launch.may_write("aux", result.aux);
    TK_CHECK(launch_choice(choice, params, workspace, launch.stream), OP, ": no kernel ",
             kernel_name(choice));
    return result;
}

}  // namespace thunderkittens::gemm
