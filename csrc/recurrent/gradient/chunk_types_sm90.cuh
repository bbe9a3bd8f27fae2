// What the roles of the chunks' gradient share: operands, shared memory, and the tiles of work. A
// tile is a chunk of a group's heads, or of a share of them; a step is 64 columns of the values of
// one head.
#pragma once

#include "csrc/recurrent/gradient/states_sm90.cuh"

namespace thunderkittens::recurrent {

constexpr int GRADIENT_CHUNK_THREADS = 3 * WARPGROUP_THREADS;
constexpr int LOADER_ROLE = 0, STATE_ROLE = 1;  // 2: pairs
// Of 504 together: three times what a thread begins with.
constexpr int LOADER_REGISTERS = 40, STATE_REGISTERS = 240, PAIR_REGISTERS = 224;
// Named barriers.
constexpr int STATE_BARRIER = 1, PAIR_BARRIER = 2, DECAY_BARRIER = 3;

template <class K>
struct ChunkGlobals {
    Rows<typename K::key_tile> q, k, dq, dk;
    Rows<typename K::value_tile> v, grad_out, dv;
    TokenNumbers gates;
    typename K::state_layout before, after;
    const SlotTokens* table;
    HeadOperand skip;
    const float* units;
    float *tokens, *skip_partials, *partial;
    int slots, heads, groups, slices, splits, value_dim, tiles;
    float scale;
};

template <class K>
struct ChunkShared {
    static constexpr int key_stages = 2, stages = K::key_dim == 128 ? 2 : 3;
    struct Keys {
        typename K::key_tile q, k;  // in the end dq and dk
    } keys[key_stages];
    struct Step {
        typename K::state_tile before, after;
        typename K::value_tile v, grad_out;
    } steps[stages];
    typename K::value_tile dv[2];
    st<typename K::T, CHUNK, CHUNK> pairs;  // of a tile the sum of W^T over its heads
    TokenVector gates[stages];
    // Of the tokens, what their decay takes part in: as a query of the keys of each warp, and of
    // the state before; as a key, of the queries, and of the state behind. And the gradient of
    // their weight.
    struct Sums {
        sv<float, CHUNK * WARPGROUP_WARPS> queries;
        sv<float, CHUNK> state, keys, behind, weight;
    } sums[stages];
    sv<float, 4> state_products;  // of the second half, by turns
    sv<float, 8> units;           // of the states before and after, by stage
    sv<float, 4> skips;           // of the head, by stage; 0 where columns have their own
    semaphore keys_full[key_stages], keys_empty[key_stages];
    semaphore full[stages], empty[stages], sums_full[stages], pairs_full, pairs_empty;

    __device__ __forceinline__ void init() {
        for (int s = 0; s < key_stages; ++s) {
            init_semaphore(keys_full[s], 1);
            init_semaphore(keys_empty[s], 1);
        }
        for (int s = 0; s < stages; ++s) {
            init_semaphore(full[s], 1);
            init_semaphore(empty[s], 2 * WARPGROUP_WARPS + 3);
            init_semaphore(sums_full[s], 2 * WARPGROUP_WARPS);
        }
        init_semaphore(pairs_full, 1);
        init_semaphore(pairs_empty, 1);
        arch::mbarrier_init_fence();
    }
};

// Calls f(tile) for the tiles of this block that have tokens.
struct ChunkTile {
    SlotTokens at;
    int slot, group, split;
    int first_head, end_head;

