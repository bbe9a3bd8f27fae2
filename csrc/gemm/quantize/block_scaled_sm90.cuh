// What the kernels of the block-scaled formats share: the tile of a block, chunks of eight
// neighbours, their largest magnitude, scales on their way to memory.
//
// A block of 256 threads has a tile of 128 x 128 elements; a thread holds chunks of eight
// neighbours of eight consecutive rows, LANES lanes side by side in a row. All eight are loaded
// before the first is used: on an H200 that many bytes have to be on their way.
#pragma once

#include "csrc/gemm/common/chunk_sm90.cuh"
#include "csrc/gemm/common/raster.h"
#include "csrc/gemm/common/unaligned_rows_sm90.cuh"
#include "csrc/gemm/quantize/block_scaled.h"

namespace thunderkittens::block_scaled {
namespace sm90 {

constexpr int CHUNK_ROWS = 8;  // per thread
constexpr int ATOM = 512;      // bytes of scales: 128 rows of four

// How many blocks the registers of an SM are for.
template <int DTYPE>
constexpr int BLOCKS_PER_SM = DTYPE == int(DType::fp32) ? 2 : 3;

// Magnitudes are compared as the bits of their absolute values, which is right for numbers and puts
// NaN above infinity. A word holds one, or the two of a pair.
template <class T>
__device__ __forceinline__ uint32_t magnitudes(uint32_t word) {
    return word & (Chunk<T>::PAIRS ? 0x7fff7fffu : 0x7fffffffu);
}
template <class T>
__device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b) {
    return Chunk<T>::PAIRS ? arch::max_unsigned_pairs(a, b) : max(a, b);
}
// The magnitude of the element at position `half` of a word, as a float.
template <class T>
__device__ __forceinline__ float magnitude_value(uint32_t word, int half) {
    if constexpr (std::is_same_v<T, float>) {
        return bit_cast<float>(word);
    } else if constexpr (std::is_same_v<T, kittens::bf16>) {
        return bit_cast<float>(half == 0 ? word << 16 : word & 0xffff0000u);
    } else {
        const float2 pair = __half22float2(bit_cast<__half2>(word));
        return half == 0 ? pair.x : pair.y;
    }
}
// The largest magnitude of a word, in the low half of a word of pairs.
template <class T>
__device__ __forceinline__ uint32_t largest_of(uint32_t word) {
    return Chunk<T>::PAIRS ? max(word >> 16, word & 0xffffu) : word;
}
// The same of a chunk: of its words, and in the low half of one.
template <class T>
__device__ __forceinline__ uint32_t largest_word(const Chunk<T>& chunk) {
    uint32_t word = magnitudes<T>(chunk.words[0]);
#pragma unroll
    for (int i = 1; i < Chunk<T>::WORDS; ++i) {
        word = larger<T>(word, magnitudes<T>(chunk.words[i]));
    }
    return word;
}
template <class T>
__device__ __forceinline__ uint32_t largest_of(const Chunk<T>& chunk) {
    return largest_of<T>(largest_word(chunk));
}

// A tile, and the place of a thread's chunks in it.
struct Tile {
    int64_t batch, row, column;  // of its first element

    // Whether it has no edge, so that nothing has to be guarded.
    __device__ __forceinline__ bool whole(const Matrix& m) const {
        return row + TILE <= m.rows && column + TILE <= m.columns;
    }
};
__device__ __forceinline__ Tile tile_at(int index, int64_t rows, int64_t columns) {
    const int across = static_cast<int>((columns + TILE - 1) / TILE);
    const int down = static_cast<int>((rows + TILE - 1) / TILE);
    const int line = index / across;
    return {line / down, int64_t(line % down) * TILE, int64_t(index % across) * TILE};
}
__device__ __forceinline__ int tiles_of_matrix(int64_t rows, int64_t columns) {
    return static_cast<int>((rows + TILE - 1) / TILE * ((columns + TILE - 1) / TILE));
}
template <int LANES>
struct Place {
    static_assert(LANES == 8 || LANES == 16);
    int row, column;  // of the thread's first element in its tile

