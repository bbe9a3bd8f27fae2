// Gradients of the gates in the gated delta rule's gradient, by warps that have no products.
#pragma once

#include "csrc/recurrent/gated_delta_rule_backward/backward_work_sm90.cuh"

namespace thunderkittens::recurrent::delta_gradient {

// The product of eight pairs of elements.
template <class T>
__device__ __forceinline__ void add_product(float& sum, const uint4& x, const uint4& y) {
    add_product<T>(sum, x.x, y.x);
    add_product<T>(sum, x.y, y.y);
    add_product<T>(sum, x.z, y.z);
    add_product<T>(sum, x.w, y.w);
}

// By a warp: its part of <S, dS>, from tiles whose elements lie alike.
template <class G>
__device__ __forceinline__ float multiply_tiles(DeltaGradientsShared<G>& shared, int n, int warp) {
    constexpr int bytes = DELTA_VALUES * G::key_dim * 2, step = 16 * DELTA_SUM_WARPS * WARP_THREADS;
    float sum = 0.0f;
    for (int s = 0; s < G::slices; ++s) {
        wait(shared.grad_states_full[s], n % 2);
        wait(shared.states_full[s], n % 2);
        const uint32_t x = shared.states[s].address(), y = shared.grad_states[s].address();
#pragma unroll 2
        for (int at = 16 * (warp * WARP_THREADS + laneid()); at < bytes; at += step) {
            add_product<typename G::T>(sum, arch::load_shared<uint4>(x + uint32_t(at)),
                                       arch::load_shared<uint4>(y + uint32_t(at)));
        }
        signal_by_warp(shared.states_empty[s]);
        if (laneid() == 0) arrive(shared.grad_states_empty[s]);
    }
    return warp_sum(sum);
}

// What the gradients of a lane's two tokens need of memory, on its way while the sums are made.
// What follows a load at once would wait for it, conversions too.
template <class Globals>
struct GateInputs {
    uint32_t g[2], beta[2];   // as they lie in memory
    float A_log, bias, last;  // of the chunk, exp(c_last)

    // `at` is the chunk's place in the workspace.
    template <class Place>
    __device__ __forceinline__ GateInputs(const Globals& from, const float* all_vectors,
                                          const DeltaChunk& chunk, int value_head, Place at) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = ::min(chunk.row() + 2 * laneid() + i, chunk.length - 1);
            g[i] = from.g.load_bits(chunk, value_head, row);
            beta[i] = from.beta.load_bits(chunk, value_head, row);
        }
        const float* vectors = all_vectors + int64_t(at) * (DELTA_VECTORS * DELTA_CHUNK);
        last = arch::load_global_readonly(vectors + EXP_C * DELTA_CHUNK + DELTA_CHUNK - 1);
        A_log = from.gate.rate(value_head), bias = from.gate.bias(value_head);
    }
};

// The gradients of a chunk's gates, by one warp; a lane has two neighbouring tokens. The
// parts of <S, dS> are summed; `at` is the chunk's place in the workspace.
template <int parts, class Globals, class Rows, class Products, class Place>
__device__ __forceinline__ void finish_gates(const Globals& g, const Rows& rows,
                                             const Products& products,
                                             const GateInputs<Globals>& inputs,
                                             const DeltaChunk& chunk, int value_head, Place at) {
    auto lane = uint32_t(laneid());
    arch::pin_register(lane);  // else its neighbours are registers all the while
    const auto pair_of = [&](DeltaRowSum which) {
        return arch::load_shared<float2>(rows[which].address_of(2 * lane));
    };
    const float2 queries = pair_of(QUERY_ROWS), keys = pair_of(KEY_ROWS),
                 states = pair_of(STATE_ROWS), betas = pair_of(BETA_ROWS);
    const float2 e = {queries.x + keys.x, queries.y + keys.y};
    float behind = e.x + e.y, before = states.x + states.y;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const float x = arch::shuffle(behind, (lane + distance) & 31),
                    y = arch::shuffle(before, (lane - distance) & 31);
        if (lane + distance < 32) behind += x;
        if (lane >= distance) before += y;
    }
    float inner = products.get(0);
    for (int w = 1; w < parts; ++w) inner += products.get(w);
    inner *= inputs.last;
    const float of_first = behind + (before - states.x - states.y) + inner;
    const float dg[2] = {of_first, of_first - e.x + states.x};
    const float dbeta[2] = {betas.x, betas.y};
    const float factor = g.gate.factor_of(inputs.A_log), bias = inputs.bias;
    float sum_A = 0.0f, sum_bias = 0.0f;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int row = chunk.row() + 2 * lane + i;
        if (row >= chunk.length) continue;
        const float x = g.g.value(inputs.g[i]), b = g.beta.value(inputs.beta[i]);
        const float slope = dg[i] * g.gate.decay_slope(x, factor, bias);
        g.dg.store(chunk, value_head, row, slope);
        g.dbeta.store(chunk, value_head, row, dbeta[i] * g.gate.beta_slope(b));
        sum_A = fmaf(dg[i], g.gate.decay(x, factor, bias), sum_A);
        sum_bias += slope;
    }
    if (g.gates == nullptr) return;
    sum_A = warp_sum(sum_A);
    sum_bias = warp_sum(sum_bias);
    if (lane == 0) {
        arch::store_global(reinterpret_cast<float2*>(g.gates) + at, {sum_A, sum_bias});
    }
}

