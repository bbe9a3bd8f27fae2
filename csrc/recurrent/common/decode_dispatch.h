// The launch of a few tokens of tk.ssd or tk.linear_attention, and what their bodies have in
// common, on any back end. Host C++ without torch.
#pragma once

#include <utility>

#include "csrc/recurrent/common/decode.h"
#include "csrc/recurrent/common/operands.h"

namespace thunderkittens::recurrent {

using DecodeLaunch = void (*)(const DecodeParams&, Stream);

template <DType dtype, bool wide_state, bool keys_first, int columns>
DecodeLaunch decode_launch_of(bool portable) {
    if constexpr (BUILDS_PORTABLE) {
        if (portable)
            return &launch_portable_recurrent_decode<dtype, wide_state, keys_first, columns>;
    }
    return &launch_recurrent_decode<dtype, wide_state, keys_first, columns>;
}
template <DType dtype, bool wide_state>
DecodeLaunch decode_launch_of(const DecodeConfig& c) {
    if (c.keys_first) return decode_launch_of<dtype, wide_state, true, 64>(c.portable);
    return c.columns == 64 ? decode_launch_of<dtype, wide_state, false, 64>(c.portable)
                           : decode_launch_of<dtype, wide_state, false, 128>(c.portable);
}
template <DType dtype>
DecodeLaunch decode_launch_of(const DecodeConfig& c) {
    return c.wide_state ? decode_launch_of<dtype, true>(c) : decode_launch_of<dtype, false>(c);
}

// `params` has the gates and the scale, and of the problem its keys_first.
template <class Tensor>
Tensor run_recurrent_decode(const Backend<Tensor>& on, const char* op, DecodeParams params,
                            const RecurrentTensors<Tensor>& given, Tensor& state,
                            const std::optional<Tensor>& indices, const RecurrentProblem& checked,
                            std::initializer_list<Read<Tensor>> numbers) {
    DecodeProblem& p = params.problem;
    p.dtype = checked.dtype;
    p.batch = checked.batch;
    p.heads = checked.heads;
    p.groups = checked.groups;
    p.tokens = checked.length;
    p.key_dim = checked.key_dim;
    p.value_dim = checked.value_dim;
    check_same_device(op, "the state", state, given.v_name, given.v);
    p.state_dtype = check_dtype(op, "the state", state, {DType::fp32, p.dtype});
    check_dims(op, "the state", state, {4});
    const int64_t slots = indices ? state.size(0) : p.batch;
    check_shape(op, "the state", state,
                {slots, p.heads, p.keys_first ? p.key_dim : p.value_dim,
                 p.keys_first ? p.value_dim : p.key_dim});
    if (indices) {
        check_same_device(op, "state_indices", *indices, given.v_name, given.v);
        check_dtype(op, "state_indices", *indices, {DType::int32});
        check_shape(op, "state_indices", *indices, {p.batch});
        TK_CHECK(p.batch <= 1 || indices->stride(0) == 1, op,
                 ": state_indices must be contiguous, got stride ", indices->stride(0));
        params.indices = data_as<int>(*indices);
    }
    const auto guard = on.guard(given.v);
    const DeviceProperties& device = on.device(given.v);
    check_supported(op, unsupported(p, device));
    const Tensor out =
        empty({p.batch, p.heads, p.tokens, p.value_dim}, given.v.scalar_type(), given.v);
    if (out.numel() == 0) return out;
    const bool in_place = decodes_in_place(as_4d(state), int(state.element_size()));
    Tensor states = state;
    if (!in_place) {
        states = empty(std::span(state.sizes().data(), state.sizes().size()), state.scalar_type(),
                       state);
        if (slots > 0) copy_(states, state);
    }
    const DecodeConfig choice = on.chosen("ssd_decode", choose_decode(p, device));
    params.q = decode_operand(as_4d(given.q));
    params.k = decode_operand(as_4d(given.k));
    params.v = decode_operand(as_4d(given.v));
    if (given.z) params.z = decode_operand(as_4d(*given.z));
    const View view = as_4d(states);
    params.state = {states.data_ptr(), view.stride[0], view.stride[1], view.stride[2], slots};
    params.out = out.data_ptr();
    auto launch = on.launch("ssd_decode", choice, given.v);
    launch.may_read(given.q_name, given.q);
    launch.may_read(given.k_name, given.k);
    launch.may_read(given.v_name, given.v);
    launch.may_read("z", given.z);
    launch.may_read("state_indices", indices);
    for (const Read<Tensor>& x : numbers) launch.may_read(x.name, x.tensor);
    launch.may_write("the state", states);
    launch.may_write("out", out);
    const DecodeLaunch run = choice.dtype == DType::bf16 ? decode_launch_of<DType::bf16>(choice)
                                                         : decode_launch_of<DType::fp16>(choice);
    run(params, launch.stream);
    if (!in_place && slots > 0) copy_(state, states);
    return out;
}

}  // namespace thunderkittens::recurrent
