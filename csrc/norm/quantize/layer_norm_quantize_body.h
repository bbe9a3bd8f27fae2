// The body of layer_norm_quantize, on any back end. Host C++ without torch.
#pragma once

#include "csrc/norm/quantize/bodies.h"

namespace thunderkittens::norm {

template <class Tensor>
Quantized<Tensor> layer_norm_quantize_body(const Backend<Tensor>& on, const Tensor& x,
                                           Options<Tensor> options,
                                           const std::optional<Tensor>& scale, int64_t output,
                                           bool swizzle) {
    options.layer = true;
    return quantize_body(on, "tk.layer_norm_quantize", x, options, scale, output, swizzle);
}

}  // namespace thunderkittens::norm
