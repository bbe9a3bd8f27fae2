// What the backward kernels do to a warpgroup's tile of transposed scores, whose rows are keys and
// whose columns are the queries of a step: the queries' statistics, the mask, weights.
#pragma once

#include "csrc/attention/backward/backward_scheduler.cuh"
#include "csrc/attention/common/softmax.cuh"

namespace thunderkittens::attention {

// Calls f(x, its query's statistic) on every element.
template <any_register_tile Tile, class Rows, class F>
__device__ __forceinline__ void with_row_statistic(Tile& tile, const Rows& rows, F f) {
    const uint32_t address = rows.address_of(2 * (laneid() % 4));
#pragma unroll
    for (int j = 0; j < 2 * Tile::width; ++j) {
        const float2 pair = arch::load_shared<float2>(address + uint32_t(8 * j * sizeof(float)));
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            float2& x = tile.tiles[0][j / 2].data[2 * (j % 2) + k];
            f(x.x, pair.x);
            f(x.y, pair.y);
        }
    }
}

// Of a kernel: `first_key(work)` is the first of the warpgroup's keys.
template <class Kernel, class Globals>
struct Weights {
    using T = typename Kernel::T;
    using scores = rt_fl<16, Kernel::block_m>;
    using weights = rt<T, 16, Kernel::block_m>;
    // Far below every score, and its square is finite.
    static constexpr float HIDDEN = Kernel::score_mod ? -1e18f : -INFINITY;

    const Globals& g;
    float slope = 0;  // of ALiBi, for the head

    __device__ __forceinline__ void find_slope(const BackwardWorkTile& work, int head) {
        if constexpr (Kernel::score_mod) {
            if (g.score_mod.slopes == nullptr) return;
            slope =
                LOG2_E * arch::load_global_readonly(g.score_mod.slopes +
                                                    read(work.b) * g.score_mod.slopes_batch_stride +
                                                    read(work.head) * g.scheduler.group + head);
        }
    }

    // This thread's upper key; the lower one is 8 further on. Its first query in block m.
    static __device__ __forceinline__ int key(int first_key) {
        return first_key + 16 * warpgroup::warpid() + laneid() / 4;
    }
    static __device__ __forceinline__ int query(int m) {
        return m * Kernel::block_m + 2 * (laneid() % 4);
    }
    template <class FirstKey>
    static __device__ __forceinline__ void mask(scores& s, const BackwardWorkTile& work, int m,
                                                FirstKey first_key) {
        constexpr int nowhere = 1 << 30;
        const int k = key(first_key(work)), k_length = read(work.k_length);
        const int from = k - read(work.high) - query(m), to = k - read(work.low) - query(m);
        const Int2 first = {k < k_length ? from : nowhere, k + 8 < k_length ? from + 8 : nowhere};
        for_each_element(s, [&](float& x, int at, bool low) {
            if (at < (low ? first.y : first.x) || at > (low ? to + 8 : to)) x = HIDDEN;
        });
    }

    // Scores become weights, times the derivative of softcap. With score_mod p becomes rounded
    // weights without that; otherwise it is left alone.
    template <class Rows, class FirstKey>
    __device__ __forceinline__ void weigh(scores& s, weights& p, const BackwardWorkTile& work,
                                          int m, bool masked, const Rows& lse,
                                          FirstKey first_key) const {
        if constexpr (Kernel::score_mod) {
            const ScoreMod& score_mod = g.score_mod;
            const float cap = score_mod.scale_by_cap;
            if (cap > 0.0f) {
                for_each_element(s, [&](float& x, int, bool) { x = softcap_tanh<T>(x * cap); });
            }
            if (masked) mask(s, work, m, first_key);
            const float away =
                static_cast<float>(key(first_key(work)) - read(work.diagonal) - query(m));
            const float square = cap > 0.0f ? 1.0f : 0.0f;
            const uint32_t shifts = lse.address_of(2 * (laneid() % 4));
#pragma unroll
            for (int j = 0; j < 2 * scores::width; ++j) {
                const float2 shift =
                    arch::load_shared<float2>(shifts + uint32_t(8 * j * sizeof(float)));
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    float2& x = s.tiles[0][j / 2].data[2 * (j % 2) + k];
                    const float near = away + static_cast<float>(8 * k - 8 * j);
                    const float2 w = {weight(x.x, fabsf(near), shift.x),
                                      weight(x.y, fabsf(near - 1.0f), shift.y)};
                    p.tiles[0][j / 2].data[2 * (j % 2) + k] = pack_pair<T>(w.x, w.y);
                    x = {w.x * fmaf(-square * x.x, x.x, 1.0f),
                         w.y * fmaf(-square * x.y, x.y, 1.0f)};
                }
            }
        } else {
            if (masked) mask(s, work, m, first_key);
            with_row_statistic(s, lse, [&](float& x, float shift) {
                x = arch::exp2_approx(fmaf(x, g.scale_log2, -shift));
            });
        }
    }
    __device__ __forceinline__ float weight(float x, float distance, float shift) const {
        return arch::exp2_approx(fmaf(x, g.score_mod.unit_log2, -fmaf(slope, distance, shift)));
    }
};

}  // namespace thunderkittens::attention
