// The first of the gradient's kernels: the table of the slots, and of each token the log2 decay
// since its chunk's begin and the weight of its values. A warp has a chunk of one head, a lane two
// of its tokens. Behind a sequence's end the weight is 0, and nothing decays.
#pragma once

#include "csrc/recurrent/gradient/types_sm90.cuh"

namespace thunderkittens::recurrent {

constexpr int GATES_WARPS = 8;

struct GatesGlobals {
    Sequences sequences;
    GateOperands operands;
    SlotTokens* table;
    float* gates;
    int heads, head_blocks;
};

template <bool portable>
__global__ __launch_bounds__(GATES_WARPS* WARP_THREADS) void gradient_gates_kernel(
    const __grid_constant__ GatesGlobals g) {
    arch::launch_dependents();
    arch::wait_for_dependencies();
    const int slot = int(blockIdx.x) / g.head_blocks, block = int(blockIdx.x) % g.head_blocks;
    const SlotTokens at = g.sequences.at(slot);
    if (block == 0 && threadIdx.x == 0) {
        arch::store_global(reinterpret_cast<int4*>(g.table) + slot,
                           int4{at.sequence, at.begin, at.length, at.chunk});
    }
    const int head = block * GATES_WARPS + warpid();
    if (at.sequence < 0 || head >= g.heads) return;
    const bool packed = g.sequences.cu_seqlens != nullptr;
    float decay[2] = {0.0f, 0.0f}, weight[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int row = at.chunk * CHUNK + 2 * laneid() + i;
        if (row >= at.length) continue;
        const GradientGate gate =
            gradient_gate(g.operands, packed ? 0 : at.sequence, head, at.begin + row);
        decay[i] = gate.log_decay;
        weight[i] = gate.weight;
    }
    // In natural units, as the reference adds them; scaled at the end.
    float sum = decay[0] + decay[1];
#pragma unroll
    for (int d = 1; d < WARP_THREADS; d *= 2) {
        const float before = arch::shuffle(sum, ::max(laneid() - d, 0));
        if (laneid() >= d) sum += before;
    }
    float* to = g.gates + (int64_t(slot) * g.heads + head) * 2 * CHUNK + 2 * laneid();
    arch::store_global(reinterpret_cast<float2*>(to),
                       float2{(sum - decay[1]) * LOG2_E, sum * LOG2_E});
    arch::store_global(reinterpret_cast<float2*>(to + CHUNK), float2{weight[0], weight[1]});
}

template <bool portable>
void launch_gradient_gates(const GradientParams& params, const GradientWorkspace& w,
                           Stream stream) {
    const RecurrentProblem& p = params.forward.problem;
    const int head_blocks = int((p.heads + GATES_WARPS - 1) / GATES_WARPS);
    const GatesGlobals globals{.sequences = Sequences(params.forward),
                               .operands = params.forward.gates,
                               .table = w.table,
                               .gates = w.gates,
                               .heads = int(p.heads),
                               .head_blocks = head_blocks};
    kittens::launch(gradient_gates_kernel<portable>, dim3(unsigned(slots_of(p) * head_blocks)),
                    dim3(GATES_WARPS * WARP_THREADS), dim3(1), 0, stream, globals);
}

}  // namespace thunderkittens::recurrent
