// The operands and options of the attention ops, both directions: what memory safety needs is
// checked here, and tensors become the plain structs that kernels take. Host C++ without torch.
#pragma once

#include <cmath>
#include <optional>

#include "csrc/attention/common/attention.h"
#include "csrc/attention/common/ragged.h"
#include "csrc/common/backend.h"

namespace thunderkittens::attention {

constexpr const char* OP = "tk.attention";

// The arguments that all ops share after their tensors, in the order of the schema: parameters of
// an op, and an Options made of them.
#define ATTENTION_OPTIONS                                                                   \
    int64_t causal, std::optional<double> scale, int64_t window_left, int64_t window_right, \
        double softcap, std::optional<Tensor> alibi_slopes, std::optional<Tensor> sink,     \
        std::optional<bool> deterministic
#define ATTENTION_OPTION_VALUES \
    {causal, scale, window_left, window_right, softcap, alibi_slopes, sink, deterministic}

template <class Tensor>
struct Options {
    int64_t causal = 0;
    std::optional<double> scale;
    int64_t window_left = -1, window_right = -1;
    double softcap = 0;
    std::optional<Tensor> alibi_slopes, sink;
    std::optional<bool> deterministic;
};
// Those of packed sequences, before the options.
template <class Tensor>
struct Packing {
    Tensor cu_seqlens_q, cu_seqlens_k;
    int64_t max_seqlen_q = 0, max_seqlen_k = 0;
};

template <class Tensor>
void check_vector(const char* op, const char* name, const Tensor& x, DType dtype, const Tensor& q) {
    check_same_device(op, name, x, "q", q);
    TK_CHECK(x.scalar_type() == Backend<Tensor>::scalar_type(dtype), op, ": ", name, " must be ",
             torch_name(dtype), ", got ", dtype_text_of(x));
    TK_CHECK(
        x.dim() >= 1 && (x.size(x.dim() - 1) <= 1 || x.stride(x.dim() - 1) == 1 || x.numel() == 0),
        op, ": ", name, " must have adjacent elements, got shape ", shape_text(x));
}

// Fills what does not depend on packing, from tensors with `dims` dimensions whose heads are at
// `head`.
template <class Tensor>
void check_operands(const char* op, const Tensor& q, const Tensor& k, const Tensor& v, int64_t dims,
                    int64_t head, const Options<Tensor>& options, Problem& p) {
    check_cuda(op, "q", q);
    check_same_device(op, "k", k, "q", q);
    check_same_device(op, "v", v, "q", q);
    p.dtype = check_dtype(op, "q", q, {DType::bf16, DType::fp16});
    check_same_dtype(op, "k", k, "q", q);
    check_same_dtype(op, "v", v, "q", q);
    check_dims(op, "q", q, {dims});
    check_dims(op, "k", k, {dims});
    check_dims(op, "v", v, {dims});
    p.q_heads = q.size(head);
    p.kv_heads = k.size(head);
    p.head_dim = q.size(dims - 1);
    p.value_dim = v.size(dims - 1);
    TK_CHECK(k.size(dims - 1) == p.head_dim, op, ": k must have q's head dim ", p.head_dim,
             ", got ", shape_text(k));
    for (int64_t i = 0; i < dims - 1; ++i) {
        TK_CHECK(v.size(i) == k.size(i), op, ": v must match k's shape ", shape_text(k), ", got ",
                 shape_text(v));
    }
    TK_CHECK(options.causal >= 0 && options.causal <= 2, op,
             ": causal must be 0 (none), 1 (lower_right) or 2 (upper_left), got ", options.causal);
    p.causal = static_cast<int>(options.causal);
    p.window_left = options.window_left;
    p.window_right = options.window_right;
    p.softcap = options.softcap != 0;
    p.alibi = options.alibi_slopes.has_value();
    p.sink = options.sink.has_value();
}

template <class Tensor>
Problem checked_problem(const char* op, const Tensor& q, const Tensor& k, const Tensor& v,
                        const Options<Tensor>& options) {
    Problem p;
    check_operands(op, q, k, v, 4, 1, options, p);
    p.batch = q.size(0);
    p.q_length = q.size(2);
    p.k_length = k.size(2);
    TK_CHECK(k.size(0) == p.batch, op, ": k must have q's batch size ", p.batch, ", got ",
             shape_text(k));
    return p;
}

template <class Tensor>
Problem checked_problem(const char* op, const Tensor& q, const Tensor& k, const Tensor& v,
                        const Packing<Tensor>& packing, const Options<Tensor>& options) {
    Problem p;
    check_operands(op, q, k, v, 3, 1, options, p);
    const Tensor &cu_q = packing.cu_seqlens_q, &cu_k = packing.cu_seqlens_k;
    check_vector(op, "cu_seqlens_q", cu_q, DType::int32, q);
    check_vector(op, "cu_seqlens_k", cu_k, DType::int32, q);
    TK_CHECK(
        cu_q.dim() == 1 && cu_k.dim() == 1 && cu_q.size(0) >= 1 && cu_k.size(0) == cu_q.size(0), op,
        ": cu_seqlens_q and cu_seqlens_k must both be (sequences + 1,), got ", shape_text(cu_q),
        " and ", shape_text(cu_k));
    TK_CHECK(packing.max_seqlen_q >= 0 && packing.max_seqlen_k >= 0, op,
             ": max_seqlen_q and max_seqlen_k must not be negative, got ", packing.max_seqlen_q,
             " and ", packing.max_seqlen_k);
    p.varlen = true;
    p.batch = cu_q.size(0) - 1;
    // Longer ones cannot be: what is chosen from them stays within bounds.
    p.q_length = std::min(packing.max_seqlen_q, q.size(0));
    p.k_length = std::min(packing.max_seqlen_k, k.size(0));
    return p;
}

template <class Tensor>
Sequences sequences_of(const Packing<Tensor>& packing, const Tensor& q, const Tensor& k) {
    return {static_cast<const int*>(packing.cu_seqlens_q.data_ptr()),
            static_cast<const int*>(packing.cu_seqlens_k.data_ptr()), q.size(0), k.size(0)};
}

// The scale is as given: the caller makes it positive. The options' tensors must outlive the
// launch's issue.
template <class Tensor>
ScoreOptions scores_of(const char* op, const Problem& p, const Options<Tensor>& options,
                       const Tensor& q) {
    ScoreOptions s;
    s.scale = static_cast<float>(options.scale ? *options.scale
                                               : 1.0 / std::sqrt(static_cast<double>(p.head_dim)));
    TK_CHECK(std::isfinite(s.scale), op, ": scale must be finite, got ", s.scale);
    TK_CHECK(options.softcap >= 0 && std::isfinite(options.softcap), op,
             ": softcap must be finite and at least 0, got ", options.softcap);
    const double most_softcap = p.dtype == DType::bf16 ? 0x1p100 : 0x1p11;
    TK_CHECK(
        options.softcap == 0 || (options.softcap >= 0x1p-30 && options.softcap <= most_softcap), op,
        ": softcap must be 0 or from 2^-30 to ", most_softcap, ", got ", options.softcap);
    s.softcap = static_cast<float>(options.softcap);
    if (options.alibi_slopes) {
        const Tensor& slopes = *options.alibi_slopes;
        TK_CHECK(s.scale == 0 || std::abs(s.scale) >= 0x1p-50f, op,
                 ": with alibi_slopes scale must be 0 or at least 2^-50 in magnitude, got ",
                 s.scale);
        check_vector(op, "alibi_slopes", slopes, DType::fp32, q);
        const bool batched = slopes.dim() == 2;
        TK_CHECK(slopes.dim() <= 2 && slopes.size(slopes.dim() - 1) == p.q_heads &&
                     (!batched || slopes.size(0) == p.batch),
                 op, ": alibi_slopes must be (", p.q_heads, ",) or (", p.batch, ", ", p.q_heads,
                 "), got ", shape_text(slopes));
        s.alibi_slopes = static_cast<const float*>(slopes.data_ptr());
        s.alibi_batch_stride = batched ? slopes.stride(0) : 0;
    }
    if (options.sink) {
        check_vector(op, "sink", *options.sink, DType::fp32, q);
        TK_CHECK(options.sink->dim() == 1 && options.sink->size(0) == p.q_heads, op,
                 ": sink must be (", p.q_heads, ",), got ", shape_text(*options.sink));
        s.sink = static_cast<const float*>(options.sink->data_ptr());
    }
    return s;
}

template <class Tensor>
Operand operand(const Tensor& x) {
    const View view = as_4d(x);
    return {view.data, view.stride[0], view.stride[1], view.stride[2]};
}
// (tokens, heads, dim)
template <class Tensor>
Operand packed_operand(const Tensor& x) {
    const View view = as_4d(x);
    return {view.data, 0, view.stride[2], view.stride[1]};
}

// The tensor itself where the kernels can read it, else a copy; `ragged`: of packed sequences.
template <class Tensor>
Tensor for_kernel(const Tensor& x, bool ragged) {
    if (ragged && !fits_ragged_map(x.size(0), x.stride(0))) return copy_for_tensor_map(x);
    return for_tensor_map(x);
}

// A copy that the kernels can read.
template <class Tensor>
Tensor negative(const Tensor& x) {
    Tensor copy = copy_for_tensor_map(x);
    Backend<Tensor>::negate(copy);
    return copy;
}

// q as the kernels can read it, and a positive scale, which their running maximum wants: the sign
// goes into q, and zero into both.
template <class Tensor>
Tensor signed_query(const Tensor& q, bool ragged, ScoreOptions& scores) {
    if (scores.scale > 0) return for_kernel(q, ragged);
    const bool negate = scores.scale < 0;
    scores.scale = negate ? -scores.scale : 1.0f;
    if (negate) return negative(q);
    Tensor zeros = empty(q.sizes(), q.scalar_type(), q);
    zero_(zeros);
    return zeros;
}

// What every kernel may read beside its operands.
template <class Tensor, class Launch>
void may_read_options(Launch& launch, const Packing<Tensor>* packing,
                      const Options<Tensor>& options) {
    if (packing) {
        launch.may_read("cu_seqlens_q", packing->cu_seqlens_q);
        launch.may_read("cu_seqlens_k", packing->cu_seqlens_k);
    }
    launch.may_read("alibi_slopes", options.alibi_slopes);
    launch.may_read("sink", options.sink);
}

}  // namespace thunderkittens::attention
