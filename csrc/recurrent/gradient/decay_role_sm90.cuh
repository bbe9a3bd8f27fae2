// What two warps and a third do beside the roles of the chunks' gradient. The two make the
// gradients of the log decay g_t and of the weight of each token from the roles' sums:
//   dg_t = sum over i >= t of (row_i - column_i) + sum over j < t of behind_j + e^(c_64) <S, dS>
// in which pairs of tokens on the same side of t cancel in fp32, and nothing else does. The third
// makes the gradient of the skip, sums over the chunk's tokens of v dO.
#pragma once

#include "csrc/recurrent/gradient/chunk_types_sm90.cuh"

namespace thunderkittens::recurrent {

// The lane's part of <S, dS>, of one of so many parts of the tiles, whose elements lie alike.
template <class T, int parts = 2, class Tile>
__device__ __forceinline__ float state_product(const Tile& before, const Tile& after, int part) {
    constexpr int words = Tile::num_elements * int(sizeof(T)) / 16 / parts;
    const uint32_t first = uint32_t(16 * (part * words + laneid()));
    float sum[2] = {0.0f, 0.0f};
#pragma unroll 2
    for (int i = 0; i < words; i += WARP_THREADS) {
        const uint32_t at = first + uint32_t(16 * i);
        const auto a = arch::load_shared<uint4>(before.address() + at);
        const auto b = arch::load_shared<uint4>(after.address() + at);
        const auto add = [&](uint32_t x, uint32_t y) {
            const float2 u = unpack_pair<T>(arch::bit_cast<packed_type<T>>(x));
            const float2 v = unpack_pair<T>(arch::bit_cast<packed_type<T>>(y));
            sum[0] = fmaf(u.x, v.x, sum[0]);
            sum[1] = fmaf(u.y, v.y, sum[1]);
        };
        add(a.x, b.x);
        add(a.y, b.y);
        add(a.z, b.z);
        add(a.w, b.w);
    }
    return sum[0] + sum[1];
}

// The gradients of the log decays of a lane's two tokens, from sums of rows less those of columns,
// and of what is from the state behind.
__device__ __forceinline__ float2 decay_gradients(float2 pairs, float2 behind, float last,
                                                  float states) {
    // Sums over the lanes behind, and over those before, this one included.
    float after = pairs.x + pairs.y, until = behind.x + behind.y;
    const float own = after, own_behind = until;
#pragma unroll
    for (int d = 1; d < WARP_THREADS; d *= 2) {
        const float a = arch::shuffle(after, ::min(laneid() + d, WARP_THREADS - 1));
        const float u = arch::shuffle(until, ::max(laneid() - d, 0));
        if (laneid() + d < WARP_THREADS) after += a;
        if (laneid() >= d) until += u;
    }
    const float constant = arch::exp2_approx(last) * states;
    const float upper = until - own_behind + constant;
    return {after + upper, after - own + pairs.y + (upper + behind.x)};
}

// By two warps, `half` 0 and 1.
template <class K>
__device__ __forceinline__ void make_token_gradients(const ChunkGlobals<K>& g,
                                                     ChunkShared<K>& shared, int half) {
    using T = typename K::T;
    pipeline_state<ChunkShared<K>::stages> at;
    int turn = 0;
    float states = 0.0f;
    float2 pairs{}, behind{}, weight{};
    for_each_tile(g, [&](const ChunkTile& tile) {
        for_each_step(g, tile, [&](int head, int slice) {
            const auto& step = shared.steps[at.stage];
            if (slice == 0) {
                states = 0.0f;
                pairs = behind = weight = {0.0f, 0.0f};
            }
            wait(shared.full[at.stage], at.phase);
            const float last = shared.gates[at.stage].get(CHUNK - 1);
            const float unit = unit_of(shared, at.stage, false) * unit_of(shared, at.stage, true);
            states = fmaf(unit, state_product<T>(step.before, step.after, half), states);
            if (half == 0) {
                wait(shared.sums_full[at.stage], at.phase);
                const auto& sums = shared.sums[at.stage];
                const auto pair = [](const sv<float, CHUNK>& x) {
                    return arch::load_shared<float2>(x.address_of(2 * laneid()));
                };
                const float2 keys = pair(sums.keys);
                const float2 b = pair(sums.behind), w = pair(sums.weight);
                float2 row = pair(sums.state);
#pragma unroll
                for (int warp = 0; warp < WARPGROUP_WARPS; ++warp) {
                    const auto x = arch::load_shared<float2>(
                        sums.queries.address_of(CHUNK * warp + 2 * laneid()));
                    row = {row.x + x.x, row.y + x.y};
                }
                pairs = {pairs.x + (row.x - keys.x), pairs.y + (row.y - keys.y)};
                behind = {behind.x + b.x, behind.y + b.y};
                weight = {weight.x + w.x, weight.y + w.y};
            }
            signal_by_warp(shared.empty[at.stage]);
            at.advance();
            if (slice + 1 < g.slices) return;

            states = warp_sum(states);
            if (half == 1) {
                if (laneid() == 0) shared.state_products.set(turn, states);
                arch::named_barrier_sync(DECAY_BARRIER, 2 * WARP_THREADS);
            } else {
                arch::named_barrier_sync(DECAY_BARRIER, 2 * WARP_THREADS);
                states += shared.state_products.get(turn);
                const float2 decay = decay_gradients(pairs, behind, last, states);
                float* to =
                    g.tokens + (int64_t(tile.slot) * g.heads + head) * 2 * CHUNK + 2 * laneid();
                arch::store_global(reinterpret_cast<float2*>(to), decay);
                arch::store_global(reinterpret_cast<float2*>(to + CHUNK), weight);
            }
            turn ^= 1;
        });
    });
}

// By one warp: a lane has two columns.
template <class K>
__device__ __forceinline__ void make_skip_gradient(const ChunkGlobals<K>& g,
                                                   ChunkShared<K>& shared) {
    using T = typename K::T;
    pipeline_state<ChunkShared<K>::stages> at;
    for_each_tile(g, [&](const ChunkTile& tile) {
        for_each_step(g, tile, [&](int head, int slice) {
            const auto& step = shared.steps[at.stage];
            wait(shared.full[at.stage], at.phase);
            if (g.skip_partials != nullptr) {
                float2 sum = {0.0f, 0.0f};
#pragma unroll 4
                for (int row = 0; row < CHUNK; ++row) {
                    const auto pair = [&](const typename K::value_tile& tile) {
                        return unpack_pair<T>(
                            arch::load_shared<packed_type<T>>(tile.address_of(row, 2 * laneid())));
                    };
                    const float2 x = pair(step.v), y = pair(step.grad_out);
                    sum = {fmaf(x.x, y.x, sum.x), fmaf(x.y, y.y, sum.y)};
                }
                float* to = g.skip_partials +
                            ((int64_t(tile.slot) * g.heads + head) * g.slices + slice) * VALUES;
                arch::store_global(reinterpret_cast<float2*>(to) + laneid(), sum);
            }
            signal_by_warp(shared.empty[at.stage]);
            at.advance();
        });
    });
}

}  // namespace thunderkittens::recurrent
