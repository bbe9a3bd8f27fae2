// The op ssd_decode for CUDA.
#include "csrc/common/apart.h"
#include "csrc/common/tensor.h"
#include "csrc/recurrent/ssd/ssd_decode_body.h"

namespace thunderkittens::recurrent {

Tensor ssd_decode(const Tensor& x, const Tensor& dt, const Tensor& A, const Tensor& B,
                  const Tensor& C, Tensor state, std::optional<Tensor> D, std::optional<Tensor> z,
                  std::optional<Tensor> dt_bias, std::optional<Tensor> state_indices,
                  bool dt_softplus, double dt_min, std::optional<double> dt_max, bool apart) {
    if (apart)
        require_surely_apart("tk.ssd_decode", state,
                             {x, dt, A, B, C, D, z, dt_bias, state_indices});
    return ssd_decode_body<Tensor>(gpu, {x, dt, A, B, C, D, z, dt_bias, state_indices}, state,
                                   step_options(dt_softplus, dt_min, dt_max));
}

STABLE_TORCH_LIBRARY_IMPL(thunderkittens, CUDA, m) { m.impl("ssd_decode", TORCH_BOX(&ssd_decode)); }

}  // namespace thunderkittens::recurrent