    // 16 lanes side by side take whole rows, and a warp 16 of them; 8 take half a row, and a warp
    // 32 of them.
    __device__ __forceinline__ Place() {
        const int warp = kittens::warpid(), lane = kittens::laneid();
        row = (LANES == 16 ? warp * 16 : warp / 2 * 32) + lane / LANES * CHUNK_ROWS;
        column = (LANES == 16 ? 0 : warp % 2 * 64) + lane % LANES * CHUNK;
    }
};

// Whether base and strides are multiples of 16 bytes.
template <class T>
__device__ __forceinline__ bool in_vectors(const Matrix& x) {
    const auto strides = static_cast<uint64_t>(x.row_stride | x.batch_stride) * sizeof(T);
    return (reinterpret_cast<uint64_t>(x.data) | strides) % 16 == 0;
}
// Addresses around all elements.
template <class T>
__device__ __forceinline__ gemm::sm90::Span span_of(const Matrix& x, int64_t row_elements) {
    const auto begin = reinterpret_cast<uint64_t>(x.data);
    const int64_t elements =
        (x.batch - 1) * x.batch_stride + (x.rows - 1) * x.row_stride + row_elements;
    return {begin, begin + static_cast<uint64_t>(elements) * sizeof(T)};
}

// The chunks of a thread, of rows that begin at any element; zeros past their ends.
template <int AT_ONCE = gemm::sm90::WINDOWS, class T, int LANES>
__device__ __forceinline__ void load_chunks(Chunk<T> (&chunks)[CHUNK_ROWS], const Matrix& x,
                                            const Tile& tile, const Place<LANES>& place) {
    const int64_t row = tile.row + place.row, column = tile.column + place.column;
    const int64_t first = tile.batch * x.batch_stride + row * x.row_stride + column;
    if (tile.whole(x) && in_vectors<T>(x)) {
        const T* at = static_cast<const T*>(x.data) + first;
#pragma unroll
        for (int i = 0; i < CHUNK_ROWS; ++i) chunks[i] = load_whole_chunk(at + i * x.row_stride);
        return;
    }
    const int64_t left = column < x.columns ? x.rows - row : 0;
    const int rows = static_cast<int>(min(left, int64_t{CHUNK_ROWS}));
    const int count = static_cast<int>(min(x.columns - column, int64_t{CHUNK})) * int{sizeof(T)};
    const gemm::sm90::Span span = span_of<T>(x, x.columns);
    const uint64_t at = span.begin + static_cast<uint64_t>(first) * sizeof(T);
    const uint64_t pitch = static_cast<uint64_t>(x.row_stride) * sizeof(T);
    gemm::sm90::load_unaligned<CHUNK * sizeof(T), sizeof(T), CHUNK_ROWS, AT_ONCE>(
        span, rows, [&](int i) { return at + i * pitch; }, [&](int) { return count; },
        [&](int i) -> auto& { return chunks[i].words; });
}

// Bytes of data from `at` on, as many as `count` says: whole words where those are aligned.
template <class Word>
__device__ __forceinline__ void store_bytes(uint8_t* at, const Word& word, bool aligned,
                                            int64_t count) {
    if (aligned && count >= int64_t{sizeof(Word)}) {
        arch::store_global(reinterpret_cast<Word*>(at), word);
        return;
    }
    struct Words {
        uint32_t word[sizeof(Word) / 4];
    };
    const auto words = bit_cast<Words>(word);
#pragma unroll
    for (int w = 0; w < int(sizeof(Word) / 4); ++w) {
#pragma unroll 1
        for (int i = 0; i < 4 && 4 * w + i < count; ++i) {
            arch::store_global(at + 4 * w + i, static_cast<uint8_t>(words.word[w] >> 8 * i));
        }
    }
}

// Bytes from `at` on, zeros where there are fewer.
template <class Word>
__device__ __forceinline__ Word load_bytes(const uint8_t* at, bool aligned, int64_t count) {
    constexpr int BYTES = sizeof(Word);
    if (aligned && count >= BYTES) {
        return arch::load_global_readonly(reinterpret_cast<const Word*>(at));
    }
    struct Bytes {
        uint8_t byte[BYTES] = {};
    } bytes;
#pragma unroll
    for (int i = 0; i < BYTES; ++i) {
        if (i < count) bytes.byte[i] = arch::load_global_readonly(at + i);
    }
    return bit_cast<Word>(bytes);
}

// Where the scale of a row and of a column of scales, both within an atom, lies in it.
__device__ __forceinline__ constexpr int place_in_atom(int row, int column) {
    return row % 32 * 16 + row / 32 * 4 + column;
}

// Atoms of scales, side by side, from shared memory to `scale`: the scales of a matrix of
// rows x `blocks` of them, from `row` and `block` on. Called by all threads. What lies past the end
// is zero in shared memory, and is written where the layout has room for it.
template <int ATOMS>
__device__ __forceinline__ void store_scales(uint8_t* scale, uint32_t shared, bool swizzle,
                                             int64_t batch, int64_t rows, int64_t blocks,
                                             int64_t row, int64_t block) {
    const int thread = static_cast<int>(threadIdx.x);
    if (swizzle) {
        const int64_t atoms = (blocks + 3) / 4, down = (rows + TILE - 1) / TILE;
        const int64_t first = (batch * down + row / TILE) * atoms + block / 4;
        if (thread < ATOMS * ATOM / 16 && block / 4 + thread / (ATOM / 16) < atoms) {
            const auto words = arch::load_shared<uint4>(shared + thread * 16);
            arch::store_global(reinterpret_cast<uint4*>(scale + first * ATOM) + thread, words);
        }
    } else if (thread < TILE && row + thread < rows) {
        uint8_t* at = scale + (batch * rows + row + thread) * blocks + block;
#pragma unroll
        for (int i = 0; i < ATOMS; ++i) {
            const auto word =
                arch::load_shared<uint32_t>(shared + i * ATOM + place_in_atom(thread, 0));
            store_bytes(at + 4 * i, word, blocks % 4 == 0, blocks - block - 4 * i);
        }
    }
}

// What a thread of a dequantiser has: codes of eight neighbours of eight consecutive rows, in a
// Word per row, and the scales of the blocks that they are in.
template <class Word>
struct Codes {
    Word word[CHUNK_ROWS];
    uint8_t scale[CHUNK_ROWS];
};
template <class Word, int BLOCK>
__device__ __forceinline__ Codes<Word> load_codes(const DequantizeParams& p, const Tile& tile,
                                                  int64_t row, int64_t column) {
    constexpr int BYTES = sizeof(Word);
    const Matrix& m = p.data;
    const int64_t place = column * BYTES / CHUNK;
    const auto* at = static_cast<const uint8_t*>(m.data) + tile.batch * m.batch_stride +
                     row * m.row_stride + place;
    const bool aligned =
        (reinterpret_cast<uintptr_t>(m.data) | m.batch_stride | m.row_stride) % BYTES == 0;
    const int64_t blocks = (m.columns + BLOCK - 1) / BLOCK, block = column / BLOCK;
    // Rows that are consecutive within 32 lie 16 bytes apart in an atom.
    int64_t step = blocks, first = (tile.batch * m.rows + row) * blocks + block;
    if (p.swizzle) {
        const int64_t atoms = (blocks + 3) / 4, down = (m.rows + TILE - 1) / TILE;
        const int64_t atom = (tile.batch * down + row / TILE) * atoms + block / 4;
        first = atom * ATOM + place_in_atom(static_cast<int>(row % TILE), int(block % 4));
        step = 16;
    }
    const auto* scale = static_cast<const uint8_t*>(p.scale) + first;
    Codes<Word> codes;
    if (tile.whole(m) && aligned) {
#pragma unroll
        for (int i = 0; i < CHUNK_ROWS; ++i) {
            codes.word[i] =
                arch::load_global_readonly(reinterpret_cast<const Word*>(at + i * m.row_stride));
        }
#pragma unroll
        for (int i = 0; i < CHUNK_ROWS; ++i) {
            codes.scale[i] = arch::load_global_readonly(scale + i * step);
        }
    } else {
        const int64_t count = m.columns * BYTES / CHUNK - place;
#pragma unroll
        for (int i = 0; i < CHUNK_ROWS; ++i) {
            const bool inside = row + i < m.rows && count > 0;
            codes.word[i] = load_bytes<Word>(at + i * m.row_stride, aligned, inside ? count : 0);
            codes.scale[i] = inside ? arch::load_global_readonly(scale + i * step) : uint8_t{0};
        }
    }
    return codes;
}

// Stores what `results(i, values)` says of row i of the eight of a thread, from `out` on.
template <class T, class Results>
__device__ __forceinline__ void store_rows(T* out, const Matrix& m, const Tile& tile, int64_t row,
                                           int64_t column, Results results) {
    const bool aligned = m.columns * int64_t{sizeof(T)} % 16 == 0;
    if (tile.whole(m) && aligned) {
#pragma unroll
        for (int i = 0; i < CHUNK_ROWS; ++i) {
            float values[CHUNK];
            results(i, values);
            const auto words = rounded<T>(values);
#pragma unroll
            for (int w = 0; w < int(sizeof(words) / 16); ++w) {
                arch::store_global(reinterpret_cast<uint4*>(out + i * m.columns) + w,
                                   words.words[w]);
            }
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < CHUNK_ROWS; ++i) {
        if (row + i >= m.rows) continue;
        float values[CHUNK];
        results(i, values);
        const auto words = rounded<T>(values);
#pragma unroll
        for (int w = 0; w < int(sizeof(words) / 16); ++w) {
            store_bytes(reinterpret_cast<uint8_t*>(out + i * m.columns) + 16 * w, words.words[w],
                        aligned, (m.columns - column) * int64_t{sizeof(T)} - 16 * w);
        }
    }
}

// How a dequantiser takes a matrix: chunks of eight in the order of the result in memory, so that
// what a warp stores are whole lines, wherever rows begin. Where rows are not of whole chunks,
// those of codes not of whole words, or offsets need more than 32 bits, `chunks` is 0, and a block
// takes a tile.
struct InOrder {
    gemm::Divisor per_row, rows;  // chunks of a row, rows of a matrix
    uint32_t chunks = 0;
    uint32_t row_stride = 0;                    // of codes, in bytes
    uint32_t blocks = 0;                        // scales of a row
    uint32_t atoms_across = 0, atoms_down = 0;  // of a matrix of them
};
template <int BLOCK>
InOrder in_order(const DequantizeParams& p, uint64_t word_bytes) {
    constexpr int64_t LIMIT = int64_t{1} << 31;
    const Matrix& m = p.data;
    const int64_t chunks = m.batch * m.rows * (m.columns / CHUNK);
    const int64_t blocks = (m.columns + BLOCK - 1) / BLOCK, across = (blocks + 3) / 4;
    const int64_t down = (m.rows + TILE - 1) / TILE;
    const auto strides = static_cast<uint64_t>(m.row_stride | m.batch_stride);
    const bool words = (reinterpret_cast<uint64_t>(m.data) | strides) % word_bytes == 0;
    if (m.columns % CHUNK != 0 || !words || chunks >= LIMIT || m.row_stride >= LIMIT ||
        m.batch * down * across * ATOM >= LIMIT) {
        return {};
    }
    return {.per_row = gemm::Divisor(static_cast<uint32_t>(m.columns / CHUNK)),
            .rows = gemm::Divisor(static_cast<uint32_t>(m.rows)),
            .chunks = static_cast<uint32_t>(chunks),
            .row_stride = static_cast<uint32_t>(m.row_stride),
            .blocks = static_cast<uint32_t>(blocks),
            .atoms_across = static_cast<uint32_t>(across),
            .atoms_down = static_cast<uint32_t>(down)};
}
inline int dequantize_blocks(const DequantizeParams& p, const InOrder& order) {
    constexpr uint32_t of_block = THREADS * CHUNK_ROWS;
    if (order.chunks > 0) return static_cast<int>((order.chunks - 1) / of_block + 1);
    return static_cast<int>(tiles(p.data.rows, p.data.columns, p.data.batch));
}

// Where the scale of a row and of a block of its columns lies.
__device__ __forceinline__ const uint8_t* scale_address(const DequantizeParams& p, int64_t batch,
                                                        int64_t row, int64_t block,
                                                        int64_t blocks) {
    int64_t at = (batch * p.data.rows + row) * blocks + block;
    if (p.swizzle) {
        const int64_t atoms = (blocks + 3) / 4, down = (p.data.rows + TILE - 1) / TILE;
        at = ((batch * down + row / TILE) * atoms + block / 4) * ATOM +
             place_in_atom(static_cast<int>(row % TILE), static_cast<int>(block % 4));
    }
    return static_cast<const uint8_t*>(p.scale) + at;
}

// values_of(codes, scale, batch, values) makes eight values of a Word of codes. Not all blocks are
// whole, but those that are must not be asked: ptxas would put off loads behind the question.
template <bool whole, class T, class Word, int BLOCK, class Values>
__device__ __forceinline__ void dequantize_in_order(const DequantizeParams& p, const InOrder& order,
                                                    Values values_of) {
    const Matrix& m = p.data;
    const uint32_t first = blockIdx.x * (THREADS * CHUNK_ROWS) + threadIdx.x;
    Word codes[CHUNK_ROWS];
    uint32_t scales[CHUNK_ROWS];
#pragma unroll
    for (int i = 0; i < CHUNK_ROWS; ++i) {
        const uint32_t at =
            whole ? first + i * THREADS : min(first + i * THREADS, order.chunks - 1);
        const uint32_t line = order.per_row.divide(at), batch = order.rows.divide(line);
        const uint32_t chunk = at - line * order.per_row.value;
        const uint32_t row = line - batch * order.rows.value;
        const auto* from = static_cast<const uint8_t*>(m.data) + batch * m.batch_stride +
                           (uint64_t{row} * order.row_stride + chunk * uint32_t{sizeof(Word)});
        codes[i] = arch::load_global_readonly(reinterpret_cast<const Word*>(from));
        const uint32_t block = chunk / (BLOCK / CHUNK);
        const uint32_t atom =
            (batch * order.atoms_down + row / TILE) * order.atoms_across + block / 4;
        const uint32_t scale = p.swizzle
                                   ? atom * ATOM + row % 32 * 16 + row % TILE / 32 * 4 + block % 4
                                   : line * order.blocks + block;
        scales[i] = arch::load_global_readonly(static_cast<const uint8_t*>(p.scale) + scale);
    }
#pragma unroll
    for (int i = 0; i < CHUNK_ROWS; ++i) {
        const uint32_t at = first + i * THREADS;
        if (!whole && at >= order.chunks) break;
        const uint32_t batch = order.rows.divide(order.per_row.divide(at));
        float values[CHUNK];
        values_of(codes[i], scales[i], int64_t{batch}, values);
        const auto words = rounded<T>(values);
        auto* to = reinterpret_cast<uint4*>(static_cast<T*>(p.out) + uint64_t{at} * CHUNK);
#pragma unroll
        for (int w = 0; w < int(sizeof(words) / 16); ++w)
            arch::store_global(to + w, words.words[w]);
    }
}

// The same of a tile, with codes from any byte on, and results to rows that begin at any element.
template <class T, class Word, int BLOCK, class Values>
__device__ __forceinline__ void dequantize_tile(const DequantizeParams& p, Values values_of) {
    struct Words {
        uint32_t word[sizeof(Word) / 4];
    };
    constexpr int BYTES = TILE * sizeof(T), ROWS = 32 / 16;  // of a warp at once
    struct Staged {
        uint4 rows[THREADS / 32][ROWS][BYTES / 16];
    };
    const Matrix& m = p.data;
    const Tile tile = tile_at(static_cast<int>(blockIdx.x), m.rows, m.columns);
    const Place<16> place;
    const int64_t row = tile.row + place.row, column = tile.column + place.column;
    const int64_t row_codes = m.columns * int64_t{sizeof(Word)} / CHUNK;
    const int64_t left = row_codes - column / CHUNK * int64_t{sizeof(Word)};
    const int rows = left > 0 ? static_cast<int>(min(m.rows - row, int64_t{CHUNK_ROWS})) : 0;
    const int count = static_cast<int>(min(left, int64_t{sizeof(Word)}));
    const gemm::sm90::Span span = span_of<uint8_t>(m, row_codes);
    const uint64_t at = span.begin + tile.batch * m.batch_stride + row * m.row_stride +
                        column / CHUNK * int64_t{sizeof(Word)};
    Words codes[CHUNK_ROWS];
    gemm::sm90::load_unaligned<sizeof(Word), 1, CHUNK_ROWS>(
        span, rows, [&](int i) { return at + i * m.row_stride; }, [&](int) { return count; },
        [&](int i) -> auto& { return codes[i].word; });
    const int64_t blocks = (m.columns + BLOCK - 1) / BLOCK;
    uint8_t scales[CHUNK_ROWS] = {};
#pragma unroll
    for (int i = 0; i < CHUNK_ROWS; ++i) {
        if (i >= rows) continue;
        scales[i] = arch::load_global_readonly(
            scale_address(p, tile.batch, row + i, column / BLOCK, blocks));
    }
    const uint32_t staged =
        arch::shared_address(&arch::static_shared<Staged>().rows[kittens::warpid()][0][0]);
    const int half = kittens::laneid() / 16;
    auto* out = reinterpret_cast<uint8_t*>(
        static_cast<T*>(p.out) + ((tile.batch * m.rows + tile.row) * m.columns + tile.column));
    const int64_t pitch = m.columns * int64_t{sizeof(T)};
#pragma unroll
    for (int i = 0; i < CHUNK_ROWS; ++i) {
        float values[CHUNK];
        values_of(bit_cast<Word>(codes[i]), uint32_t{scales[i]}, tile.batch, values);
        const auto words = rounded<T>(values);
        arch::sync_warp();
#pragma unroll
        for (int w = 0; w < int(sizeof(words) / 16); ++w) {
            arch::store_shared(staged + half * BYTES + place.column * int(sizeof(T)) + 16 * w,
                               words.words[w]);
        }
        // Rows i and i + 8 of the warp's 16.
        const int64_t first = place.row / 16 * 16 + i;
        gemm::sm90::store_unaligned_rows<BYTES, ROWS>(
            out + first * pitch, CHUNK_ROWS * pitch,
            (m.rows - tile.row - first + CHUNK_ROWS - 1) / CHUNK_ROWS,
            (m.columns - tile.column) * int64_t{sizeof(T)}, staged);
    }
}
template <class T, class Word, int BLOCK, class Values>
__device__ __forceinline__ void dequantize(const DequantizeParams& p, const InOrder& order,
                                           Values values_of) {
    if (order.chunks > 0) {
        if ((blockIdx.x + 1) * uint32_t{THREADS * CHUNK_ROWS} <= order.chunks) {
            dequantize_in_order<true, T, Word, BLOCK>(p, order, values_of);
        } else {
            dequantize_in_order<false, T, Word, BLOCK>(p, order, values_of);
        }
    } else {
        dequantize_tile<T, Word, BLOCK>(p, values_of);
    }
}

inline int tile_blocks(const Matrix& x) {
    return static_cast<int>(tiles(x.rows, x.columns, x.batch));
}

}  // namespace sm90
}  // namespace thunderkittens::block_scaled
