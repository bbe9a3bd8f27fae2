// The launches that make up one gradient, for the ops and for the emulator. Host C++ only.
#pragma once

#include "csrc/recurrent/gradient/gradient.h"

namespace thunderkittens::recurrent {

template <DType dtype, int key_dim, bool portable>
void run_gradient(const GradientParams& params, const GradientWorkspace& w, int sms,
                  Stream stream) {
    const auto make_states = [&](bool sums) {
        if constexpr (portable)
            launch_portable_gradient_states<dtype, key_dim>(params, w, sums, stream);
        else
            launch_gradient_states<dtype, key_dim>(params, w, sums, stream);
    };
    launch_gradient_gates<portable>(params, w, stream);
    if (params.segments > 1) {
        make_states(true);
        launch_gradient_scan<portable>(params, w, stream);
    }
    make_states(false);
    if constexpr (portable)
        launch_portable_gradient_chunks<dtype, key_dim>(params, w, stream);
    else
        launch_gradient_chunks<dtype, key_dim>(params, w, sms, stream);
    if (params.splits > 1) launch_gradient_sum_keys<dtype, portable>(params, w, stream);
    launch_gradient_finish<portable>(params, w, stream);
}

using GradientLaunch = void (*)(const GradientParams&, const GradientWorkspace&, int, Stream);

template <DType dtype, int key_dim>
GradientLaunch gradient_launch_of(bool portable) {
    if constexpr (BUILDS_PORTABLE) {
        if (portable) return &run_gradient<dtype, key_dim, true>;
    }
    return &run_gradient<dtype, key_dim, false>;
}

inline void run_gradient(const GradientParams& params, const GradientWorkspace& w, int sms,
                         Stream stream) {
    const bool bf16 = params.forward.problem.dtype == DType::bf16, wide = params.key_dim == 128;
    const auto launch_of =
        bf16   ? wide ? &gradient_launch_of<DType::bf16, 128> : &gradient_launch_of<DType::bf16, 64>
          : wide ? &gradient_launch_of<DType::fp16, 128>
               : &gradient_launch_of<DType::fp16, 64>;
    launch_of(params.portable)(params, w, sms, stream);
}

template <DType dtype>
void run_gate_gradient(const RecurrentProblem& problem, const GateGradient& call, bool portable,
                       Stream stream) {
    if constexpr (BUILDS_PORTABLE) {
        if (portable) return launch_gradient_gate<dtype, true>(problem, call, stream);
    }
    launch_gradient_gate<dtype, false>(problem, call, stream);
}
inline void run_gate_gradient(const RecurrentProblem& problem, const GateGradient& call,
                              bool portable, Stream stream) {
    if (problem.dtype == DType::bf16)
        run_gate_gradient<DType::bf16>(problem, call, portable, stream);
    else
        run_gate_gradient<DType::fp16>(problem, call, portable, stream);
}

}  // namespace thunderkittens::recurrent
