// The body of the ops of LoLCATS, on any back end: it checks what memory safety needs, allocates,
// chooses and launches. Host C++ without torch.
#pragma once

#include <array>

#include "csrc/linear_attention/lolcats/dispatch.h"
#include "csrc/linear_attention/lolcats/operands.h"

namespace thunderkittens::linear_attention {

template <class Tensor>
struct LolcatsResults {
    Tensor out, numerator, denominator, keys, values, lengths, maxima, denominators;
};

template <class Tensor>
LolcatsResults<Tensor> lolcats_body(const Backend<Tensor>& on, const Tensor& q_in,
                                    const Tensor& k_in, const Tensor& v_in, const Tensor& q_map_in,
                                    const Tensor& k_map_in, const Tensor& alpha_in,
                                    const Tensor& beta_in,
                                    const std::array<std::optional<Tensor>, 5>& initial_in,
                                    bool return_state, bool keep_rows) {
    constexpr const char* OP = "tk.lolcats";
    LolcatsParams params;
    LolcatsProblem& p = params.problem;
    p = checked_lolcats(OP, q_in, k_in, v_in, q_map_in, k_map_in, alpha_in, beta_in);
    p.continued = initial_in[4].has_value();
    const LolcatsState<Tensor> initial(OP, p, initial_in, q_in);
    const auto guard = on.guard(q_in);
    const DeviceProperties& device = on.device(q_in);
    const std::string reason = unsupported(p, device);
    TK_CHECK(reason.empty(), OP, ": ", reason);
    const int64_t states = return_state ? p.batch : 0, rows = keep_rows ? p.batch : 0;
    const auto dtype = q_in.scalar_type();
    const DType wide = DType::fp32;
    LolcatsResults<Tensor> r{
        .out = empty({p.batch, p.heads, p.length, p.head_dim}, dtype, q_in),
        .numerator = empty({states, p.heads, 2 * p.features, p.head_dim}, wide, q_in),
        .denominator = empty({states, p.heads, 2 * p.features}, wide, q_in),
        .keys = empty({states, p.kv_heads, CACHE, p.head_dim}, dtype, q_in),
        .values = empty({states, p.kv_heads, CACHE, p.head_dim}, dtype, q_in),
        .lengths = empty({states}, DType::int32, q_in),
        .maxima = empty({rows, p.heads, p.length}, wide, q_in),
        .denominators = empty({rows, p.heads, p.length}, wide, q_in),
    };
    const std::array<Tensor*, 5> final = {&r.numerator, &r.denominator, &r.keys, &r.values,
                                          &r.lengths};
    if (r.out.numel() == 0) {
        for (std::size_t i = 0; return_state && i < final.size(); ++i) {
            if (initial.parts[i])
                copy_(*final[i], *initial.parts[i]);
            else
                zero_(*final[i]);
        }
        if (return_state) Backend<Tensor>::add(r.lengths, p.length);
        return r;
    }
    const LolcatsOperands<Tensor> in(q_in, k_in, v_in, q_map_in, k_map_in, alpha_in, beta_in);
    const LolcatsChoice choice = on.chosen("lolcats", choose(p, device));
    const Tensor workspace = empty({lolcats_workspace(p, choice.segments)}, wide, in.q);
    params.segments = choice.segments;
    in.fill(params);
    params.out = operand(r.out);
    params.initial = initial.pointers();
    if (return_state) params.final = pointers_of(final);
    if (keep_rows) {
        params.maxima = data_as<float>(r.maxima);
        params.denominators = data_as<float>(r.denominators);
    }
    params.workspace = data_as<float>(workspace);
    auto launch = on.launch("lolcats", choice, in.q);
    in.may_read(launch);
    initial.may_read(launch);
    for (std::size_t i = 0; i < final.size(); ++i) launch.may_write(STATE_PARTS[i], *final[i]);
    launch.may_write("out", r.out);
    launch.may_write("maxima", r.maxima);
    launch.may_write("denominators", r.denominators);
    launch.may_write("workspace", workspace);
    run_lolcats(params, launch.stream);
    return r;
}

}  // namespace thunderkittens::linear_attention
