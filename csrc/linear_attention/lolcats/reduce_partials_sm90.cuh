// The sums of parts that LoLCATS's gradient ends with, in a fixed order: of the maps', of the
// factors', and of the keys' and values' gradients over the heads that share them. One launch. The
// portable kernel is this one.
#pragma once

#include "csrc/linear_attention/lolcats/backward.h"
#include "kittens/kittens.cuh"

namespace thunderkittens::linear_attention {

using namespace kittens;

constexpr int LOLCATS_ROW_THREADS = 256;

// result[a][i] = the sum over b and c of parts[b][a][c][i].
struct PartialsSum {
    const float* parts;
    void* result;
    int outer, middle, inner;  // of b, a, c
    int64_t size;              // of i
    bool wide;                 // the result is fp32
    int64_t first;             // block of threads
};

constexpr int PARTIALS_SUMS = 6;

template <class T>
struct PartialsGlobals {
    PartialsSum sums[PARTIALS_SUMS];
    int count;
};

template <class T, bool portable>
__global__ __launch_bounds__(LOLCATS_ROW_THREADS) void lolcats_reduce_partials_kernel(
    const __grid_constant__ PartialsGlobals<T> g) {
    if constexpr (!portable) arch::wait_for_dependencies();
    int own = 0;
    while (own + 1 < g.count && int64_t(blockIdx.x) >= g.sums[own + 1].first) ++own;
    const PartialsSum& s = g.sums[own];
    const int64_t at = (int64_t(blockIdx.x) - s.first) * LOLCATS_ROW_THREADS + threadIdx.x;
    if (at >= s.size * s.middle) return;
    const int64_t a = at / s.size, i = at % s.size;
    const int64_t step = int64_t(s.middle) * s.inner * s.size;
    const float* from = s.parts + a * s.inner * s.size + i;
    float sum = 0.0f;
    for (int c = 0; c < s.inner; ++c, from += s.size) {
        const float* next = from;
#pragma unroll 8
        for (int b = 0; b < s.outer; ++b, next += step) sum += arch::load_global(next);
    }
    if (s.wide)
        arch::store_global(static_cast<float*>(s.result) + at, sum);
    else
        arch::store_global(static_cast<T*>(s.result) + at, convert<T>(sum));
}

template <DType dtype, bool portable>
void launch_lolcats_reduce_partials(const LolcatsBackwardParams& params,
                                    const LolcatsBackwardWorkspace& w, Stream stream) {
    using T = std::conditional_t<dtype == DType::bf16, bf16, half>;
    const LolcatsProblem& p = params.forward.problem;
    const int64_t batch_heads = p.batch * p.heads, segments = params.forward.segments;
    const int64_t map = p.head_dim * p.features;
    PartialsGlobals<T> globals{};
    int64_t blocks = 0;
    const auto add = [&](const float* parts, void* result, int64_t outer, int64_t middle,
                         int64_t inner, int64_t size, bool wide) {
        if (result == nullptr) return;
        globals.sums[globals.count++] = {parts,      result, int(outer), int(middle),
                                         int(inner), size,   wide,       blocks};
        blocks += (middle * size + LOLCATS_ROW_THREADS - 1) / LOLCATS_ROW_THREADS;
    };
    const int64_t groups = p.batch * p.kv_heads, rows = p.length * p.head_dim;
    if (w.dk_partials != nullptr) {
        const int64_t shared = p.heads / p.kv_heads;
        add(w.dk_partials, const_cast<void*>(params.dk.data), 1, groups, shared, rows, false);
        add(w.dv_partials, const_cast<void*>(params.dv.data), 1, groups, shared, rows, false);
    }
    const float* key_maps = w.map_partials + batch_heads * params.map_splits * map;
    add(w.map_partials, params.dq_map, p.batch, p.heads, params.map_splits, map, false);
    add(key_maps, params.dk_map, p.batch, p.heads, params.map_splits, map, false);
    add(w.factor_partials, params.grad_alpha, p.batch, p.heads, segments, 1, true);
    const float* betas = portable ? w.beta_partials : w.factor_partials + batch_heads * segments;
    add(betas, params.grad_beta, p.batch, p.heads, portable ? chunks_of(p) : segments, 1, true);
    if (blocks == 0) return;
    kittens::launch({.dependent = !portable}, lolcats_reduce_partials_kernel<T, portable>,
                    dim3(unsigned(blocks)), dim3(LOLCATS_ROW_THREADS), dim3(1), 0, stream, globals);
}

}  // namespace thunderkittens::linear_attention
