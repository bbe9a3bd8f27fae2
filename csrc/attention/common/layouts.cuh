// How kernels reach q, k, v and the output in memory: dense batches through tensor maps of four
// dimensions, packed sequences through ragged ones, in which a tile ends with its sequence. One
// kernel serves both, and branches where it issues a transfer.
#pragma once

#include "csrc/attention/common/attention.h"
#include "kittens/kittens.cuh"

namespace thunderkittens::attention {

using namespace kittens;

// Rows that threads read and write themselves; those of packed sequences count over all tokens.
template <class T>
struct StridedRows {
    T* data;
    int64_t batch_stride, head_stride, row_stride;
    bool packed;

    StridedRows(const Operand& x, bool _packed)
        : data(static_cast<T*>(const_cast<void*>(x.data))),
          batch_stride(_packed ? 0 : x.batch_stride),
          head_stride(x.head_stride),
          row_stride(x.row_stride),
          packed(_packed) {}
    __device__ __forceinline__ T* at(int b, int head, int row, int column) const {
        return data + (b * batch_stride + head * head_stride + row * row_stride + column);
    }
};

template <class Tile>
struct Layout {
    using T = typename Tile::T;
    using Dense = gl<T, -1, -1, -1, -1, Tile>;
    using Ragged = ragged_gl<T, Tile>;

    bool packed;
    union {
        Dense dense;
        Ragged ragged;
    };

    // `length` counts the rows of a dense batch's sequence, or the tokens of all packed ones.
    Layout(const Operand& x, bool _packed, int64_t batch, int64_t heads, int64_t length,
           int64_t columns)
        : packed(_packed) {
        T* data = static_cast<T*>(const_cast<void*>(x.data));
        if (packed) {
            const auto rows = static_cast<int>(length > 0 ? length : 1);
            new (&ragged)
                Ragged(data, int(heads), rows, int(columns), {x.head_stride, x.row_stride});
        } else {
            new (&dense) Dense(data, batch, heads, length, columns,
                               {x.batch_stride, x.head_stride, x.row_stride});
        }
    }

    // Pages of a cache: segments of so many rows in all, of which a transfer moves `piece`.
    Layout(const Operand& x, int64_t heads, int64_t rows, int64_t columns, int piece)
        : packed(true) {
        T* data = static_cast<T*>(const_cast<void*>(x.data));
        new (&ragged)
            Ragged(data, int(heads), int(rows), int(columns), {x.head_stride, x.row_stride}, piece);
    }

    // The tile's rows are those of one sequence from `row` on; a packed one is the tokens
    // [begin, begin + length).
    __device__ __forceinline__ void load(Tile& tile, int b, int head, int begin, int length,
                                         int row, semaphore& arrived, int column = 0) const {
        if (packed)
            tma::load_async(tile, ragged, ragged_coord{head, begin, length, row, column}, arrived);
        else
            tma::load_async(tile, dense, elements(b, head, row, column), arrived);
    }
    // The same tile into all blocks of the cluster whose bit is set, at the same place.
    __device__ __forceinline__ void load_to_blocks(Tile& tile, int b, const ragged_coord& at,
                                                   semaphore& arrived, uint16_t blocks) const {
        if (packed) {
            tma::cluster::load_async(tile, ragged, at, arrived, blocks);
        } else {
            tma::cluster::load_async(tile, dense, elements(b, at.head, at.row, at.col), arrived,
                                     blocks);
        }
    }
    __device__ __forceinline__ void store(const Tile& tile, int b, int head, int begin, int length,
                                          int row, int column) const {
        if (packed)
            tma::store_async(ragged, tile, ragged_coord{head, begin, length, row, column});
        else
            tma::store_async(dense, tile, elements(b, head, row, column));
    }
    __device__ __forceinline__ T* at(int b, int head, int begin, int row, int column) const {
        return packed ? ragged.at(head, begin + row, column)
                      : dense.at(elements(b, head, row, column));
    }
    __device__ __forceinline__ int columns() const { return packed ? ragged.cols : dense.cols(); }
};

}  // namespace thunderkittens::attention
