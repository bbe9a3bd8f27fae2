// The operands and options of the attention ops on the emulator, both directions: operands.h for
// arrays in CPU memory. Optional arrays are absent, and so are scalars that have a default.
#pragma once

#include <cmath>

#include "csrc/attention/attention.h"
#include "csrc/attention/ragged.h"
#include "csrc/common/emulated.h"

namespace thunderkittens::attention {

using emulated::Array;

// From the arrays q, k, v, and for packed sequences cu_seqlens_q and cu_seqlens_k.
inline Problem checked_problem(const emulated::Call& call) {
    const Array &q = call.array("q"), &k = call.array("k"), &v = call.array("v");
    const Array *cu_q = call.optional("cu_seqlens_q"), *cu_k = call.optional("cu_seqlens_k");
    const std::size_t dims = cu_q ? 3 : 4;
    Problem p;
    p.varlen = cu_q != nullptr;
    TK_CHECK(q.size.size() == dims && k.size.size() == dims && v.size.size() == dims &&
                 k.size.back() == q.size.back() && q.dtype == k.dtype && q.dtype == v.dtype &&
                 std::equal(k.size.begin(), k.size.end() - 1, v.size.begin()) &&
                 (p.varlen || k.size[0] == q.size[0]),
             "tk.attention: q ", tuple_text(q.size), ", k ", tuple_text(k.size), " and v ",
             tuple_text(v.size), " do not match");
    p.dtype = q.dtype;
    p.q_heads = q.size[1];
    p.kv_heads = k.size[1];
    p.head_dim = q.size.back();
    p.value_dim = v.size.back();
    if (p.varlen) {
        TK_CHECK(cu_k && cu_q->dims() == 1 && cu_q->size == cu_k->size && cu_q->size[0] >= 1 &&
                     cu_q->dtype == DType::int32 && cu_k->dtype == DType::int32,
                 "tk.attention: cu_seqlens_q and cu_seqlens_k must both be int32 (sequences + 1,)");
        p.batch = cu_q->size[0] - 1;
        p.q_length = std::min(call.scalar<int64_t>("max_seqlen_q", 0), q.size[0]);
        p.k_length = std::min(call.scalar<int64_t>("max_seqlen_k", 0), k.size[0]);
    } else {
        p.batch = q.size[0];
        p.q_length = q.size[2];
        p.k_length = k.size[2];
    }
    p.causal = call.scalar("causal", 0);
    p.window_left = call.scalar<int64_t>("window_left", -1);
    p.window_right = call.scalar<int64_t>("window_right", -1);
    p.softcap = call.scalar("softcap", 0.0) != 0;
    p.alibi = call.optional("alibi_slopes") != nullptr;
    p.sink = call.optional("sink") != nullptr;
    return p;
}

inline Scores scores_of(const Problem& p, const emulated::Call& call) {
    Scores s;
    s.scale =
        static_cast<float>(call.scalar("scale", 1.0 / std::sqrt(static_cast<double>(p.head_dim))));
    s.softcap = static_cast<float>(call.scalar("softcap", 0.0));
    if (const Array* slopes = call.optional("alibi_slopes")) {
        TK_CHECK(slopes->dtype == DType::fp32 && slopes->size.back() == p.q_heads,
                 "tk.attention: alibi_slopes ", tuple_text(slopes->size), " does not match");
        s.alibi_slopes = reinterpret_cast<const float*>(slopes->data);
        s.alibi_batch_stride = slopes->dims() == 2 ? slopes->stride[0] : 0;
    }
    if (const Array* sink = call.optional("sink")) {
        TK_CHECK(sink->dtype == DType::fp32 && sink->elements() == p.q_heads, "tk.attention: sink ",
                 tuple_text(sink->size), " does not match");
        s.sink = reinterpret_cast<const float*>(sink->data);
    }
    return s;
}

inline Sequences sequences_of(const emulated::Call& call) {
    const Array* cu_q = call.optional("cu_seqlens_q");
    if (!cu_q) return {};
    return {reinterpret_cast<const int*>(cu_q->data),
            reinterpret_cast<const int*>(call.array("cu_seqlens_k").data), call.array("q").size[0],
            call.array("k").size[0]};
}

inline Operand operand(const Array& x) {
    const View view = x.view();
    return {view.data, view.stride[0], view.stride[1], view.stride[2]};
}
// (tokens, heads, dim)
inline Operand packed_operand(const Array& x) {
    const View view = x.view();
    return {view.data, 0, view.stride[2], view.stride[1]};
}

// The array itself where the kernels can read it, else a copy; `ragged`: of packed sequences.
inline Array for_kernel(const Array& x, bool ragged) {
    if (ragged && !fits_ragged_map(x.size[0], x.stride[0])) return emulated::copy_for_tensor_map(x);
    return emulated::for_tensor_map(x);
}

inline Array negative(const Array& x) {
    Array copy = emulated::copy_for_tensor_map(x);
    emulated::for_each_row(copy, [&](int64_t at, int64_t, int64_t, int64_t) {
        for (int64_t c = 0; c < copy.size.back(); ++c) copy.data[2 * (at + c) + 1] ^= 0x80;
    });
    return copy;
}
inline Array zeros_like(const Array& x) {
    Array copy = emulated::copy_for_tensor_map(x);
    std::memset(copy.data, 0, static_cast<std::size_t>(copy.extent()));
    return copy;
}
// q as the kernels can read it, and a positive scale.
inline Array signed_query(const Array& q, bool ragged, Scores& scores) {
    if (scores.scale > 0) return for_kernel(q, ragged);
    const bool negate = scores.scale < 0;
    scores.scale = negate ? -scores.scale : 1.0f;
    return negate ? negative(q) : zeros_like(q);
}

// What every kernel may read beside its operands.
inline void may_read_options(emulated::Launch& scope, const emulated::Call& call) {
    for (const char* name : {"cu_seqlens_q", "cu_seqlens_k", "alibi_slopes", "sink"}) {
        if (const Array* x = call.optional(name)) scope.may_read(name, *x);
    }
}

}  // namespace thunderkittens::attention
