// The ops of LoLCATS for CUDA: checks what memory safety needs, allocates, chooses and launches.
#include <array>
#include <tuple>

#include "csrc/linear_attention/lolcats/dispatch.h"
#include "csrc/linear_attention/lolcats/operands.h"

namespace thunderkittens::linear_attention {
namespace {

constexpr const char* OP = "tk.lolcats";

using Parts = std::array<std::optional<Tensor>, 5>;
struct Results {
    Tensor out, numerator, denominator, keys, values, lengths, maxima, denominators;
};

Results forward(const Tensor& q_in, const Tensor& k_in, const Tensor& v_in, const Tensor& q_map_in,
                const Tensor& k_map_in, const Tensor& alpha_in, const Tensor& beta_in,
                const Parts& initial_in, bool return_state, bool keep_rows) {
    LolcatsParams params;
    LolcatsProblem& p = params.problem;
    p = checked_lolcats(OP, q_in, k_in, v_in, q_map_in, k_map_in, alpha_in, beta_in);
    p.continued = initial_in[4].has_value();
    const LolcatsStateTensors initial(OP, p, initial_in, q_in);
    const DeviceGuard guard(q_in.get_device_index());
    const DeviceProperties& device = device_properties(q_in.get_device_index());
    const std::string reason = unsupported(p, device);
    TK_CHECK(reason.empty(), OP, ": ", reason);
    const int64_t states = return_state ? p.batch : 0, rows = keep_rows ? p.batch : 0;
    const ScalarType dtype = q_in.scalar_type(), wide = ScalarType::Float;
    Results r{
        .out = empty({p.batch, p.heads, p.length, p.head_dim}, dtype, q_in),
        .numerator = empty({states, p.heads, 2 * p.features, p.head_dim}, wide, q_in),
        .denominator = empty({states, p.heads, 2 * p.features}, wide, q_in),
        .keys = empty({states, p.kv_heads, CACHE, p.head_dim}, dtype, q_in),
        .values = empty({states, p.kv_heads, CACHE, p.head_dim}, dtype, q_in),
        .lengths = empty({states}, ScalarType::Int, q_in),
        .maxima = empty({rows, p.heads, p.length}, wide, q_in),
        .denominators = empty({rows, p.heads, p.length}, wide, q_in),
    };
    const std::array<Tensor*, 5> final = {&r.numerator, &r.denominator, &r.keys, &r.values,
                                          &r.lengths};
    if (r.out.numel() == 0) {
        for (std::size_t i = 0; return_state && i < final.size(); ++i) {
            if (initial.parts[i])
                torch::stable::copy_(*final[i], *initial.parts[i]);
            else
                torch::stable::zero_(*final[i]);
        }
        if (return_state) lengthen(r.lengths, p.length);
        return r;
    }
    const Tensor q = for_tensor_map(q_in), k = for_tensor_map(k_in), v = for_tensor_map(v_in);
    const Tensor q_map = for_tensor_map(q_map_in), k_map = for_tensor_map(k_map_in);
    const Tensor alpha = packed(alpha_in);
    const Tensor beta = packed(beta_in);
    const LolcatsChoice choice = choose(p, device);
    Tensor workspace = empty({lolcats_workspace(p, choice.segments)}, wide, q);
    params.segments = choice.segments;
    params.q = operand_of(q);
    params.k = operand_of(k);
    params.v = operand_of(v);
    params.out = operand_of(r.out);
    params.q_map = operand_of(q_map);
    params.k_map = operand_of(k_map);
    params.alpha = static_cast<const float*>(alpha.data_ptr());
    params.beta = static_cast<const float*>(beta.data_ptr());
    params.initial = initial.pointers();
    if (return_state) params.final = pointers_of(final);
    if (keep_rows) {
        params.maxima = static_cast<float*>(r.maxima.data_ptr());
        params.denominators = static_cast<float*>(r.denominators.data_ptr());
    }
    params.workspace = static_cast<float*>(workspace.data_ptr());
    run_lolcats(params, current_stream(q));
    return r;
}

}  // namespace

#define OPERANDS                                                                                 \
    const Tensor &q, const Tensor &k, const Tensor &v, const Tensor &q_map, const Tensor &k_map, \
        const Tensor &alpha, const Tensor &beta
#define STATE                                                           \
    std::optional<Tensor> numerator, std::optional<Tensor> denominator, \
        std::optional<Tensor> keys, std::optional<Tensor> values, std::optional<Tensor> lengths

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> lolcats_forward(OPERANDS, STATE,
                                                                           bool return_state) {
    Results r = forward(q, k, v, q_map, k_map, alpha, beta,
                        {numerator, denominator, keys, values, lengths}, return_state, false);
    return {r.out, r.numerator, r.denominator, r.keys, r.values, r.lengths};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> lolcats(
    OPERANDS, STATE, bool return_state) {
    Results r = forward(q, k, v, q_map, k_map, alpha, beta,
                        {numerator, denominator, keys, values, lengths}, return_state, true);
    return {r.out,    r.numerator, r.denominator, r.keys,
            r.values, r.lengths,   r.maxima,      r.denominators};
}

STABLE_TORCH_LIBRARY_IMPL(thunderkittens, CUDA, m) {
    m.impl("lolcats_forward", TORCH_BOX(&lolcats_forward));
    m.impl("lolcats", TORCH_BOX(&lolcats));
}

}  // namespace thunderkittens::linear_attention
