// Operands of the ops of LoLCATS as tensors: their checks, and what the kernels need of them.
#pragma once

#include <algorithm>
#include <array>
#include <vector>

#include "csrc/common/tensor.h"
#include "csrc/linear_attention/lolcats/lolcats.h"

namespace thunderkittens::linear_attention {

inline void check_lolcats_tensor(const char* op, const char* name, const Tensor& x,
                                 const std::vector<int64_t>& shape, ScalarType dtype,
                                 const Tensor& q) {
    check_same_device(op, name, x, "q", q);
    const auto sizes = x.sizes();
    TK_CHECK(std::equal(sizes.begin(), sizes.end(), shape.begin(), shape.end()), op, ": ", name,
             " must have shape ", tuple_text(shape), ", got ", shape_text(x));
    TK_CHECK(x.scalar_type() == dtype, op, ": ", name, " must be ", dtype_text(dtype), ", got ",
             dtype_text(x.scalar_type()));
}

inline LolcatsProblem checked_lolcats(const char* op, const Tensor& q, const Tensor& k,
                                      const Tensor& v, const Tensor& q_map, const Tensor& k_map,
                                      const Tensor& alpha, const Tensor& beta) {
    check_cuda(op, "q", q);
    check_dims(op, "q", q, {4});
    check_dims(op, "k", k, {4});
    check_dims(op, "q_map", q_map, {3});
    LolcatsProblem p;
    p.dtype = check_dtype(op, "q", q, {DType::bf16, DType::fp16});
    p.batch = q.size(0);
    p.heads = q.size(1);
    p.kv_heads = k.size(1);
    p.length = q.size(2);
    p.head_dim = q.size(3);
    p.features = q_map.size(2);
    const ScalarType dtype = q.scalar_type();
    const std::vector<int64_t> tokens = {p.batch, p.kv_heads, p.length, p.head_dim};
    const std::vector<int64_t> map = {p.heads, p.head_dim, p.features};
    check_lolcats_tensor(op, "k", k, tokens, dtype, q);
    check_lolcats_tensor(op, "v", v, tokens, dtype, q);
    check_lolcats_tensor(op, "q_map", q_map, map, dtype, q);
    check_lolcats_tensor(op, "k_map", k_map, map, dtype, q);
    check_lolcats_tensor(op, "alpha", alpha, {p.heads}, ScalarType::Float, q);
    check_lolcats_tensor(op, "beta", beta, {p.heads}, ScalarType::Float, q);
    return p;
}

inline Operand operand_of(const Tensor& x) {
    const View view = as_4d(x);
    return {view.data, view.stride[0], view.stride[1], view.stride[2]};
}

inline LolcatsStatePointers pointers_of(const std::array<Tensor*, 5>& parts) {
    return {static_cast<float*>(parts[0]->data_ptr()), static_cast<float*>(parts[1]->data_ptr()),
            parts[2]->data_ptr(), parts[3]->data_ptr(), static_cast<int*>(parts[4]->data_ptr())};
}

inline std::array<std::vector<int64_t>, 5> state_shapes(const LolcatsProblem& p) {
    const std::vector<int64_t> cache = {p.batch, p.kv_heads, CACHE, p.head_dim};
    return {{{p.batch, p.heads, 2 * p.features, p.head_dim},
             {p.batch, p.heads, 2 * p.features},
             cache,
             cache,
             {p.batch}}};
}
constexpr std::array<const char*, 5> STATE_PARTS = {"the state's numerator",
                                                    "the state's denominator", "the state's keys",
                                                    "the state's values", "the state's lengths"};

inline void check_lolcats_part(const char* op, std::size_t i, const Tensor& x,
                               const LolcatsProblem& p, const Tensor& q) {
    const std::array<ScalarType, 5> dtypes = {ScalarType::Float, ScalarType::Float, q.scalar_type(),
                                              q.scalar_type(), ScalarType::Int};
    check_lolcats_tensor(op, STATE_PARTS[i], x, state_shapes(p)[i], dtypes[i], q);
}

// The lengths of sequences after so many tokens of a call without heads, which no kernel runs for.
inline void lengthen(Tensor& lengths, int64_t tokens) {
    // As a sum over two rows: the stable ABI has no addition of integers.
    Tensor terms = empty({2, lengths.size(0)}, ScalarType::Int, lengths);
    Tensor before = torch::stable::select(terms, 0, 0), added = torch::stable::select(terms, 0, 1);
    torch::stable::copy_(before, lengths);
    torch::stable::fill_(added, static_cast<double>(tokens));
    const std::array<int64_t, 1> rows{0};
    const torch::headeronly::IntHeaderOnlyArrayRef dims(rows.data(), rows.size());
    Tensor sums = empty({lengths.size(0)}, ScalarType::Int, lengths);
    torch::stable::sum_out(sums, terms, dims, false, ScalarType::Int);
    torch::stable::copy_(lengths, sums);
}

// All parts of a state, packed, or none.
struct LolcatsStateTensors {
    std::array<std::optional<Tensor>, 5> parts;

    LolcatsStateTensors(const char* op, const LolcatsProblem& p,
                        const std::array<std::optional<Tensor>, 5>& given, const Tensor& q) {
        for (std::size_t i = 0; i < parts.size(); ++i) {
            TK_CHECK(given[i].has_value() == given[0].has_value(), op,
                     ": a state must have all of its parts, or there is none");
            if (!given[i]) continue;
            check_lolcats_part(op, i, *given[i], p, q);
            parts[i] = aligned_and_contiguous(*given[i]);
        }
    }
    LolcatsStatePointers pointers() const {
        if (!parts[0]) return {};
        std::array<Tensor, 5> all = {*parts[0], *parts[1], *parts[2], *parts[3], *parts[4]};
        return pointers_of({&all[0], &all[1], &all[2], &all[3], &all[4]});
    }
};

}  // namespace thunderkittens::linear_attention
