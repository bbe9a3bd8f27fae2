// The bodies of rms_norm and of its gradient, on any back end. Host C++ without torch.
#pragma once

#include <vector>

#include "csrc/norm/bodies.h"

namespace thunderkittens::norm {

template <class Tensor>
Normalised<Tensor> rms_norm_body(const Backend<Tensor>& on, const Tensor& x,
                                 Options<Tensor> options) {
    options.layer = false;
    return forward_body(on, "tk.rms_norm", x, options);
}

template <class Tensor>
Gradients<Tensor> rms_norm_backward_body(const Backend<Tensor>& on, const Tensor& grad_out,
                                         const std::optional<Tensor>& grad_sum, const Tensor& x,
                                         Options<Tensor> options, const std::vector<bool>& needs) {
    options.layer = false;
    return backward_body(on, "thunderkittens::rms_norm_backward", grad_out, grad_sum, x, options,
                         needs);
}

}  // namespace thunderkittens::norm
