// The last of the gradient's kernels: the gradients of what gates are made of, from those of the
// tokens' log decays and weights, and that of the skip. A block has a head, and its warps go over
// the slots in order, so that all sums are in a fixed order.
#pragma once

#include "csrc/recurrent/gradient/types_sm90.cuh"

namespace thunderkittens::recurrent {

constexpr int FINISH_WARPS = 16;

struct FinishGlobals {
    Sequences sequences;
    GateOperands operands;
    TokenOperand grad_token;                      // of dt or g; null: not wanted
    HeadOperand grad_head, grad_bias, grad_skip;  // of A or decay, of dt_bias, of D
    const SlotTokens* table;
    const float *tokens, *skip_partials;
    int slots, heads, slices, value_dim;
};

// In the order of the warps.
__device__ __forceinline__ float sum_of_warps(float x, sv<float, FINISH_WARPS>& shared) {
    x = warp_sum(x);
    arch::sync_block();
    if (laneid() == 0) shared.set(warpid(), x);
    arch::sync_block();
    float sum = 0.0f;
    for (int i = 0; i < FINISH_WARPS; ++i) sum += shared.get(i);
    return sum;
}

__global__ __launch_bounds__(FINISH_WARPS* WARP_THREADS) void gradient_finish_kernel(
    const __grid_constant__ FinishGlobals g) {
    auto& shared = arch::static_shared<sv<float, FINISH_WARPS>>();
    auto& columns = arch::static_shared<sv<float, FINISH_WARPS * VALUES>>();
    arch::launch_dependents();
    arch::wait_for_dependencies();
    const int head = int(blockIdx.x);
    const bool ssd = g.operands.dt.data != nullptr, packed = g.sequences.cu_seqlens != nullptr;
    const float rate = load_head(g.operands.A, head, 0, 0.0f);
    float sum_head = 0.0f, sum_bias = 0.0f;
#pragma unroll 1
    for (int slot = warpid(); slot < g.slots; slot += FINISH_WARPS) {
        const SlotTokens at = load_slot(g.table, slot);
        if (at.sequence < 0) continue;
        const float* from = g.tokens + (int64_t(slot) * g.heads + head) * 2 * CHUNK;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int token = i * WARP_THREADS + laneid(), row = at.chunk * CHUNK + token;
            if (row >= at.length) continue;
            const int b = packed ? 0 : at.sequence;
            const GradientGate gate = gradient_gate(g.operands, b, head, at.begin + row);
            const float decay = gate.decay_clamped ? 0.0f : arch::load_global(from + token);
            float gradient = decay;
            if (ssd) {
                sum_head = fmaf(gate.weight, decay, sum_head);
                gradient = fmaf(rate, decay, arch::load_global(from + CHUNK + token));
                if (gate.clamped) gradient = 0.0f;
                if (g.operands.softplus && gate.input <= 20.0f)
                    gradient /= 1.0f + ::expf(-gate.input);
                sum_bias += gradient;
            } else {
                sum_head += decay;
            }
            if (g.grad_token.data != nullptr) {
                const TokenOperand& to = g.grad_token;
                store_number(
                    const_cast<void*>(to.data), to.dtype,
                    b * to.batch_stride + head * to.head_stride + (at.begin + row) * to.row_stride,
                    gradient);
            }
        }
    }
    const auto store = [&](const HeadOperand& to, int column, float value) {
        store_number(const_cast<void*>(to.data), to.dtype,
                     head * to.head_stride + column * to.column_stride, value);
    };
    sum_head = sum_of_warps(sum_head, shared);
    sum_bias = sum_of_warps(sum_bias, shared);
    if (first_thread()) {
        if (g.grad_head.data != nullptr) store(g.grad_head, 0, sum_head);
        if (g.grad_bias.data != nullptr) store(g.grad_bias, 0, sum_bias);
    }
    if (g.grad_skip.data == nullptr) return;
    float total = 0.0f;
    for (int slice = 0; slice < g.slices; ++slice) {
        float2 sum = {0.0f, 0.0f};
#pragma unroll 1
        for (int slot = warpid(); slot < g.slots; slot += FINISH_WARPS) {
            if (load_slot(g.table, slot).sequence < 0) continue;
            const float* from =
                g.skip_partials + ((int64_t(slot) * g.heads + head) * g.slices + slice) * VALUES;
            const float2 x = arch::load_global(reinterpret_cast<const float2*>(from) + laneid());
            sum = {sum.x + x.x, sum.y + x.y};
        }
        arch::sync_block();
        arch::store_shared(columns.address_of(warpid() * VALUES + 2 * laneid()), sum);
        arch::sync_block();
        const int column = int(threadIdx.x);
        if (column >= VALUES) continue;
        float whole = 0.0f;
        for (int i = 0; i < FINISH_WARPS; ++i) whole += columns.get(i * VALUES + column);
        total += whole;
        if (g.grad_skip.column_stride != 0 && slice * VALUES + column < g.value_dim)
            store(g.grad_skip, slice * VALUES + column, whole);
    }
    if (g.grad_skip.column_stride != 0) return;
    total = sum_of_warps(total, shared);
    if (first_thread()) store(g.grad_skip, 0, total);
}

void launch_gradient_finish(const GradientParams& params, const GradientWorkspace& w,
                            Stream stream) {
    const RecurrentProblem& p = params.forward.problem;
    const FinishGlobals globals{.sequences = Sequences(params.forward),
                                .operands = params.forward.gates,
                                .grad_token = params.grad_token,
                                .grad_head = params.grad_head,
                                .grad_bias = params.grad_bias,
                                .grad_skip = params.grad_skip,
                                .table = w.table,
                                .tokens = w.tokens,
                                .skip_partials = w.skip,
                                .slots = int(slots_of(p)),
                                .heads = int(p.heads),
                                .slices = int(slices_of(p)),
                                .value_dim = int(p.value_dim)};
    kittens::launch({.dependent = true}, gradient_finish_kernel, dim3(unsigned(p.heads)),
                    dim3(FINISH_WARPS * WARP_THREADS), dim3(1), 0, stream, globals);
}

}  // namespace thunderkittens::recurrent
