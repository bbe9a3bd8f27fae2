// The attention ops for CUDA.
#include <tuple>

#include "csrc/attention/forward/attention_body.h"
#include "csrc/common/tensor.h"

namespace thunderkittens::attention {

Tensor attention_forward(const Tensor& q, const Tensor& k, const Tensor& v, ATTENTION_OPTIONS) {
    return attention_body<Tensor>(gpu, q, k, v, nullptr, ATTENTION_OPTION_VALUES, nullptr);
}

std::tuple<Tensor, Tensor> attention(const Tensor& q, const Tensor& k, const Tensor& v,
                                     ATTENTION_OPTIONS) {
    Tensor lse;
    Tensor out = attention_body<Tensor>(gpu, q, k, v, nullptr, ATTENTION_OPTION_VALUES, &lse);
    return {out, lse};
}

Tensor attention_varlen_forward(const Tensor& q, const Tensor& k, const Tensor& v,
                                const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k,
                                int64_t max_seqlen_q, int64_t max_seqlen_k, ATTENTION_OPTIONS) {
    const Packing<Tensor> packing{cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k};
    return attention_body<Tensor>(gpu, q, k, v, &packing, ATTENTION_OPTION_VALUES, nullptr);
}

std::tuple<Tensor, Tensor> attention_varlen(const Tensor& q, const Tensor& k, const Tensor& v,
                                            const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k,
                                            int64_t max_seqlen_q, int64_t max_seqlen_k,
                                            ATTENTION_OPTIONS) {
    const Packing<Tensor> packing{cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k};
    Tensor lse;
    Tensor out = attention_body<Tensor>(gpu, q, k, v, &packing, ATTENTION_OPTION_VALUES, &lse);
    return {out, lse};
}

STABLE_TORCH_LIBRARY_IMPL(thunderkittens, CUDA, m) {
    m.impl("attention_forward", TORCH_BOX(&attention_forward));
    m.impl("attention", TORCH_BOX(&attention));
    m.impl("attention_varlen_forward", TORCH_BOX(&attention_varlen_forward));
    m.impl("attention_varlen", TORCH_BOX(&attention_varlen));
}

}  // namespace thunderkittens::attention
