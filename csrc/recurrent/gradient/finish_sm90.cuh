// The last of the gradient's kernels: the gradients of what gates are made of, from those of the
// tokens' log decays and weights, and that of the skip. A block has a share of the slots of a head,
// and its warps go over them in order; then a kernel sums the shares. All sums are in a fixed
// order.
#pragma once

#include "csrc/recurrent/gradient/types_sm90.cuh"

namespace thunderkittens::recurrent {

constexpr int FINISH_WARPS = 4;

struct FinishGlobals {
    Sequences sequences;
    GateOperands operands;
    TokenOperand grad_token;                      // of dt or g; null: not wanted
    HeadOperand grad_head, grad_bias, grad_skip;  // of A or decay, of dt_bias, of D
    const SlotTokens* table;
    const float *tokens, *skip_partials;
    float* shares;
    int slots, heads, slices, value_dim, share_count;

    __device__ __forceinline__ float* share(int index, int head) const {
        return shares + (int64_t(index) * heads + head) * (2 + slices * VALUES);
    }
};

// In the order of the warps, by all of them.
__device__ __forceinline__ float2 sum_of_warps(float2 x, sv<float, 2 * FINISH_WARPS>& shared) {
    x = {warp_sum(x.x), warp_sum(x.y)};
    if (laneid() == 0) arch::store_shared(shared.address_of(2 * warpid()), x);
    arch::sync_block();
    float2 sum = {0.0f, 0.0f};
    for (int i = 0; i < FINISH_WARPS; ++i) {
        const auto y = arch::load_shared<float2>(shared.address_of(2 * i));
        sum = {sum.x + y.x, sum.y + y.y};
    }
    return sum;
}

template <bool portable>
__global__ __launch_bounds__(FINISH_WARPS* WARP_THREADS) void gradient_finish_kernel(
    const __grid_constant__ FinishGlobals g) {
    auto& sums = arch::static_shared<sv<float, 2 * FINISH_WARPS>>();
    auto& columns = arch::static_shared<sv<float, FINISH_WARPS * VALUES>>();
    arch::launch_dependents();
    arch::wait_for_dependencies();
    const int head = int(blockIdx.x) % g.heads, share = int(blockIdx.x) / g.heads;
    const int first = share * int(SLOTS_OF_SHARE);
    const int end = ::min(first + int(SLOTS_OF_SHARE), g.slots);
    const bool ssd = g.operands.dt.data != nullptr, packed = g.sequences.cu_seqlens != nullptr;
    const float rate = load_head(g.operands.A, head, 0, 0.0f);
    float sum_head = 0.0f, sum_bias = 0.0f;
#pragma unroll 1
    for (int slot = first + warpid(); slot < end; slot += FINISH_WARPS) {
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
    const float2 of_head = sum_of_warps({sum_head, sum_bias}, sums);
    float* const to = g.share(share, head);
    if (first_thread()) arch::store_global(reinterpret_cast<float2*>(to), of_head);
    if (g.grad_skip.data == nullptr) return;
    for (int slice = 0; slice < g.slices; ++slice) {
        float2 sum = {0.0f, 0.0f};
#pragma unroll 1
        for (int slot = first + warpid(); slot < end; slot += FINISH_WARPS) {
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
        arch::store_global(to + 2 + slice * VALUES + column, whole);
    }
}

// The sums of the shares, in their order. A block has a head, and a thread a column.
template <bool portable>
__global__ __launch_bounds__(FINISH_WARPS* WARP_THREADS) void gradient_shares_kernel(
    const __grid_constant__ FinishGlobals g) {
    auto& sums = arch::static_shared<sv<float, 2 * FINISH_WARPS>>();
    arch::launch_dependents();
    arch::wait_for_dependencies();
    const int head = int(blockIdx.x), skips = g.grad_skip.data == nullptr ? 0 : g.slices * VALUES;
    const auto store = [&](const HeadOperand& to, int column, float value) {
        if (to.data == nullptr) return;
        store_number(const_cast<void*>(to.data), to.dtype,
                     head * to.head_stride + column * to.column_stride, value);
    };
    float total = 0.0f;
#pragma unroll 1
    for (int at = int(threadIdx.x); at < 2 + skips; at += FINISH_WARPS * WARP_THREADS) {
        float sum = 0.0f;
#pragma unroll 4
        for (int i = 0; i < g.share_count; ++i) sum += arch::load_global(g.share(i, head) + at);
        const int column = at - 2;
        if (at == 0)
            store(g.grad_head, 0, sum);
        else if (at == 1)
            store(g.grad_bias, 0, sum);
        else if (g.grad_skip.column_stride == 0)
            total += sum;
        else if (column < g.value_dim)
            store(g.grad_skip, column, sum);
    }
    if (skips == 0 || g.grad_skip.column_stride != 0) return;
    total = sum_of_warps({total, 0.0f}, sums).x;
    if (first_thread()) store(g.grad_skip, 0, total);
}

template <bool portable>
void launch_gradient_finish(const GradientParams& params, const GradientWorkspace& w,
                            Stream stream) {
    const RecurrentProblem& p = params.forward.problem;
    const auto shares = unsigned(shares_of(p));
    const FinishGlobals globals{.sequences = Sequences(params.forward),
                                .operands = params.forward.gates,
                                .grad_token = params.grad_token,
                                .grad_head = params.grad_head,
                                .grad_bias = params.grad_bias,
                                .grad_skip = params.grad_skip,
                                .table = w.table,
                                .tokens = w.tokens,
                                .skip_partials = w.skip,
                                .shares = w.shares,
                                .slots = int(slots_of(p)),
                                .heads = int(p.heads),
                                .slices = int(slices_of(p)),
                                .value_dim = int(p.value_dim),
                                .share_count = int(shares)};
    constexpr dim3 threads(FINISH_WARPS * WARP_THREADS);
    kittens::launch({.dependent = !portable}, gradient_finish_kernel<portable>,
                    dim3(unsigned(p.heads) * shares), threads, dim3(1), 0, stream, globals);
    for (const HeadOperand& x : {params.grad_head, params.grad_bias, params.grad_skip}) {
        if (x.data == nullptr) continue;
        kittens::launch({.dependent = !portable}, gradient_shares_kernel<portable>,
                        dim3(unsigned(p.heads)), threads, dim3(1), 0, stream, globals);
        return;
    }
}

}  // namespace thunderkittens::recurrent
