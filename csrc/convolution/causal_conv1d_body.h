// The bodies of causal_conv1d and of its gradient, on any back end: checks, allocation, choice and
// launch. Host C++ without torch.
#pragma once

#include <optional>
#include <tuple>
#include <vector>

#include "csrc/convolution/dispatch.h"
#include "csrc/convolution/operands.h"

namespace thunderkittens::convolution {

// The arguments of a call, and copies of what kernels cannot read as it is.
template <class Tensor>
struct ConvCall {
    const char* op;
    const Tensor& x;
    Tensor weight;
    std::optional<Tensor> bias, edges;
    const std::optional<Tensor>& state;
    ConvBackwardProblem problem;

    ConvCall(const char* op_, const Tensor& x_, const Tensor& weight_,
             const std::optional<Tensor>& bias_, int64_t activation,
             const std::optional<Tensor>& state_, const std::optional<Tensor>& cu_seqlens)
        : op(op_), x(x_), weight(weight_), state(state_) {
        check_cuda(op, "x", x);
        check_dims(op, "x", x, {3});
        check_dims(op, "weight", weight, {2});
        problem.dtype = check_dtype(op, "x", x, {DType::bf16, DType::fp16, DType::fp32});
        problem.batch = problem.sequences = x.size(0);
        problem.channels = x.size(1);
        problem.length = x.size(2);
        problem.width = static_cast<int>(std::min<int64_t>(weight.size(1), MAX_WIDTH + 1));
        TK_CHECK(activation == 0 || activation == 4, op, ": activation must be 0 (none) or 4 ",
                 "(silu), got ", activation);
        weight = coefficients(op, "weight", weight, x, problem.dtype,
                              {problem.channels, int64_t{problem.width}});
        if (bias_) {
            bias = coefficients(op, "bias", *bias_, x, problem.dtype, {problem.channels});
        }
        if (cu_seqlens) {
            check_same_device(op, "cu_seqlens", *cu_seqlens, "x", x);
            check_dtype(op, "cu_seqlens", *cu_seqlens, {DType::int32});
            check_dims(op, "cu_seqlens", *cu_seqlens, {1});
            TK_CHECK(cu_seqlens->size(0) >= 1, op, ": cu_seqlens must have an element or more");
            TK_CHECK(problem.batch == 1, op, ": with cu_seqlens x must have a batch of 1, got ",
                     shape_text(x));
            problem.sequences = cu_seqlens->size(0) - 1;
            edges = packed(*cu_seqlens);
        }
        if (state) check_state("state", *state);
    }
    void check_state(const char* name, const Tensor& given) const {
        check_same_device(op, name, given, "x", x);
        check_same_dtype(op, name, given, "x", x);
        check_sizes(op, name, given,
                    {problem.sequences, problem.channels, int64_t{problem.width - 1}});
    }
    Params params(bool silu) const {
        Params p;
        p.x = operand_of(x);
        if (state) p.initial = operand_of(*state);
        p.weight = coefficients_of(weight);
        if (bias) p.bias = coefficients_of(*bias);
        p.sequences = {edges ? data_as<const int32_t>(*edges) : nullptr, problem.sequences};
        p.batch = problem.batch;
        p.channels = problem.channels;
        p.length = problem.length;
        p.silu = silu;
        return p;
    }
    template <class Launch>
    void may_read(Launch& launch) const {
        launch.may_read("x", x);
        launch.may_read("weight", weight);
        launch.may_read("bias", bias);
        launch.may_read("cu_seqlens", edges);
        launch.may_read("state", state);
    }
};

template <class Tensor>
struct ConvResults {
    Tensor out;
    std::optional<Tensor> state;  // where it is asked for
};

template <class Tensor>
ConvResults<Tensor> causal_conv1d_body(const Backend<Tensor>& on, const Tensor& x,
                                       const Tensor& weight, const std::optional<Tensor>& bias,
                                       int64_t activation, const std::optional<Tensor>& state,
                                       const std::optional<Tensor>& cu_seqlens, bool return_state) {
    constexpr const char* OP = "tk.causal_conv1d";
    const ConvCall<Tensor> call(OP, x, weight, bias, activation, state, cu_seqlens);
    ConvProblem problem = call.problem;
    problem.return_state = return_state;
    const auto guard = on.guard(x);
    const DeviceProperties& device = on.device(x);
    check_supported(OP, unsupported(problem, device));
    const Tensor out = empty_as(x);
    std::optional<Tensor> final;
    if (return_state) {
        final = empty({problem.sequences, problem.channels, int64_t{problem.width - 1}},
                      x.scalar_type(), x);
    }
    const bool with_state = final && final->numel() > 0;
    if (out.numel() == 0 && !with_state) return {out, final};
    problem.layout = layout_of(x, out);
    const ConvChoice choice = on.chosen("causal_conv1d", choose(problem, device));
    problem.layout = choice.layout;
    Params params = call.params(activation != 0);
    params.out = operand_of(out);
    if (with_state) params.final = operand_of(*final);
    params.grid = forward_grid(problem, choice);
    params.steps = choice.steps;
    auto launcher = on.launch("causal_conv1d", choice, x);
    call.may_read(launcher);
    launcher.may_write("out", out);
    launcher.may_write("final state", final);
    launch(choice, params, launcher.stream);
    return {out, final};
}

// What a call's gradient is asked for; those that are not wanted are empty.
template <class Tensor>
std::tuple<Tensor, Tensor, Tensor, Tensor> causal_conv1d_backward_body(
    const Backend<Tensor>& on, const Tensor& grad_out, const std::optional<Tensor>& grad_state,
    const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, int64_t activation,
    const std::optional<Tensor>& state, const std::optional<Tensor>& cu_seqlens,
    const std::vector<bool>& needs) {
    constexpr const char* OP = "thunderkittens::causal_conv1d_backward";
    const ConvCall<Tensor> call(OP, x, weight, bias, activation, state, cu_seqlens);
    ConvBackwardProblem problem = call.problem;
    TK_CHECK(needs.size() == 4, OP, ": needs must have 4 elements, got ", needs.size());
    check_same_device(OP, "grad_out", grad_out, "x", x);
    check_same_dtype(OP, "grad_out", grad_out, "x", x);
    check_sizes(OP, "grad_out", grad_out, {x.size(0), x.size(1), x.size(2)});
    if (grad_state) call.check_state("grad_state", *grad_state);
    const auto guard = on.guard(x);
    const DeviceProperties& device = on.device(x);
    check_supported(OP, unsupported(problem, device));
    const auto nothing = [&](const Tensor& like) { return empty({0}, like.scalar_type(), like); };
    Tensor dx = needs[0] ? empty_as(x) : nothing(x);
    Tensor dweight = needs[1] ? empty(std::span(weight.sizes().data(), 2), weight.scalar_type(), x)
                              : nothing(weight);
    const Tensor& bias_like = bias ? *bias : weight;
    Tensor dbias =
        needs[2] && bias ? empty({problem.channels}, bias->scalar_type(), x) : nothing(bias_like);
    Tensor dstate = needs[3] && state
                        ? empty(std::span(state->sizes().data(), 3), state->scalar_type(), x)
                        : nothing(x);
    const auto results = [&] { return std::tuple(dx, dweight, dbias, dstate); };
    if (x.numel() == 0) {
        zero_(dweight);
        zero_(dbias);
        if (grad_state && dstate.numel() > 0)
            copy_(dstate, *grad_state);
        else
            zero_(dstate);
        return results();
    }
    const bool sums = dweight.numel() > 0 || dbias.numel() > 0;
    if (!sums && dx.numel() == 0 && dstate.numel() == 0) return results();
    problem.layout = dx.numel() > 0 ? layout_of(x, grad_out, dx) : layout_of(x, grad_out);
    const ConvBackwardChoice choice =
        on.chosen("causal_conv1d_backward", choose_backward(problem, device));
    problem.layout = choice.layout;
    BackwardParams params;
    Params& f = params.forward;
    f = call.params(activation != 0);
    f.out = operand_of(grad_out);
    if (grad_state) f.final = operand_of(*grad_state);
    f.grid = backward_grid(problem, choice);
    f.steps = choice.steps;
    if (dx.numel() > 0) params.dx = operand_of(dx);
    if (dstate.numel() > 0) params.dinitial = operand_of(dstate);
    std::optional<Tensor> partial;
    if (sums) {
        partial = empty(
            {problem.batch * f.grid.token_blocks, problem.channels, int64_t{problem.width + 1}},
            Backend<Tensor>::scalar_type(DType::fp32), x);
        params.sums = data_as<float>(*partial);
        if (dweight.numel() > 0) params.dweight = dweight.data_ptr();
        if (dbias.numel() > 0) params.dbias = dbias.data_ptr();
    }
    auto launcher = on.launch("causal_conv1d_backward", choice, x);
    call.may_read(launcher);
    launcher.may_read("grad_out", grad_out);
    launcher.may_read("grad_state", grad_state);
    launcher.may_write("grad_x", dx);
    launcher.may_write("grad_weight", dweight);
    launcher.may_write("grad_bias", dbias);
    launcher.may_write("gradient of the initial state", dstate);
    launcher.may_write("sums", partial);
    launch(choice, params, launcher.stream);
    return results();
}

}  // namespace thunderkittens::convolution