    template <class Globals>
    __device__ __forceinline__ ChunkTile(const Globals& g, int index) {
        split = index % g.splits;
        group = index / g.splits % g.groups;
        slot = index / g.splits / g.groups;
        at = load_slot(g.table, slot);
        const int heads = g.heads / g.groups;
        first_head = group * heads + split * heads / g.splits;
        end_head = group * heads + (split + 1) * heads / g.splits;
    }
};
template <class Globals, class F>
__device__ __forceinline__ void for_each_tile(const Globals& g, F f) {
#pragma unroll 1
    for (int index = int(blockIdx.x); index < g.tiles; index += int(gridDim.x)) {
        const ChunkTile tile(g, index);
        if (tile.at.sequence >= 0) f(tile);
    }
}
// Calls f(head, slice) for the steps of a tile.
template <class Globals, class F>
__device__ __forceinline__ void for_each_step(const Globals& g, const ChunkTile& tile, F f) {
#pragma unroll 1
    for (int head = tile.first_head; head < tile.end_head; ++head) {
#pragma unroll 1
        for (int slice = 0; slice < g.slices; ++slice) f(head, slice);
    }
}

// By one thread.
template <class K>
__device__ __forceinline__ void load_chunks(const ChunkGlobals<K>& g, ChunkShared<K>& shared) {
    pipeline_state<ChunkShared<K>::key_stages> key_at;
    pipeline_state<ChunkShared<K>::stages> at;
    for_each_tile(g, [&](const ChunkTile& tile) {
        wait(shared.keys_empty[key_at.stage], key_at.phase ^ 1);
        auto& keys = shared.keys[key_at.stage];
        tma::expect(shared.keys_full[key_at.stage], keys.q, keys.k);
        load_rows(keys.q, g.q, tile.at, tile.group, 0, shared.keys_full[key_at.stage]);
        load_rows(keys.k, g.k, tile.at, tile.group, 0, shared.keys_full[key_at.stage]);
        key_at.advance();
        for_each_step(g, tile, [&](int head, int slice) {
            const int token_row = tile.slot * g.heads + head, state = token_row * g.slices + slice;
            float2 units = {1.0f, 1.0f};
            if constexpr (K::in_units)
                units = arch::load_global(reinterpret_cast<const float2*>(g.units) + state);
            const float skip = g.skip.column_stride == 0 ? load_head(g.skip, head, 0, 0.0f) : 0.0f;
            wait(shared.empty[at.stage], at.phase ^ 1);
            auto& step = shared.steps[at.stage];
            semaphore& full = shared.full[at.stage];
            if constexpr (K::in_units)
                arch::store_shared(shared.units.address_of(2 * at.stage), units);
            shared.skips.set(at.stage, skip);
            tma::expect(full, step.before, step.after, step.v, step.grad_out,
                        shared.gates[at.stage]);
            load_rows(step.v, g.v, tile.at, head, slice * VALUES, full);
            load_rows(step.grad_out, g.grad_out, tile.at, head, slice * VALUES, full);
            tma::load_async(shared.gates[at.stage], g.gates, {0, 0, token_row, 0}, full);
            tma::load_async(step.before, g.before, {state, 0, 0}, full);
            tma::load_async(step.after, g.after, {state, 0, 0}, full);
            at.advance();
        });
    });
}

// What the copies of the states have been divided by, of the state after the chunk or before.
template <class K>
__device__ __forceinline__ float unit_of(const ChunkShared<K>& shared, int stage, bool after) {
    return K::in_units ? shared.units.get(2 * stage + after) : 1.0f;
}

// By each warp of a role, when all its reads of the stage are done.
__device__ __forceinline__ void write_rows(const sv<float, CHUNK>& to, float2 rows) {
    if (laneid() % 4 == 0) {
        arch::store_shared(to.address_of(lane_row()), rows.x);
        arch::store_shared(to.address_of(lane_row() + 8), rows.y);
    }
}
__device__ __forceinline__ float2 quad_sums(float2 x) { return {quad_sum(x.x), quad_sum(x.y)}; }
__device__ __forceinline__ float2 row_pair(const TokenVector& x, int first = 0) {
    return {x.get(first + lane_row()), x.get(first + lane_row() + 8)};
}

// The lane's parts of the products of its rows.
template <class T, class Operand, class Accumulator>
__device__ __forceinline__ float2 row_products(const Operand& a, const Accumulator& b) {
    float2 sum = {0.0f, 0.0f};
#pragma unroll
    for (int j = 0; j < Accumulator::width; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 x = unpack_pair<T>(a.tiles[0][j].data[i]);
            const float2 y = b.tiles[0][j].data[i];
            float& s = i % 2 ? sum.y : sum.x;
            s = fmaf(x.x, y.x, fmaf(x.y, y.y, s));
        }
    }
    return sum;
}
// The gradients of q and k, accumulators: through the tiles that all have read, or to the partials.
// By all threads of a role.
template <class K>
__device__ __forceinline__ void store_key_gradients(const ChunkGlobals<K>& g,
                                                    typename ChunkShared<K>::Keys& through,
                                                    typename K::state& dq, typename K::state& dk,
                                                    const ChunkTile& tile) {
    if (g.partial != nullptr) {
        const auto store = [&](typename K::state& gradient, int which) {
            const int64_t part =
                ((int64_t(which) * g.splits + tile.split) * g.slots + tile.slot) * g.groups +
                tile.group;
            float* data = g.partial + part * (CHUNK * K::key_dim);
            for_each_pair(gradient, [&](const float2& pair, int row, int column) {
                arch::store_global(reinterpret_cast<float2*>(data + (row * K::key_dim + column)),
                                   pair);
            });
        };
        store(dq, 0);
        store(dk, 1);
        return;
    }
    warpgroup::store(through.q, dq);
    warpgroup::store(through.k, dk);
    arch::fence_async_shared();
    warpgroup::sync(STATE_BARRIER);
    if (warpgroup::laneid() == 0) {
        // Read again: kept, it would take registers all the while.
        const SlotTokens at = load_slot(g.table, tile.slot);
        store_rows(g.dq, through.q, at, tile.group, 0);
        store_rows(g.dk, through.k, at, tile.group, 0);
        tma::store_async_read_wait();
    }
}

}  // namespace thunderkittens::recurrent
