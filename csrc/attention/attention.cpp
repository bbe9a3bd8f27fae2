// The attention ops for CUDA: checks what memory safety needs, allocates, chooses and launches.
#include <tuple>

#include "csrc/attention/dispatch.h"
#include "csrc/attention/operands.h"
#include "csrc/common/forced.h"

namespace thunderkittens::attention {

namespace {

constexpr const char* OP = "tk.attention";

// Of q's shape with v's last dimension. With the same dimension, q's strides; otherwise packed,
// heads inside the rows where q has them there.
Tensor allocate_output(const Tensor& q, const Problem& p) {
    if (p.value_dim == p.head_dim) return empty_as(q);
    if (p.varlen) return empty({q.size(0), p.q_heads, p.value_dim}, q.scalar_type(), q);
    if (q.stride(1) >= q.stride(2))
        return empty({p.batch, p.q_heads, p.q_length, p.value_dim}, q.scalar_type(), q);
    const int64_t sizes[] = {p.batch, p.q_heads, p.q_length, p.value_dim};
    const int64_t row = std::max<int64_t>(p.q_heads * p.value_dim, 1);
    const int64_t strides[] = {std::max<int64_t>(p.q_length, 1) * row, p.value_dim, row, 1};
    return empty_strided(sizes, strides, q.scalar_type(), q);
}

Tensor forward(const Tensor& q_in, const Tensor& k_in, const Tensor& v_in, const Packing* packing,
               const Options& options, Tensor* lse) {
    ForwardParams params;
    Problem& p = params.problem;
    p = packing ? checked_problem(OP, q_in, k_in, v_in, *packing, options)
                : checked_problem(OP, q_in, k_in, v_in, options);
    const DeviceGuard guard(q_in.get_device_index());
    Tensor out = allocate_output(q_in, p);
    if (lse) {
        *lse = packing ? empty({p.q_heads, q_in.size(0)}, ScalarType::Float, q_in)
                       : empty({p.batch, p.q_heads, p.q_length}, ScalarType::Float, q_in);
    }
    params.scores = scores_of(OP, p, options, q_in);
    if (out.numel() == 0) return out;

    const DeviceProperties& device = device_properties(q_in.get_device_index());
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
    const auto describe = packing ? packed_operand : operand;
    params.q = describe(q);
    params.k = describe(k);
    params.v = describe(v);
    params.out = describe(out_buffer);
    params.lse = lse ? static_cast<float*>(lse->data_ptr()) : nullptr;
    params.sm_count = device.sm_count;
    Choice choice = choose(p, device);
    force("attention", choice);
    params.section_heads = choice.section_heads;
    params.splits = choice.splits;
    Tensor workspace;
    if (combines(p, choice.splits)) {
        const int64_t rows = choice.splits * partial_rows(p, params.sequences);
        workspace = empty({rows * (p.value_dim + 1)}, ScalarType::Float, q_in);
        params.partial_out = static_cast<float*>(workspace.data_ptr());
        params.partial_lse = params.partial_out + rows * p.value_dim;
    }
    launch_choice(OP, choice, params, current_stream(q_in));
    if (!direct) torch::stable::copy_(out, out_buffer);
    return out;
}

}  // namespace

Tensor attention_forward(const Tensor& q, const Tensor& k, const Tensor& v, ATTENTION_OPTIONS) {
    return forward(q, k, v, nullptr, ATTENTION_OPTION_VALUES, nullptr);
}

std::tuple<Tensor, Tensor> attention(const Tensor& q, const Tensor& k, const Tensor& v,
                                     ATTENTION_OPTIONS) {
    Tensor lse;
    Tensor out = forward(q, k, v, nullptr, ATTENTION_OPTION_VALUES, &lse);
    return {out, lse};
}

Tensor attention_varlen_forward(const Tensor& q, const Tensor& k, const Tensor& v,
                                const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k,
                                int64_t max_seqlen_q, int64_t max_seqlen_k, ATTENTION_OPTIONS) {
    const Packing packing{cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k};
    return forward(q, k, v, &packing, ATTENTION_OPTION_VALUES, nullptr);
}

std::tuple<Tensor, Tensor> attention_varlen(const Tensor& q, const Tensor& k, const Tensor& v,
                                            const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k,
                                            int64_t max_seqlen_q, int64_t max_seqlen_k,
                                            ATTENTION_OPTIONS) {
    const Packing packing{cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k};
    Tensor lse;
    Tensor out = forward(q, k, v, &packing, ATTENTION_OPTION_VALUES, &lse);
    return {out, lse};
}

STABLE_TORCH_LIBRARY_IMPL(thunderkittens, CUDA, m) {
    m.impl("attention_forward", TORCH_BOX(&attention_forward));
    m.impl("attention", TORCH_BOX(&attention));
    m.impl("attention_varlen_forward", TORCH_BOX(&attention_varlen_forward));
    m.impl("attention_varlen", TORCH_BOX(&attention_varlen));
}

}  // namespace thunderkittens::attention
