// What the roles of the portable gradient of chunks share: operands, shared memory, copies, and the
// product with a state that both gradients of the keys' columns have.
#pragma once

#include "csrc/recurrent/gradient/decay_role_sm90.cuh"
#include "csrc/recurrent/gradient/states_sm80.cuh"

namespace thunderkittens::recurrent {
namespace sm80 {

constexpr int GRADIENT_CHUNK_THREADS = 2 * PORTABLE_THREADS;
constexpr int QUERY_BARRIER = 1;

struct ChunkGlobals {
    Operand q, k, dq, dk, v, grad_out, dv;
    const float* gates;
    const void *before, *after;
    const SlotTokens* table;
    HeadOperand skip;
    const float* units;
    float *tokens, *skip_partials, *partial;
    int slots, heads, groups, slices, splits, key_dim, value_dim;
    float scale;
    bool packed;
};

template <class K>
struct ChunkShared {
    // One stage of 128 keys leaves no room for another; the state before the chunk, which one role
    // reads, is then replaced first.
    static constexpr int stages = K::key_dim == 128 ? 1 : 2;
    typename K::key_tile q, k;
    struct Step {
        typename K::state_tile before, after;
        typename K::value_tile v, grad_out;
    } steps[stages];
    TokenVector gates[stages];
    // Of the tokens: sums over a row of what their decay takes part in, over a column, of what is
    // from the state behind; the gradient of their weight.
    struct Sums {
        sv<float, CHUNK> row, column, behind, weight;
    } sums;
    sv<float, WARPGROUP_WARPS * VALUES> skip;  // sums over 16 tokens each
    sv<float, WARPGROUP_WARPS> state_products;
    // Of the keys' role: the blocks of 16 x 16 that are not zero, as the lanes have them. A warp
    // reads its own. In registers they would be too many.
    sv<float, 10 * 256> scores;
    sv<float, 12> tile;  // where the chunk is, and which heads: integers
};

// What a block works on: a chunk and heads of a group, of which a step is 64 columns of one head.
template <class K>
struct ChunkWork {
    using T = typename K::T;
    using Step = typename ChunkShared<K>::Step;
    const ChunkGlobals& g;
    ChunkShared<K>& shared;

    // Kept in shared memory: in registers it would be all the while.
    __device__ __forceinline__ void keep(const ChunkTile& tile) const {
        const int b = g.packed ? 0 : tile.at.sequence;
        arch::store_shared(shared.tile.address(),
                           int4{b, tile.at.begin, tile.at.length, tile.at.chunk * CHUNK});
        arch::store_shared(shared.tile.address() + 16,
                           int4{tile.group, tile.split, tile.first_head, tile.end_head});
        arch::store_shared(shared.tile.address() + 32, tile.slot);
    }
    // b, begin and length of the sequence, first row of the chunk.
    __device__ __forceinline__ int4 place() const {
        return arch::load_shared<int4>(shared.tile.address());
    }
    // Group, split, first head and end of the heads.
    __device__ __forceinline__ int4 heads() const {
        return arch::load_shared<int4>(shared.tile.address() + 16);
    }
    __device__ __forceinline__ int slot() const {
        return arch::load_shared<int>(shared.tile.address() + 32);
    }
    // Of the chunk, the row so many behind its first.
    __device__ __forceinline__ T* address_of(const Operand& x, int head, int row,
                                             int column = 0) const {
        const int4 at = place();
        return address_in<T>(x, {0, at.x, at.y, at.z}, head, at.w + row, column);
    }
    __device__ __forceinline__ int tokens() const {
        const int4 at = place();
        return at.z - at.w;
    }
    __device__ __forceinline__ int64_t token_row(int head) const {
        return int64_t(slot()) * g.heads + head;
    }
    __device__ __forceinline__ int64_t state(int head, int slice) const {
        return token_row(head) * g.slices + slice;
    }
    // What the copy of the state before the chunk, and of that behind it, has been divided by.
    __device__ __forceinline__ float2 units(int head, int slice) const {
        if constexpr (!K::in_units) return {1.0f, 1.0f};
        return arch::load_global(reinterpret_cast<const float2*>(g.units) + state(head, slice));
    }

    template <class Tile>
    using block_copy = attention::TileCopy<Tile, GRADIENT_CHUNK_THREADS>;

