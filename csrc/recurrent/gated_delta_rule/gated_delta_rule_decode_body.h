// The body of the op gated_delta_rule_decode, on any back end: it checks what memory safety needs,
// chooses and launches. Host C++ without torch.
#pragma once

#include "csrc/recurrent/gated_delta_rule/gated_delta_rule_decode.h"
#include "csrc/recurrent/gated_delta_rule/operands.h"

namespace thunderkittens::recurrent {

template <DType dtype, bool wide_state, bool keys_inner>
void run_delta_decode(const DeltaRuleDecodeConfig& c, const DeltaRuleDecodeParams& params,
                      Stream stream) {
    if (!c.portable)
        launch_gated_delta_rule_decode<dtype, wide_state, keys_inner>(params, stream);
    else if constexpr (BUILDS_PORTABLE)
        launch_portable_gated_delta_rule_decode<dtype, wide_state, keys_inner>(params, stream);
}
template <DType dtype>
void run_delta_decode(const DeltaRuleDecodeConfig& c, const DeltaRuleDecodeParams& params,
                      Stream stream) {
    if (c.wide_state && c.keys_inner)
        run_delta_decode<dtype, true, true>(c, params, stream);
    else if (c.wide_state)
        run_delta_decode<dtype, true, false>(c, params, stream);
    else if (c.keys_inner)
        run_delta_decode<dtype, false, true>(c, params, stream);
    else
        run_delta_decode<dtype, false, false>(c, params, stream);
}

template <class Tensor>
DeltaElements delta_elements(const Tensor& x) {
    const View view = as_4d(x);
    return {view.data, view.stride[0], view.stride[1], view.stride[2], view.stride[3]};
}

// Whether the kernels can change states where they are, `inner` being the adjacent dimension.
inline bool decodes_in_place(const View& state, int inner, int64_t per_16_bytes) {
    if (state.stride[inner] != 1 || reinterpret_cast<uintptr_t>(state.data) % 16 != 0) return false;
    for (int i = 0; i < 4; ++i) {
        const bool moves = i != inner && state.size[i] > 1;
        if (moves && (state.stride[i] == 0 || state.stride[i] % per_16_bytes != 0)) return false;
    }
    return true;
}

template <class Tensor>
Tensor gated_delta_rule_decode_body(const Backend<Tensor>& on,
                                    const DeltaRuleTensors<Tensor>& given, Tensor& state,
                                    const std::optional<Tensor>& indices_in,
                                    const DeltaRuleOptions& options) {
    constexpr const char* OP = "tk.gated_delta_rule_decode";
    const DeltaRuleProblem call = checked_delta_problem(OP, given);
    check_delta_options(OP, options);
    DeltaRuleDecodeParams params;
    DeltaRuleDecodeProblem& p = params.problem;
    check_dims(OP, "state", state, {4});
    const int64_t slots = indices_in ? state.size(0) : call.sequences;
    check_delta_state(OP, "state", state, call, slots, options.v_first, given.q);
    if (indices_in)
        check_delta_tensor(OP, "state_indices", *indices_in, {call.sequences}, {DType::int32},
                           given.q);
    const bool wide = is_fp32(state);
    const int64_t per_16_bytes = wide ? 4 : 8;
    // Dimensions of a state: slot, head, then keys and values or the other way round.
    const View view = as_4d(state);
    const bool fits_last = decodes_in_place(view, 3, per_16_bytes),
               fits_other = !fits_last && decodes_in_place(view, 2, per_16_bytes);
    const bool keys_inner = fits_other ? !options.v_first : options.v_first;
    p = {call.dtype,   call.sequences, call.heads, call.value_heads, call.length,
         call.key_dim, call.value_dim, wide,       keys_inner};
    const auto guard = on.guard(given.q);
    const DeviceProperties& device = on.device(given.q);
    check_supported(OP, unsupported(p, device));
    Tensor out =
        empty({p.batch, p.value_heads, p.length, p.value_dim}, given.q.scalar_type(), given.q);
    if (out.numel() == 0) return out;

    const bool in_place = fits_last || fits_other;
    const Tensor states = [&] {
        if (in_place) return state;
        Tensor copy = empty(state.sizes(), state.scalar_type(), state);
        copy_(copy, state);
        return copy;
    }();
    const std::optional<Tensor> A_log = packed(given.A_log), dt_bias = packed(given.dt_bias),
                                indices = packed(indices_in);
    params.q = delta_elements(given.q);
    params.k = delta_elements(given.k);
    params.v = delta_elements(given.v);
    params.g = delta_numbers(given.g);
    params.beta = delta_numbers(given.beta);
    params.gate = {data_as<float>(A_log), data_as<float>(dt_bias), options.beta_sigmoid,
                   options.allow_neg_eigval};
    params.state = delta_states(states, options.v_first);
    params.indices = data_as<int32_t>(indices);
    params.slots = slots;
    params.out = out.data_ptr();
    params.scale = static_cast<float>(options.scale);
    params.l2_norm = options.l2_norm;
    const DeltaRuleDecodeConfig config =
        on.chosen("gated_delta_rule_decode", choose_decode(p, device));
    auto launch = on.launch("gated_delta_rule_decode", config, given.q);
    launch.may_read("q", given.q);
    launch.may_read("k", given.k);
    launch.may_read("v", given.v);
    launch.may_read("g", given.g);
    launch.may_read("beta", given.beta);
    launch.may_read("A_log", A_log);
    launch.may_read("dt_bias", dt_bias);
    launch.may_read("state_indices", indices);
    launch.may_write("state", states);
    launch.may_write("out", out);
    if (p.dtype == DType::bf16)
        run_delta_decode<DType::bf16>(config, params, launch.stream);
    else
        run_delta_decode<DType::fp16>(config, params, launch.stream);
    if (!in_place) copy_(state, states);
    return out;
}

}  // namespace thunderkittens::recurrent
