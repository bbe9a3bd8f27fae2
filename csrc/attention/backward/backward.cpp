// The gradient ops of attention for CUDA.
#include <tuple>
#include <vector>

#include "csrc/attention/backward/backward_body.h"
#include "csrc/common/tensor.h"

namespace thunderkittens::attention {

Gradients<Tensor> attention_backward(const Tensor& grad_out, const std::optional<Tensor>& grad_lse,
                                     const Tensor& q, const Tensor& k, const Tensor& v,
                                     const Tensor& out, const Tensor& lse, ATTENTION_OPTIONS,
                                     std::vector<bool> needs) {
    return attention_backward_body<Tensor>(gpu, {grad_out, grad_lse, q, k, v, out, lse}, nullptr,
                                           ATTENTION_OPTION_VALUES, needs);
}

Gradients<Tensor> attention_varlen_backward(const Tensor& grad_out,
                                            const std::optional<Tensor>& grad_lse, const Tensor& q,
                                            const Tensor& k, const Tensor& v, const Tensor& out,
                                            const Tensor& lse, const Tensor& cu_seqlens_q,
                                            const Tensor& cu_seqlens_k, int64_t max_seqlen_q,
                                            int64_t max_seqlen_k, ATTENTION_OPTIONS,
                                            std::vector<bool> needs) {
    const Packing<Tensor> packing{cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k};
    return attention_backward_body<Tensor>(gpu, {grad_out, grad_lse, q, k, v, out, lse}, &packing,
                                           ATTENTION_OPTION_VALUES, needs);
}

STABLE_TORCH_LIBRARY_IMPL(thunderkittens, CUDA, m) {
    m.impl("attention_backward", TORCH_BOX(&attention_backward));
    m.impl("attention_varlen_backward", TORCH_BOX(&attention_varlen_backward));
}

}  // namespace thunderkittens::attention
