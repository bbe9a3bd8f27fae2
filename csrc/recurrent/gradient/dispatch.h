// The launches that make up one gradient, for the ops and for the emulator. Host C++ only.
#pragma once

#include "csrc/recurrent/gradient/gradient.h"

namespace thunderkittens::recurrent {

template <DType dtype, int key_dim>
void run_gradient(const GradientParams& params, const GradientWorkspace& w, int sms,
                  Stream stream) {
    launch_gradient_gates(params, w, stream);
    if (params.segments > 1) {
        launch_gradient_states<dtype, key_dim>(params, w, true, stream);
        launch_gradient_scan(params, w, stream);
    }
    launch_gradient_states<dtype, key_dim>(params, w, false, stream);
    launch_gradient_chunks<dtype, key_dim>(params, w, sms, stream);
    if (params.splits > 1) launch_gradient_sum_keys<dtype>(params, w, stream);
    launch_gradient_finish(params, w, stream);
}

inline void run_gradient(const GradientParams& params, const GradientWorkspace& w, int sms,
                         Stream stream) {
    const bool bf16 = params.forward.problem.dtype == DType::bf16, wide = params.key_dim == 128;
    const auto run = bf16 ? wide ? &run_gradient<DType::bf16, 128> : &run_gradient<DType::bf16, 64>
                     : wide ? &run_gradient<DType::fp16, 128>
                            : &run_gradient<DType::fp16, 64>;
    run(params, w, sms, stream);
}

}  // namespace thunderkittens::recurrent