    __device__ __forceinline__ void load_keys() const {
        using copy = block_copy<typename K::key_tile>;
        const int group = heads().x;
        copy::load(shared.q, address_of(g.q, group, 0), g.q.row_stride, tokens(), g.key_dim);
        copy::load(shared.k, address_of(g.k, group, 0), g.k.row_stride, tokens(), g.key_dim);
    }
    // By so many threads, the block's first ones.
    template <int threads>
    __device__ __forceinline__ void load_before(int stage, int head, int slice) const {
        attention::TileCopy<typename K::state_tile, threads>::load(
            shared.steps[stage].before,
            static_cast<const T*>(g.before) + state(head, slice) * (VALUES * K::key_dim),
            K::key_dim, VALUES, K::key_dim);
    }
    __device__ __forceinline__ void load_others(int stage, int head, int slice) const {
        Step& to = shared.steps[stage];
        using copy = block_copy<typename K::value_tile>;
        const int column = slice * VALUES;
        copy::load(to.v, address_of(g.v, head, 0, column), g.v.row_stride, tokens(),
                   g.value_dim - column);
        copy::load(to.grad_out, address_of(g.grad_out, head, 0, column), g.grad_out.row_stride,
                   tokens(), g.value_dim - column);
        block_copy<typename K::state_tile>::load(
            to.after, static_cast<const T*>(g.after) + state(head, slice) * (VALUES * K::key_dim),
            K::key_dim, VALUES, K::key_dim);
        if (own_warp() == 0) load_gates(shared.gates[stage], g.gates, token_row(head));
    }
};

// The rows of a role's warp as operands, blocks of 16 columns.
template <class T, int blocks, any_shared_tile Tile>
__device__ __forceinline__ void load_own_rows(operand_a<T> (&to)[blocks], const Tile& tile) {
    const a_walker<Tile> walker(tile, 16 * warpgroup::warpid(), 0);
#pragma unroll
    for (int j = 0; j < blocks; ++j) walker.load(to[j], 0, 16 * j, 0);
}
// Their products with 16 rows of another tile.
template <class T, int blocks, any_shared_tile Tile>
__device__ __forceinline__ void multiply_rows(rt_fl<16, 16>& products,
                                              const operand_a<T> (&rows)[blocks],
                                              const b_walker<Tile>& others, int block) {
    zero(products);
#pragma unroll
    for (int s = 0; s < blocks; ++s) {
        operand_b<T> b;
        others.load(b, 16 * block, 16 * s, 0);
        mma_operands(products, rows[s], b);
    }
}

// The lane's parts of the products of its two rows with an operand of the same rows.
template <class T>
__device__ __forceinline__ void add_row_products(float2& sum, const operand_a<T>& a,
                                                 const rt_fl<16, 16>& b) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 x = unpack_word<T>(a.words[i]), y = b.tiles[0][0].data[i];
        float& s = i % 2 ? sum.y : sum.x;
        s = fmaf(x.x, y.x, fmaf(x.y, y.y, s));
    }
}

// Adds factor times the product of rows of values and a state; returns the lane's parts of the
// products of what is added with the rows of q or k.
template <class K, class T = typename K::T>
__device__ __forceinline__ float2 add_from_state(typename K::state& sum,
                                                 const operand_a<T> (&rows)[VALUE_BLOCKS],
                                                 const typename K::state_tile& state,
                                                 const typename K::key_tile& keys, float2 factor) {
    const b_walker_of_rows<typename K::state_tile> columns(state, 0, 0);
    const a_walker<typename K::key_tile> own(keys, 16 * warpgroup::warpid(), 0);
    float2 products = {0.0f, 0.0f};
#pragma unroll
    for (int n = 0; n < K::key_dim / 16; ++n) {
        rt_fl<16, 16> part;
        zero(part);
#pragma unroll
        for (int s = 0; s < VALUE_BLOCKS; ++s) {
            operand_b<T> b;
            columns.load(b, 16 * s, 16 * n, 0);
            mma_operands(part, rows[s], b);
        }
        operand_a<T> x;
        own.load(x, 0, 16 * n, 0);
        add_row_products(products, x, part);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float f = i % 2 ? factor.y : factor.x;
            const float2 add = part.tiles[0][0].data[i];
            float2& to = sum.tiles[0][n].data[i];
            to = {fmaf(f, add.x, to.x), fmaf(f, add.y, to.y)};
        }
    }
    return {factor.x * products.x, factor.y * products.y};
}

// Adds the product of W, or of W^T, with k, or with q, and stores the gradient of q or k. Of the
// weights' blocks those from `first` on, before `end`, are not zero.
template <class K>
__device__ __forceinline__ void finish_keys(const ChunkWork<K>& work, typename K::state& gradient,
                                            const typename K::square& weights,
                                            const typename K::key_tile& keys, const Operand& to,
                                            int which, int first, int end) {
    using T = typename K::T;
    const ChunkGlobals& g = work.g;
    const b_walker_of_rows<typename K::key_tile> walker(keys, 0, 0);
#pragma unroll
    for (int j = 0; j < CHUNK_BLOCKS; ++j) {
        if (j < first || j >= end) continue;
        operand_a<T> a;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 pair = weights.tiles[0][j].data[i];
            a.words[i] = pack_word<T>({g.scale * pair.x, g.scale * pair.y});
        }
        add_tokens(gradient, a, walker, j);
    }
    const int4 heads = work.heads();
    if (g.partial != nullptr) {
        const int64_t part =
            ((int64_t(which) * g.splits + heads.y) * g.slots + work.slot()) * g.groups + heads.x;
        float* data = g.partial + part * (CHUNK * K::key_dim);
        for_each_pair(gradient, [&](const float2& pair, int row, int column) {
            arch::store_global(reinterpret_cast<float2*>(data + (row * K::key_dim + column)), pair);
        });
    } else {
        const int row = 16 * warpgroup::warpid();
        attention::store_rows<T>(gradient, work.address_of(to, heads.x, row), to.row_stride,
                                 work.tokens() - row, g.key_dim);
    }
}

}  // namespace sm80
}  // namespace thunderkittens::recurrent
