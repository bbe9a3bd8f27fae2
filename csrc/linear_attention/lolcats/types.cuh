// What the kernels of LoLCATS share: the tiles, which chunks of tokens a block works on, and how
// its keys and values are loaded.
#pragma once

#include "csrc/linear_attention/based/segments.cuh"
#include "csrc/linear_attention/common/fragment.cuh"
#include "csrc/linear_attention/lolcats/lolcats.h"
#include "kittens/kittens.cuh"
#include "kittens/pipeline/ring.cuh"

namespace thunderkittens::linear_attention {

using namespace kittens;

constexpr float LOG2_E = 1.44269504f;

template <DType _dtype, int _head_dim, int _features>
struct LolcatsKernel {
    using T = std::conditional_t<_dtype == DType::bf16, bf16, half>;
    static constexpr int head_dim = _head_dim, features = _features;
    static constexpr int groups = 2 * features / 64;  // of 64 features
    using token_tile = st<T, CHUNK, head_dim>;
    using map_tile = st<T, head_dim, features>;
    using feature_tile = st<T, CHUNK, 64>;
    using state_tile = st<T, 64, head_dim>;
    using token_layout = gl<T, -1, -1, -1, head_dim, token_tile>;
    using map_layout = gl<T, 1, -1, head_dim, features, map_tile>;
    using projection = rt_fl<16, features>;
    // 64 tokens: softmax(x W), then softmax(-x W).
    struct Features {
        rt<T, 16, 64> groups[LolcatsKernel::groups];
    };
};

template <class Layout>
Layout token_layout_of(const Operand& x, const LolcatsProblem& p, int64_t heads, int64_t rows) {
    using T = typename Layout::T;
    return Layout(static_cast<T*>(const_cast<void*>(x.data)), p.batch, heads, rows, nullptr,
                  gl_strides{x.batch_stride, x.head_stride, x.row_stride});
}
template <class Layout>
Layout map_layout_of(const Operand& x, int64_t heads) {
    using T = typename Layout::T;
    return Layout(static_cast<T*>(const_cast<void*>(x.data)), nullptr, heads, nullptr, nullptr,
                  gl_strides{0, x.head_stride, x.row_stride});
}
inline Operand first_rows_operand(const void* data, const LolcatsProblem& p) {
    return {data, p.kv_heads * CACHE * p.head_dim, CACHE * p.head_dim, p.head_dim};
}

// The tokens of a sequence that an op sees: those in the caches, and the new ones.
struct Terrace {
    int before;  // tokens of the sequence before the new ones
    int cached;  // of these, in the caches
    int tokens;  // cached and new

    __device__ __forceinline__ Terrace(const int* lengths, int b, int length) {
        before = lengths == nullptr ? 0 : arch::load_global_readonly(lengths + b);
        cached = before < WINDOW ? before : WINDOW + before % WINDOW;
        tokens = cached + length;
    }
    __device__ __forceinline__ int chunks() const { return (tokens + CHUNK - 1) / CHUNK; }
    // Chunks whose keys the state after the last token has.
    __device__ __forceinline__ int folded() const { return ::max(tokens / CHUNK - 1, 0); }
    // Row of a chunk's first token among the new ones, negative in the caches.
    __device__ __forceinline__ int row(int chunk) const { return chunk * CHUNK - cached; }
};

// The part of a call that a block works on: the chunks [begin, end) of one head.
struct LolcatsWorkTile {
    int b, head, batch_head, segment;
    Terrace terrace;
    int begin, end;

    __device__ __forceinline__ LolcatsWorkTile(int batch_head, int segment, int heads, int segments,
                                               const int* lengths, int length)
        : b(batch_head / heads),
          head(batch_head % heads),
          batch_head(batch_head),
          segment(segment),
          terrace(lengths, b, length) {
        const int chunks = terrace.chunks(), share = (chunks + segments - 1) / segments;
        begin = ::min(segment * share, chunks);
        end = ::min(begin + share, chunks);
    }
    __device__ __forceinline__ LolcatsWorkTile(int index, int heads, int segments,
                                               const int* lengths, int length)
        : LolcatsWorkTile(index / segments, index % segments, heads, segments, lengths, length) {}
    __device__ __forceinline__ bool last() const { return begin < end && end == terrace.chunks(); }
};

// Keys and values, whose first two chunks are elsewhere when there is an initial state.
template <class K>
struct KeysAndValues {
    typename K::token_layout k, v, first_k, first_v;
    int group;

