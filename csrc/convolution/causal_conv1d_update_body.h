// The body of causal_conv1d_update, on any back end: checks, choice and launch. Host C++ without
// torch.
#pragma once

#include "csrc/convolution/dispatch.h"
#include "csrc/convolution/operands.h"

namespace thunderkittens::convolution {

// How a step accesses states by vectors of 16 bytes, which are of one token and no longer than it
// needs; `any` where it does not.
template <class Tensor>
Layout step_layout(const Tensor& x, const Tensor& out, const Tensor& state, int width) {
    const int64_t elements = 16 / static_cast<int64_t>(x.element_size());
    const int64_t channels = x.size(1), before = width - 1;
    const auto aligned = [&](const Tensor& y) {
        return reinterpret_cast<uintptr_t>(y.data_ptr()) % 16 == 0 &&
               (y.size(0) <= 1 || y.stride(0) % elements == 0);
    };
    if (x.dim() == 3 && x.size(2) != 1) return Layout::any;
    if (state.size(2) != before || channels % elements != 0) return Layout::any;
    if (!aligned(x) || !aligned(out) || !aligned(state)) return Layout::any;
    if (x.stride(1) != 1 || out.stride(1) != 1) return Layout::any;
    if (state.stride(1) == before && (before == 1 || state.stride(2) == 1)) return Layout::tokens;
    const bool rows = before == 1 || state.stride(2) % elements == 0;
    return state.stride(1) == 1 && rows ? Layout::channels : Layout::any;
}

template <class Tensor>
Tensor causal_conv1d_update_body(const Backend<Tensor>& on, const Tensor& x, Tensor& state,
                                 const Tensor& weight, const std::optional<Tensor>& bias,
                                 int64_t activation, const std::optional<Tensor>& slots) {
    constexpr const char* OP = "tk.causal_conv1d_update";
    check_cuda(OP, "x", x);
    check_dims(OP, "x", x, {2, 3});
    check_dims(OP, "weight", weight, {2});
    check_dims(OP, "state", state, {3});
    UpdateProblem problem{
        .batch = x.size(0),
        .channels = x.size(1),
        .length = x.dim() == 3 ? x.size(2) : 1,
        .width = static_cast<int>(std::min<int64_t>(weight.size(1), MAX_WIDTH + 1)),
        .dtype = check_dtype(OP, "x", x, {DType::bf16, DType::fp16, DType::fp32})};
    TK_CHECK(activation == 0 || activation == 4, OP, ": activation must be 0 (none) or 4 (silu), ",
             "got ", activation);
    const int64_t channels = problem.channels;
    const Tensor taps =
        coefficients(OP, "weight", weight, x, problem.dtype, {channels, int64_t{problem.width}});
    std::optional<Tensor> offsets, rows;
    if (bias) offsets = coefficients(OP, "bias", *bias, x, problem.dtype, {channels});
    check_same_device(OP, "state", state, "x", x);
    check_same_dtype(OP, "state", state, "x", x);
    TK_CHECK(state.size(1) == channels && state.size(2) >= problem.width - 1, OP,
             ": state must have shape (slots, ", channels, ", ", problem.width - 1,
             " or more), got ", shape_text(state));
    if (slots) {
        check_same_device(OP, "slots", *slots, "x", x);
        check_dtype(OP, "slots", *slots, {DType::int32});
        check_sizes(OP, "slots", *slots, {problem.batch});
        rows = packed(*slots);
    } else {
        TK_CHECK(state.size(0) == problem.batch, OP, ": state has ", state.size(0),
                 " sequences, x has ", problem.batch);
    }
    const auto guard = on.guard(x);
    const DeviceProperties& device = on.device(x);
    check_supported(OP, unsupported(problem, device));
    const Tensor out = empty_as(x);
    if (out.numel() == 0) return out;
    problem.layout = step_layout(x, out, state, problem.width);
    const UpdateChoice choice = on.chosen("causal_conv1d_update", choose_update(problem, device));
    // Of one token, x and out have no stride along the tokens.
    const auto operand = [](const Tensor& tensor) {
        if (tensor.dim() == 3) return operand_of(tensor);
        return Operand{tensor.data_ptr(), tensor.stride(0), tensor.stride(1), 0};
    };
    const UpdateParams params{.x = operand(x),
                              .out = operand(out),
                              .state = operand(state),
                              .weight = coefficients_of(taps),
                              .bias = offsets ? coefficients_of(*offsets) : Coefficients{},
                              .slots = rows ? data_as<const int32_t>(*rows) : nullptr,
                              .batch = problem.batch,
                              .channels = channels,
                              .length = problem.length,
                              .state_length = state.size(2),
                              .state_count = state.size(0),
                              .layout = choice.layout,
                              .rows = choice.rows,
                              .silu = activation != 0};
    auto launcher = on.launch("causal_conv1d_update", choice, x);
    launcher.may_read("x", x);
    launcher.may_read("weight", taps);
    launcher.may_read("bias", offsets);
    launcher.may_read("slots", rows);
    launcher.may_write("state", state);
    launcher.may_write("out", out);
    launch(choice, params, launcher.stream);
    return out;
}

}  // namespace thunderkittens::convolution
