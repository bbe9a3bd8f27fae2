// The ops of LoLCATS for CUDA.
#include <tuple>

#include "csrc/common/tensor.h"
#include "csrc/linear_attention/lolcats/lolcats_body.h"

namespace thunderkittens::linear_attention {

#define OPERANDS                                                                                 \
    const Tensor &q, const Tensor &k, const Tensor &v, const Tensor &q_map, const Tensor &k_map, \
        const Tensor &alpha, const Tensor &beta
#define STATE                                                           \
    std::optional<Tensor> numerator, std::optional<Tensor> denominator, \
        std::optional<Tensor> keys, std::optional<Tensor> values, std::optional<Tensor> lengths

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> lolcats_forward(OPERANDS, STATE,
                                                                           bool return_state) {
    const auto r =
        lolcats_body<Tensor>(gpu, {q, k, v, q_map, k_map, alpha, beta},
                             {numerator, denominator, keys, values, lengths}, return_state, false);
    return {r.out, r.numerator, r.denominator, r.keys, r.values, r.lengths};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> lolcats(
    OPERANDS, STATE, bool return_state) {
    const auto r =
        lolcats_body<Tensor>(gpu, {q, k, v, q_map, k_map, alpha, beta},
                             {numerator, denominator, keys, values, lengths}, return_state, true);
    return {r.out,    r.numerator, r.denominator, r.keys,
            r.values, r.lengths,   r.maxima,      r.denominators};
}

STABLE_TORCH_LIBRARY_IMPL(thunderkittens, CUDA, m) {
    m.impl("lolcats_forward", TORCH_BOX(&lolcats_forward));
    m.impl("lolcats", TORCH_BOX(&lolcats));
}

}  // namespace thunderkittens::linear_attention
