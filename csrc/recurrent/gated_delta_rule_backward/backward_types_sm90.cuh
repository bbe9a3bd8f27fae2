// What the kernels of the gated delta rule's gradient share: tiles, where a chunk's tokens are, how
// tokens and the workspace are reached, and what is done to accumulators in registers.
#pragma once

#include "csrc/recurrent/gated_delta_rule/chunks.cuh"
#include "csrc/recurrent/gated_delta_rule_backward/backward.h"

namespace thunderkittens::recurrent::delta_gradient {

using namespace kittens;
using namespace delta_common;

// Rows of tokens: of a batch through tensor maps of four dimensions, of packed sequences through
// ragged ones, in which a tile ends with its sequence.
template <class Tile>
struct DeltaTokens {
    using T = typename Tile::T;
    using Dense = gl<T, -1, -1, -1, -1, Tile>;
    using Ragged = ragged_gl<T, Tile>;

    bool packed;
    union {
        Dense dense;
        Ragged ragged;
    };

    DeltaTokens(const DeltaRows& x, const DeltaRuleProblem& p, int64_t heads, int64_t columns)
        : packed(p.packed) {
        T* data = static_cast<T*>(const_cast<void*>(x.data));
        if (packed) {
            new (&ragged) Ragged(data, int(heads), int(p.length), int(columns),
                                 {x.head_stride, x.row_stride});
        } else {
            new (&dense) Dense(data, p.sequences, heads, p.length, columns,
                               {x.batch_stride, x.head_stride, x.row_stride});
        }
    }
    // By one thread.
    __device__ __forceinline__ void load(Tile& tile, const DeltaSequence& s, int head, int row,
                                         int column, semaphore& full) const {
        if (packed) {
            tma::load_async(tile, ragged, ragged_coord{head, s.begin, s.length, row, column}, full);
        } else {
            tma::load_async(tile, dense, elements(s.b, head, row, column), full);
        }
    }
    // The same to the blocks of the cluster whose bits are set; each has announced its bytes.
    __device__ __forceinline__ void load_shared(Tile& tile, const DeltaSequence& s, int head,
                                                int row, semaphore& full, uint16_t blocks) const {
        if (packed) {
            tma::cluster::load_async(tile, ragged, ragged_coord{head, s.begin, s.length, row, 0},
                                     full, blocks);
        } else {
            tma::cluster::load_async(tile, dense, elements(s.b, head, row, 0), full, blocks);
        }
    }
    // By one thread; rows behind the sequence are not stored.
    __device__ __forceinline__ void store(const Tile& tile, const DeltaSequence& s, int head,
                                          int row, int column) const {
        if (packed)
            tma::store_async(ragged, tile, ragged_coord{head, s.begin, s.length, row, column});
        else
            tma::store_async(dense, tile, elements(s.b, head, row, column));
    }
};

// ---- the workspace ----

// Tiles of 64 rows, one behind the other.
template <class Tile>
using tile_rows = gl<typename Tile::T, 1, 1, -1, Tile::cols, Tile>;
template <class Vector>
using vector_rows = gl<float, 1, 1, -1, Vector::length, Vector>;

template <class Tile>
tile_rows<Tile> tile_rows_of(const DeltaBackwardParams& params, int64_t offset, int64_t tiles) {
    return tile_rows<Tile>(reinterpret_cast<typename Tile::T*>(params.workspace + offset), nullptr,
                           nullptr, tiles * 64, nullptr);
}
template <class Vector>
vector_rows<Vector> vector_rows_of(const DeltaBackwardParams& params, int64_t offset,
                                   int64_t chunks) {
    return vector_rows<Vector>(reinterpret_cast<float*>(params.workspace + offset), nullptr,
                               nullptr, chunks, nullptr);
}
// Queries or keys as products take them: with l2_norm, those in the workspace.
inline DeltaRows delta_operand(const DeltaBackwardParams& params, const DeltaRows& given,
                               int64_t offset) {
    if (!params.forward.l2_norm) return given;
    const DeltaRuleProblem& p = params.forward.problem;
    return {params.workspace + offset, p.heads * p.length * p.key_dim, p.length * p.key_dim,
            p.key_dim};
}

__device__ __forceinline__ void signal(semaphore& s, int count = 1) {
    if (warpgroup::laneid() == 0) arrive(s, uint32_t(count));
}
// By each warp of a warpgroup, for what the warps have read or written on their own.
__device__ __forceinline__ void signal_by_warp(semaphore& s) {
    arch::sync_warp();
    if (laneid() == 0) arrive(s);
}

}  // namespace thunderkittens::recurrent::delta_gradient
