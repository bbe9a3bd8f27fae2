// The body of rms_norm_quantize, on any back end. Host C++ without torch.
#pragma once

#include "csrc/norm/quantize/bodies.h"

namespace thunderkittens::norm {

template <class Tensor>
Quantized<Tensor> rms_norm_quantize_body(const Backend<Tensor>& on, const Tensor& x,
                                         Options<Tensor> options,
                                         const std::optional<Tensor>& scale, int64_t output,
                                         bool swizzle) {
    options.layer = false;
    return quantize_body(on, "tk.rms_norm_quantize", x, options, scale, output, swizzle);
}

}  // namespace thunderkittens::norm
