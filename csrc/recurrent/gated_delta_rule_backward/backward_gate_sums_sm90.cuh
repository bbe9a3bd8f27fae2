// The last kernel of the gated delta rule's gradient, where A_log or dt_bias wants one: a block
// sums what the chunks of a value head have left, in a fixed order. The portable kernel is the
// same.
#pragma once

#include "csrc/recurrent/gated_delta_rule_backward/backward_rows_sm90.cuh"

namespace thunderkittens::recurrent {
namespace delta_gradient {

struct DeltaGateSums {
    const float2* chunks;  // (batch, value heads, slots)
    float *grad_A_log, *grad_dt_bias;
    int batch, slots;
};

template <int threads, bool portable>
__global__ __launch_bounds__(threads) void delta_gate_sums_kernel(
    const __grid_constant__ DeltaGateSums g) {
    constexpr int warps = threads / WARP_THREADS;
    shared_allocator<> allocator(shared_memory());
    auto& shared = allocator.template allocate<sv<float, 2 * warps>>();
    const int head = int(blockIdx.x), heads = int(gridDim.x);
    arch::wait_for_dependencies();
    float2 sum = {0.0f, 0.0f};
    for (int b = 0; b < g.batch; ++b) {
        const float2* chunks = g.chunks + (int64_t(b) * heads + head) * g.slots;
        for (int i = int(threadIdx.x); i < g.slots; i += threads) {
            const float2 x = arch::load_global_readonly(chunks + i);
            sum = {sum.x + x.x, sum.y + x.y};
        }
    }
    sum = {warp_sum(sum.x), warp_sum(sum.y)};
    if (laneid() == 0) {
        shared.set(2 * warpid(), sum.x);
        shared.set(2 * warpid() + 1, sum.y);
    }
    arch::sync_block();
    if (threadIdx.x >= 2) return;
    float total = 0.0f;
    for (int w = 0; w < warps; ++w) total += shared.get(2 * w + int(threadIdx.x));
    float* to = threadIdx.x == 0 ? g.grad_A_log : g.grad_dt_bias;
    if (to != nullptr) arch::store_global(to + head, total);
}

}  // namespace delta_gradient

template <int threads, bool portable>
void launch_delta_gate_sums(const DeltaBackwardParams& params, Stream stream) {
    using namespace delta_gradient;
    const DeltaRuleProblem& p = params.forward.problem;
    const DeltaBackwardWorkspace w(p, params.config, params.forward.l2_norm);
    const DeltaGateSums globals{reinterpret_cast<const float2*>(params.workspace + w.gates),
                                params.grad_A_log, params.grad_dt_bias, int(delta_batch(p)),
                                int(delta_slots(p))};
    kittens::launch({.dependent = !portable}, delta_gate_sums_kernel<threads, portable>,
                    dim3(unsigned(p.value_heads)), dim3(threads), dim3(1), 2048, stream, globals);
}

}  // namespace thunderkittens::recurrent
