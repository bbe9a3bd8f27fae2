// The body of LoLCATS's decoding, on any back end. Host C++ without torch.
#pragma once

#include <array>

#include "csrc/linear_attention/lolcats/dispatch.h"
#include "csrc/linear_attention/lolcats/operands.h"

namespace thunderkittens::linear_attention {

template <class Tensor>
Tensor lolcats_decode_body(const Backend<Tensor>& on, const LolcatsTensors<Tensor>& given,
                           std::array<Tensor, 5> state, bool sliding) {
    constexpr const char* OP = "tk.lolcats_decode";
    const LolcatsProblem call = checked_lolcats(OP, given);
    TK_CHECK(call.length == 1, OP, ": q must have one token, got shape ", shape_text(given.q));
    for (std::size_t i = 0; i < state.size(); ++i) {
        check_lolcats_part(OP, i, state[i], call, given.q);
        TK_CHECK(state[i].is_contiguous(), OP, ": ", STATE_PARTS[i], " must be contiguous");
        TK_CHECK(reinterpret_cast<uintptr_t>(state[i].data_ptr()) % 16 == 0 || i == 4, OP, ": ",
                 STATE_PARTS[i], " must be aligned to 16 bytes");
    }
    LolcatsDecodeParams params;
    LolcatsDecodeProblem& p = params.problem;
    p = {call.dtype, call.batch, call.heads, call.kv_heads, call.head_dim, call.features};
    const auto guard = on.guard(given.q);
    const DeviceProperties& device = on.device(given.q);
    const std::string reason = unsupported(p, device);
    TK_CHECK(reason.empty(), OP, ": ", reason);
    Tensor out = empty({p.batch, p.heads, 1, p.head_dim}, given.q.scalar_type(), given.q);
    if (out.numel() == 0) {
        Backend<Tensor>::add(state[4], 1);
        return out;
    }
    const LolcatsOperands<Tensor> in(given);
    in.fill(params);
    params.out = operand(out);
    params.state = pointers_of<Tensor>({&state[0], &state[1], &state[2], &state[3], &state[4]});
    params.sliding = sliding;
    const LolcatsDecodeChoice choice = on.chosen("lolcats_decode", choose_decode(p, device));
    params.portable = choice.portable;
    auto launch = on.launch("lolcats_decode", choice, in.q);
    in.may_read(launch);
    for (std::size_t i = 0; i < state.size(); ++i) launch.may_write(STATE_PARTS[i], state[i]);
    launch.may_write("out", out);
    run_lolcats_decode(params, launch.stream);
    return out;
}

}  // namespace thunderkittens::linear_attention
