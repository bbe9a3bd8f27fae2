// What the ops of the gated delta rule check of their tensors, and how kernels get at them. Host
// C++ without torch.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <initializer_list>
#include <optional>
#include <span>

#include "csrc/common/backend.h"
#include "csrc/recurrent/gated_delta_rule/gated_delta_rule.h"

namespace thunderkittens::recurrent {

template <class Tensor>
struct DeltaRuleTensors {
    const Tensor &q, &k, &v, &g, &beta;
    const std::optional<Tensor>&initial, &A_log, &dt_bias, &cu_seqlens;
};

struct DeltaRuleOptions {
    double scale = 1.0;
    bool l2_norm = false, beta_sigmoid = false, allow_neg_eigval = false, v_first = false;
};

inline void check_delta_options(const char* op, const DeltaRuleOptions& options) {
    TK_CHECK(
        options.beta_sigmoid || !options.allow_neg_eigval, op,
        ": allow_neg_eigval doubles the sigmoid of beta and needs beta_sigmoid; a beta that is "
        "given as it is may be up to 2");
}

template <class Tensor>
double delta_scale(std::optional<double> scale, const Tensor& q) {
    if (scale) return *scale;
    return q.dim() == 4 && q.size(3) > 0 ? 1.0 / std::sqrt(double(q.size(3))) : 1.0;
}

template <class Tensor>
void check_delta_tensor(const char* op, const char* name, const Tensor& x,
                        std::span<const int64_t> shape, std::initializer_list<DType> dtypes,
                        const Tensor& q) {
    check_same_device(op, name, x, "q", q);
    const auto& sizes = x.sizes();
    TK_CHECK(std::equal(sizes.begin(), sizes.end(), shape.begin(), shape.end()), op, ": ", name,
             " must have shape ", tuple_text(shape), ", got ", shape_text(x));
    check_dtype(op, name, x, dtypes);
}
template <class Tensor>
void check_delta_tensor(const char* op, const char* name, const Tensor& x,
                        std::initializer_list<int64_t> shape, std::initializer_list<DType> dtypes,
                        const Tensor& q) {
    check_delta_tensor(op, name, x, std::span(shape.begin(), shape.size()), dtypes, q);
}

// What is said of the operands of tokens, and of what the gate is made of.
template <class Tensor>
DeltaRuleProblem checked_delta_problem(const char* op, const DeltaRuleTensors<Tensor>& x) {
    check_cuda(op, "q", x.q);
    DeltaRuleProblem p;
    p.dtype = check_dtype(op, "q", x.q, {DType::bf16, DType::fp16});
    check_dims(op, "q", x.q, {4});
    check_dims(op, "v", x.v, {4});
    const int64_t batch = x.q.size(0);
    p.heads = x.q.size(1);
    p.length = x.q.size(2);
    p.key_dim = x.q.size(3);
    p.value_heads = x.v.size(1);
    p.value_dim = x.v.size(3);
    check_delta_tensor(op, "k", x.k, {batch, p.heads, p.length, p.key_dim}, {p.dtype}, x.q);
    check_delta_tensor(op, "v", x.v, {batch, p.value_heads, p.length, p.value_dim}, {p.dtype}, x.q);
    for (auto [name, numbers] : {std::pair{"g", &x.g}, {"beta", &x.beta}}) {
        check_delta_tensor(op, name, *numbers, {batch, p.value_heads, p.length},
                           {DType::fp32, p.dtype}, x.q);
    }
    for (auto [name, of_heads] : {std::pair{"A_log", &x.A_log}, {"dt_bias", &x.dt_bias}}) {
        if (*of_heads)
            check_delta_tensor(op, name, **of_heads, {p.value_heads}, {DType::fp32}, x.q);
    }
    TK_CHECK(!x.dt_bias || x.A_log, op,
             ": dt_bias is given without A_log; the gate needs both or A_log");
    p.packed = x.cu_seqlens.has_value();
    p.sequences = batch;
    if (p.packed) {
        const Tensor& edges = *x.cu_seqlens;
        check_dims(op, "cu_seqlens", edges, {1});
        TK_CHECK(edges.size(0) >= 2, op, ": cu_seqlens must have at least 2 elements, got ",
                 edges.size(0));
        check_delta_tensor(op, "cu_seqlens", edges, {edges.size(0)}, {DType::int32}, x.q);
        TK_CHECK(batch == 1, op, ": q must have batch size 1 with cu_seqlens, got ", batch);
        p.sequences = edges.size(0) - 1;
    }
    return p;
}

inline std::array<int64_t, 4> delta_state_shape(const DeltaRuleProblem& p, int64_t count,
                                                bool v_first) {
    if (v_first) return {count, p.value_heads, p.value_dim, p.key_dim};
    return {count, p.value_heads, p.key_dim, p.value_dim};
}
template <class Tensor>
void check_delta_state(const char* op, const char* name, const Tensor& x, const DeltaRuleProblem& p,
                       int64_t count, bool v_first, const Tensor& q) {
    check_delta_tensor(op, name, x, delta_state_shape(p, count, v_first),
                       {DType::fp32, DType::bf16}, q);
}

// A tensor that the kernels' maps can describe: itself, or a copy. The maps of packed sequences
// count in rows, which must not be one and the same.
template <class Tensor>
Tensor delta_rows_for_kernel(const Tensor& x, bool packed) {
    const int64_t row = x.stride(2);
    if (packed && x.size(2) > 1 && (row <= 0 || row >= int64_t{1} << 32))
        return copy_for_tensor_map(x);
    return for_tensor_map(x);
}
template <class Tensor>
DeltaRows delta_rows(const Tensor& x) {
    const View view = as_4d(x);
    return {view.data, view.stride[0], view.stride[1], view.stride[2]};
}
template <class Tensor>
bool is_fp32(const Tensor& x) {
    return Backend<Tensor>::dtype_of(x.scalar_type()) == DType::fp32;
}
template <class Tensor>
DeltaNumbers delta_numbers(const Tensor& x) {
    const View view = as_4d(x);  // (1, batch, heads, length)
    return {view.data, is_fp32(x), view.stride[1], view.stride[2], view.stride[3]};
}
template <class Tensor>
DeltaStates delta_states(const Tensor& x, bool v_first) {
    const View view = as_4d(x);
    return {const_cast<void*>(view.data),
            is_fp32(x),
            view.stride[0],
            view.stride[1],
            view.stride[v_first ? 3 : 2],
            view.stride[v_first ? 2 : 3]};
}

}  // namespace thunderkittens::recurrent