// Zeros for tokens that no sequence has, by one warp; at() is the chunk's place in the workspace.
template <class Globals, class Place>
__device__ __forceinline__ void clear_gates(const Globals& g, const DeltaChunk& chunk,
                                            int value_head, Place at) {
    if (g.gates != nullptr && laneid() == 0)
        arch::store_global(reinterpret_cast<float2*>(g.gates) + at(), float2{0.0f, 0.0f});
    if (!chunk.exists) return;
    for (int i = laneid(); i < DELTA_CHUNK && i < chunk.tokens(); i += WARP_THREADS) {
        g.dg.store(chunk, value_head, chunk.row() + i, 0.0f);
        g.dbeta.store(chunk, value_head, chunk.row() + i, 0.0f);
    }
}

// Adds the sums of another part of a value head, by a warp.
template <class G>
__device__ __forceinline__ void add_part(DeltaGradientsShared<G>& shared, int to, int from) {
    for (int which = 0; which < DELTA_ROW_SUMS; ++which) {
        for (int i = laneid(); i < DELTA_CHUNK; i += WARP_THREADS) {
            auto& rows = shared.rows[to][which];
            rows.set(i, rows.get(i) + shared.rows[from][which].get(i));
        }
    }
    auto& products = shared.products[to];
    if (laneid() < DELTA_SUM_WARPS)
        products.set(laneid(), products.get(laneid()) + shared.products[from].get(laneid()));
    arch::sync_warp();
}

// By DELTA_SUM_WARPS warps. Who finishes gates waits for the roles, so it does that of the head
// before, behind its part of the step's <S, dS>: states are not held up.
template <class G>
__device__ __forceinline__ void sum_gates(const DeltaGradientsGlobals<G>& g,
                                          DeltaGradientsShared<G>& shared, int warp) {
    int n = 0;
    DeltaChunk chunk_before{};
    int head_before = 0;
    const auto finish_before = [&] {
        const int last = n - 1, buffer = last % 2, at = chunk_at(g, chunk_before, head_before);
        if (last < 0 || g.part_of(last) != g.parts - 1) return;
        const GateInputs inputs(g, g.vectors.raw_ptr, chunk_before, head_before, at);
        wait(shared.rows_full[buffer], last / 2 % 2);
        if (g.parts > 1) {
            wait(shared.rows_full[buffer ^ 1], (last - 1) / 2 % 2);
            add_part(shared, buffer, buffer ^ 1);
        }
        finish_gates<DELTA_SUM_WARPS>(g, shared.rows[buffer], shared.products[buffer], inputs,
                                      chunk_before, head_before, at);
        arch::sync_warp();
        if (laneid() == 0) arrive(shared.rows_empty[buffer]);
        if (laneid() == 0 && g.parts > 1) arrive(shared.rows_empty[buffer ^ 1]);
    };
    for_each_chunk(
        g,
        [&](const DeltaChunk& chunk, int head) {
#pragma unroll 1
            for (int step = 0; step < g.steps(); ++step, ++n) {
                const int buffer = n % 2;
                const float sum = multiply_tiles(shared, n, warp);
                if (warp == 0) finish_before();
                wait(shared.rows_empty[buffer], n / 2 % 2 ^ 1);
                if (laneid() == 0) {
                    shared.products[buffer].set(warp, sum);
                    arrive(shared.rows_full[buffer]);
                }
                arch::sync_warp();
                chunk_before = chunk;
                head_before = head * g.ratio + g.head_of(step);
            }
        },
        [&](const DeltaChunk& chunk, int head) {
            for (int r = 0; r < g.ratio && warp == 0; ++r) {
                const int value_head = head * g.ratio + r;
                clear_gates(g, chunk, value_head, [&] { return chunk_at(g, chunk, value_head); });
            }
        });
    if (warp == 0) finish_before();
}

}  // namespace thunderkittens::recurrent::delta_gradient
