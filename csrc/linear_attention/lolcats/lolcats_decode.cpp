// The op of LoLCATS's decoding for CUDA.
#include <array>

#include "csrc/linear_attention/lolcats/dispatch.h"
#include "csrc/linear_attention/lolcats/operands.h"

namespace thunderkittens::linear_attention {

Tensor lolcats_decode(const Tensor& q_in, const Tensor& k_in, const Tensor& v_in,
                      const Tensor& q_map_in, const Tensor& k_map_in, const Tensor& alpha_in,
                      const Tensor& beta_in, const Tensor& numerator, const Tensor& denominator,
                      const Tensor& keys, const Tensor& values, const Tensor& lengths,
                      bool sliding) {
    constexpr const char* OP = "tk.lolcats_decode";
    const LolcatsProblem call =
        checked_lolcats(OP, q_in, k_in, v_in, q_map_in, k_map_in, alpha_in, beta_in);
    TK_CHECK(call.length == 1, OP, ": q must have one token, got shape ", shape_text(q_in));
    std::array<Tensor, 5> state = {numerator, denominator, keys, values, lengths};
    for (std::size_t i = 0; i < state.size(); ++i) {
        check_lolcats_part(OP, i, state[i], call, q_in);
        TK_CHECK(state[i].is_contiguous(), OP, ": ", STATE_PARTS[i], " must be contiguous");
        TK_CHECK(reinterpret_cast<uintptr_t>(state[i].data_ptr()) % 16 == 0 || i == 4, OP, ": ",
                 STATE_PARTS[i], " must be aligned to 16 bytes");
    }
    LolcatsDecodeParams params;
    LolcatsDecodeProblem& p = params.problem;
    p = {call.dtype, call.batch, call.heads, call.kv_heads, call.head_dim, call.features};
    const DeviceGuard guard(q_in.get_device_index());
    const std::string reason = unsupported(p, device_properties(q_in.get_device_index()));
    TK_CHECK(reason.empty(), OP, ": ", reason);
    Tensor out = empty({p.batch, p.heads, 1, p.head_dim}, q_in.scalar_type(), q_in);
    if (out.numel() == 0) {
        lengthen(state[4], 1);
        return out;
    }
    const Tensor q = for_tensor_map(q_in), k = for_tensor_map(k_in), v = for_tensor_map(v_in);
    const Tensor q_map = for_tensor_map(q_map_in), k_map = for_tensor_map(k_map_in);
    const Tensor alpha = packed(alpha_in);
    const Tensor beta = packed(beta_in);
    params.q = operand_of(q);
    params.k = operand_of(k);
    params.v = operand_of(v);
    params.out = operand_of(out);
    params.q_map = operand_of(q_map);
    params.k_map = operand_of(k_map);
    params.alpha = static_cast<const float*>(alpha.data_ptr());
    params.beta = static_cast<const float*>(beta.data_ptr());
    params.state = pointers_of({&state[0], &state[1], &state[2], &state[3], &state[4]});
    params.sliding = sliding;
    run_lolcats_decode(params, current_stream(q));
    return out;
}

STABLE_TORCH_LIBRARY_IMPL(thunderkittens, CUDA, m) {
    m.impl("lolcats_decode", TORCH_BOX(&lolcats_decode));
}

}  // namespace thunderkittens::linear_attention
