// The body of the ops of LoLCATS, on any back end: it checks what memory safety needs, allocates,
// chooses and launches. Host C++ without torch.
#pragma once

#include <array>

#include "csrc/common/accesses.h"
#include "csrc/linear_attention/lolcats/dispatch.h"
#include "csrc/linear_attention/lolcats/operands.h"

namespace thunderkittens::linear_attention {

template <class Tensor>
struct LolcatsResults {
    Tensor out, numerator, denominator, keys, values, lengths, maxima, denominators;
};

template <class Tensor>
LolcatsResults<Tensor> lolcats_body(const Backend<Tensor>& on, const LolcatsTensors<Tensor>& given,
                                    const std::array<std::optional<Tensor>, 5>& initial_in,
                                    bool return_state, bool keep_rows) {
    constexpr const char* OP = "tk.lolcats";
    LolcatsParams params;
    LolcatsProblem& p = params.problem;
    p = checked_lolcats(OP, given);
    p.continued = initial_in[4].has_value();
    const LolcatsState<Tensor> initial(OP, p, initial_in, given.q);
    const auto guard = on.guard(given.q);
    const DeviceProperties& device = on.device(given.q);
    const std::string reason = unsupported(p, device);
    TK_CHECK(reason.empty(), OP, ": ", reason);
    const int64_t states = return_state ? p.batch : 0, rows = keep_rows ? p.batch : 0;
    const auto dtype = given.q.scalar_type();
    const DType wide = DType::fp32;
    LolcatsResults<Tensor> r{
        .out = empty({p.batch, p.heads, p.length, p.head_dim}, dtype, given.q),
        .numerator = empty({states, p.heads, 2 * p.features, p.head_dim}, wide, given.q),
        .denominator = empty({states, p.heads, 2 * p.features}, wide, given.q),
        .keys = empty({states, p.kv_heads, CACHE, p.head_dim}, dtype, given.q),
        .values = empty({states, p.kv_heads, CACHE, p.head_dim}, dtype, given.q),
        .lengths = empty({states}, DType::int32, given.q),
        .maxima = empty({rows, p.heads, p.length}, wide, given.q),
        .denominators = empty({rows, p.heads, p.length}, wide, given.q),
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
    const LolcatsOperands<Tensor> in(given);
    const LolcatsChoice choice = on.chosen("lolcats", choose(p, device));
    const Tensor workspace =
        empty({lolcats_workspace(p, choice.segments, choice.portable)}, wide, in.q);
    params.portable = choice.portable;
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
    writes(launch, "out", r.out, "maxima", r.maxima, "denominators", r.denominators, "workspace",
           workspace);
    run_lolcats(params, launch.stream);
    return r;
}

}  // namespace thunderkittens::linear_attention
