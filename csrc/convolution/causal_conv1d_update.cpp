// The op causal_conv1d_update for CUDA.
#include "csrc/common/apart.h"
#include "csrc/common/tensor.h"
#include "csrc/convolution/causal_conv1d_update_body.h"

namespace thunderkittens::convolution {

Tensor causal_conv1d_update(const Tensor& x, Tensor state, const Tensor& weight,
                            std::optional<Tensor> bias, int64_t activation,
                            std::optional<Tensor> slots, bool apart) {
    if (apart) require_surely_apart("tk.causal_conv1d_update", state, {x});
    return causal_conv1d_update_body<Tensor>(gpu, x, state, weight, bias, activation, slots);
}

STABLE_TORCH_LIBRARY_IMPL(thunderkittens, CUDA, m) {
    m.impl("causal_conv1d_update", TORCH_BOX(&causal_conv1d_update));
}

}  // namespace thunderkittens::convolution
