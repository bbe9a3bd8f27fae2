// The body of the attention ops, on any back end: checks what memory safety needs, allocates,
// chooses and launches. Host C++ without torch.
#pragma once

#include "csrc/attention/common/operands.h"
#include "csrc/attention/forward/dispatch.h"

namespace thunderkittens::attention {

// Of q's shape with v's last dimension. With the same dimension, q's strides; otherwise packed,
// heads inside the rows where q has them there.
template <class Tensor>
Tensor allocate_output(const Tensor& q, const Problem& p) {
    if (p.value_dim == p.head_dim) return empty_as(q);
    if (p.varlen) return empty({q.size(0), p.q_heads, p.value_dim}, q.scalar_type(), q);
    if (q.stride(1) >= q.stride(2))
        return empty({p.batch, p.q_heads, p.q_length, p.value_dim}, q.scalar_type(), q);
    const int64_t sizes[] = {p.batch, p.q_heads, p.q_length, p.value_dim};
    const int64_t row = std::max<int64_t>(p.q_heads * p.value_dim, 1);
    const int64_t strides[] = {std::max<int64_t>(p.q_length, 1) * row, p.value_dim, row, 1};
    return Backend<Tensor>::empty_strided(sizes, strides, q.scalar_type(), q);
}

// With `lse`, the rows' log-sum-exp too.
template <class Tensor>
Tensor attention_body(const Backend<Tensor>& on, const Tensor& q_in, const Tensor& k_in,
                      const Tensor& v_in, const Packing<Tensor>* packing,
                      const Options<Tensor>& options, Tensor* lse) {
    ForwardParams params;
    Problem& p = params.problem;
    p = packing ? checked_problem(OP, q_in, k_in, v_in, *packing, options)
                : checked_problem(OP, q_in, k_in, v_in, options);
    const auto guard = on.guard(q_in);
    Tensor out = allocate_output(q_in, p);
    if (lse) {
        *lse = packing ? empty({p.q_heads, q_in.size(0)}, DType::fp32, q_in)
                       : empty({p.batch, p.q_heads, p.q_length}, DType::fp32, q_in);
    }
    params.scores = scores_of(OP, p, options, q_in);
    if (out.numel() == 0) return out;

    const DeviceProperties& device = on.device(q_in);
    const std::string reason = unsupported(p, device);
    TK_CHECK(reason.empty(), OP, ": ", reason);
    if (packing) params.sequences = sequences_of(*packing, q_in, k_in);
    const Tensor q = signed_query(q_in, p.varlen, params.scores);
    // Without keys no key is read, but tensor maps need an address.
    const bool keys = p.kv_heads * k_in.size(packing ? 0 : 2) > 0;
    const Tensor k = keys ? for_kernel(k_in, p.varlen) : q;
    const Tensor v = keys ? for_kernel(v_in, p.varlen) : q;
    // A view of q's layout may be one that TMA cannot write.
    const bool direct = fits_tensor_map(as_4d(out), 2);
    const Tensor out_buffer = direct ? out : empty(out.sizes(), q_in.scalar_type(), q_in);
    const auto describe = packing ? packed_operand<Tensor> : operand<Tensor>;
    params.q = describe(q);
    params.k = describe(k);
    params.v = describe(v);
    params.out = describe(out_buffer);
    params.lse = lse ? data_as<float>(*lse) : nullptr;
    params.sm_count = device.sm_count;
    const Choice choice = on.chosen("attention", choose(p, device));
    params.section_heads = choice.section_heads;
    params.splits = choice.splits;
    std::optional<Tensor> workspace;
    if (combines(p, choice.splits)) {
        const int64_t rows = choice.splits * partial_rows(p, params.sequences);
        workspace = empty({rows * (p.value_dim + 1)}, DType::fp32, q_in);
        params.partial_out = data_as<float>(workspace);
        params.partial_lse = params.partial_out + rows * p.value_dim;
    }
    auto launch = on.launch("attention", choice, q_in);
    launch.may_read("q", q);
    launch.may_read("k", k);
    launch.may_read("v", v);
    may_read_options(launch, packing, options);
    launch.may_write("out", out_buffer);
    if (lse) launch.may_write("lse", *lse);
    launch.may_write("workspace", workspace);
    launch_choice(OP, choice, params, launch.stream);
    if (!direct) copy_(out, out_buffer);
    return out;
}

}  // namespace thunderkittens::attention