    KeysAndValues(const LolcatsParams& params, const LolcatsWorkspace& w)
        : k(token_layout_of<typename K::token_layout>(
              params.k, params.problem, params.problem.kv_heads, params.problem.length)),
          v(token_layout_of<typename K::token_layout>(
              params.v, params.problem, params.problem.kv_heads, params.problem.length)),
          first_k(first(w.first_keys, params.problem, params.k)),
          first_v(first(w.first_values, params.problem, params.v)),
          group(int(params.problem.heads / params.problem.kv_heads)) {}

    // By one thread.
    template <class Tile>
    __device__ __forceinline__ void load(Tile& to_k, Tile& to_v, const LolcatsWorkTile& work,
                                         int chunk, bool continued, semaphore& full) const {
        const int head = work.head / group;
        tma::expect(full, to_k, to_v);
        if (continued && chunk < CACHE / CHUNK) {
            const auto at = elements(work.b, head, chunk * CHUNK, 0);
            tma::load_async(to_k, first_k, at, full);
            tma::load_async(to_v, first_v, at, full);
        } else {
            const auto at = elements(work.b, head, work.terrace.row(chunk), 0);
            tma::load_async(to_k, k, at, full);
            tma::load_async(to_v, v, at, full);
        }
    }

  private:
    // A tensor map needs an address, also where nothing is read through it.
    static typename K::token_layout first(const void* rows, const LolcatsProblem& p,
                                          const Operand& otherwise) {
        if (rows == nullptr)
            return token_layout_of<typename K::token_layout>(otherwise, p, p.kv_heads, p.length);
        return token_layout_of<typename K::token_layout>(first_rows_operand(rows, p), p, p.kv_heads,
                                                         CACHE);
    }
};

// Where a lane names the rows of 16 x 16 elements to ldmatrix and stmatrix, in a tile of rows of
// 128 bytes: one address for all columns, because columns change bits that nothing else does.
template <any_shared_tile Tile>
struct MatrixRows {
    static_assert(Tile::swizzle_bytes == 128 && sizeof(typename Tile::T) == 2);
    using T = typename Tile::T;
    uint32_t first;

    __device__ __forceinline__ MatrixRows(const Tile& tile, int row)
        : first(kittens::detail::matrix_row_address<typename rt<T, 16, 16>::base>(tile, row, 0)) {}
    // Of columns from 16 j on, `ahead` bytes behind the tile.
    __device__ __forceinline__ uint32_t at(int j, int ahead) const {
        return (first ^ uint32_t(32 * (j % 4))) + uint32_t(j / 4 * Tile::stripe_bytes + ahead);
    }
    __device__ __forceinline__ void store(int j, const packed_type<T> (&data)[4],
                                          int ahead = 0) const {
        arch::store_matrix_x4(at(j, ahead), arch::bit_cast<uint32_t>(data[0]),
                              arch::bit_cast<uint32_t>(data[1]), arch::bit_cast<uint32_t>(data[2]),
                              arch::bit_cast<uint32_t>(data[3]));
    }
    // An accumulator of a warp, rounded.
    template <any_register_tile Accumulator>
    __device__ __forceinline__ void store(const Accumulator& tile, float factor = 1.0f,
                                          int ahead = 0) const {
#pragma unroll
        for (int j = 0; j < Accumulator::width; ++j) {
            packed_type<T> part[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 pair = tile.tiles[0][j].data[i];
                part[i] = pack_pair<T>(factor * pair.x, factor * pair.y);
            }
            store(j, part, ahead);
        }
    }
};

}  // namespace thunderkittens::linear_attention
