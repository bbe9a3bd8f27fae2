// The gradient through a gate, for every GPU from compute capability 8.0 on.
#pragma once

#include "csrc/gemm/backward/gemm_backward_sm90.cuh"

namespace thunderkittens::gemm_backward {
namespace sm80 {

template <int DTYPE, int GATE>
__global__ void __launch_bounds__(THREADS) portable_gate_gradient_kernel(Params p) {
    sm90::gate_gradient<DTYPE, GATE>(p);
}

}  // namespace sm80

template <Config C>
void launch_portable(const Params& params, Stream stream) {
    launch_gradient(sm80::portable_gate_gradient_kernel<int(C.dtype), int(C.gate)>, params, stream);
}

}  // namespace thunderkittens::gemm_backward
