// Operands of the ops of LoLCATS: their checks, and what the kernels need of them. Host C++ without
// torch.
#pragma once

#include <array>
#include <vector>

#include "csrc/common/accesses.h"
#include "csrc/linear_attention/common/operands.h"
#include "csrc/linear_attention/lolcats/lolcats.h"

namespace thunderkittens::linear_attention {

// The tensors that every op of LoLCATS takes, as they are given.
template <class Tensor>
struct LolcatsTensors {
    const Tensor &q, &k, &v, &q_map, &k_map, &alpha, &beta;
};

template <class Tensor>
LolcatsProblem checked_lolcats(const char* op, const LolcatsTensors<Tensor>& given) {
    const auto& [q, k, v, q_map, k_map, alpha, beta] = given;
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
    const std::vector<int64_t> tokens = {p.batch, p.kv_heads, p.length, p.head_dim};
    const std::vector<int64_t> map = {p.heads, p.head_dim, p.features};
    check_tensor(op, "k", k, tokens, p.dtype, q);
    check_tensor(op, "v", v, tokens, p.dtype, q);
    check_tensor(op, "q_map", q_map, map, p.dtype, q);
    check_tensor(op, "k_map", k_map, map, p.dtype, q);
    check_tensor(op, "alpha", alpha, {p.heads}, DType::fp32, q);
    check_tensor(op, "beta", beta, {p.heads}, DType::fp32, q);
    return p;
}

// The same tensors as the kernels can read them.
template <class Tensor>
struct LolcatsOperands {
    Tensor q, k, v, q_map, k_map, alpha, beta;

    explicit LolcatsOperands(const LolcatsTensors<Tensor>& given)
        : q(for_tensor_map(given.q)),
          k(for_tensor_map(given.k)),
          v(for_tensor_map(given.v)),
          q_map(for_tensor_map(given.q_map)),
          k_map(for_tensor_map(given.k_map)),
          alpha(packed(given.alpha)),
          beta(packed(given.beta)) {}
    template <class Params>
    void fill(Params& params) const {
        params.q = operand(q);
        params.k = operand(k);
        params.v = operand(v);
        params.q_map = operand(q_map);
        params.k_map = operand(k_map);
        params.alpha = data_as<const float>(alpha);
        params.beta = data_as<const float>(beta);
    }
    template <class Launch>
    void may_read(Launch& launch) const {
        reads(launch, "q", q, "k", k, "v", v, "q_map", q_map, "k_map", k_map, "alpha", alpha,
              "beta", beta);
    }
};

template <class Tensor>
LolcatsStatePointers pointers_of(const std::array<Tensor*, 5>& parts) {
    return {data_as<float>(*parts[0]), data_as<float>(*parts[1]), parts[2]->data_ptr(),
            parts[3]->data_ptr(), data_as<int>(*parts[4])};
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

template <class Tensor>
void check_lolcats_part(const char* op, std::size_t i, const Tensor& x, const LolcatsProblem& p,
                        const Tensor& q) {
    const std::array<DType, 5> dtypes = {DType::fp32, DType::fp32, p.dtype, p.dtype, DType::int32};
    check_tensor(op, STATE_PARTS[i], x, state_shapes(p)[i], dtypes[i], q);
}

// All parts of a state, packed, or none.
template <class Tensor>
struct LolcatsState {
    std::array<std::optional<Tensor>, 5> parts;

    LolcatsState(const char* op, const LolcatsProblem& p,
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
        return pointers_of<Tensor>({&all[0], &all[1], &all[2], &all[3], &all[4]});
    }
    template <class Launch>
    void may_read(Launch& launch) const {
        for (std::size_t i = 0; i < parts.size(); ++i) launch.may_read(STATE_PARTS[i], parts[i]);
    }
};

}  // namespace thunderkittens::linear_attention
