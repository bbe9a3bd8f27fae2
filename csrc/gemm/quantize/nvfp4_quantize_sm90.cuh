// NVFP4 on Hopper: elements e2m1, two per byte; 16 neighbours share an e4m3 scale, a matrix an fp32
// one. The arithmetic is, operation by operation in fp32, that of NVIDIA's Transformer Engine.
//
// Where the matrix's scale is to be found, one kernel writes the largest magnitude of what each of
// its blocks has read, and the quantiser, which follows it on the stream, begins with the largest
// of those. It takes the tiles in the opposite order, so that the last of what was read comes from
// L2. What it reads is not read again, and must not drive other lines out of L2: evict_first.
#pragma once

#include "csrc/gemm/quantize/nvfp4_values_sm90.cuh"

namespace thunderkittens::block_scaled {
namespace sm90 {

// The largest of what all threads of the block have.
struct MaximaShared {
    uint32_t word[THREADS / 32];
};
__device__ __forceinline__ uint32_t largest_of_block(uint32_t word) {
    const uint32_t shared = arch::shared_address(&arch::static_shared<MaximaShared>());
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        word = max(word, arch::shuffle_xor(word, distance));
    }
    if (kittens::laneid() == 0) arch::store_shared(shared + 4 * kittens::warpid(), word);
    arch::sync_block();
    for (int i = 0; i < THREADS / 32; ++i) {
        word = max(word, arch::load_shared<uint32_t>(shared + 4 * i));
    }
    return word;
}

template <int INPUT, bool PORTABLE>
__global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM<INPUT>)
    nvfp4_maxima_kernel(Nvfp4Params p) {
    using T = element_of<INPUT>;
    // All matrices in one dimension of the grid: the others end at 65535.
    const auto matrix = static_cast<int64_t>(blockIdx.x) / p.maxima_count;
    const int first = static_cast<int>(blockIdx.x) % p.maxima_count;
    const int count = tiles_of_matrix(p.x.rows, p.x.columns);
    const Place<16> place;
    uint32_t word = 0;
    for (int i = first; i < count; i += p.maxima_count) {
        Tile tile = tile_at(i, p.x.rows, p.x.columns);
        tile.batch = matrix;
        Chunk<T> chunks[CHUNK_ROWS];
        load_chunks(chunks, p.x, tile, place);
#pragma unroll
        for (int r = 0; r < CHUNK_ROWS; ++r) {
#pragma unroll
            for (int w = 0; w < Chunk<T>::WORDS; ++w) {
                word = larger<T>(word, magnitudes<T>(chunks[r].words[w]));
            }
        }
    }
    const float largest = magnitude_value<T>(largest_of_block(largest_of<T>(word)), 0);
    if (threadIdx.x == 0) {
        arch::store_global(static_cast<uint32_t*>(p.maxima) + blockIdx.x,
                           bit_cast<uint32_t>(largest));
    }
}

// The factor of the elements of a matrix. Called by all threads.
__device__ __forceinline__ Encode matrix_encode(const Nvfp4Params& p, int64_t matrix,
                                                bool writes_scale) {
    auto* result = static_cast<float*>(p.global_scale) + matrix;
    if (p.given_scale != nullptr) {
        const float given =
            arch::load_global_readonly(static_cast<const float*>(p.given_scale) + matrix);
        if (writes_scale && threadIdx.x == 0) arch::store_global(result, given);
        return encode_of_scale(given);
    }
    const auto* maxima = static_cast<const uint32_t*>(p.maxima) + matrix * p.maxima_count;
    uint32_t word = 0;
    for (int i = static_cast<int>(threadIdx.x); i < p.maxima_count; i += THREADS) {
        word = max(word, arch::load_global(maxima + i));
    }
    const float largest = bit_cast<float>(largest_of_block(word));
    if (writes_scale && threadIdx.x == 0) {
        arch::store_global(result, is_positive(largest) ? largest / NV_RANGE : 1.0f);
    }
    return encode_of_largest(largest);
}

struct Nvfp4Shared {
    uint4 scales[2 * ATOM / 16];
};
struct Nvfp4Codes {
    uint4 data[TILE * TILE / 2 / 16];
};

// The random words for rows 2 i and 2 i + 1 of a thread's chunks.
__device__ __forceinline__ uint4 random_of_rows(const Tile& tile, const Place<16>& place, int i,
                                                uint32_t keys) {
    return random_words(
        {static_cast<uint32_t>((tile.column + place.column) / CHUNK),
         static_cast<uint32_t>((tile.row + place.row) / 2) + i, static_cast<uint32_t>(tile.batch)},
        keys);
}

// The scales of the blocks that a thread's chunks lie in.
template <bool SQUARE, class T>
__device__ __forceinline__ void find_block_scales(const Chunk<T> (&chunks)[CHUNK_ROWS], float sixth,
                                                  uint32_t (&block)[CHUNK_ROWS]) {
    if constexpr (SQUARE) {
        uint32_t word = largest_word(chunks[0]);
#pragma unroll
        for (int i = 1; i < CHUNK_ROWS; ++i) word = larger<T>(word, largest_word(chunks[i]));
        word = largest_of<T>(word);
        word = max(word, arch::shuffle_xor(word, 1));
        word = max(word, arch::shuffle_xor(word, 16));
        const uint32_t square = block_scale(magnitude_value<T>(word, 0), sixth);
#pragma unroll
        for (int i = 0; i < CHUNK_ROWS; ++i) block[i] = square;
    } else {
        float largest[CHUNK_ROWS];
        largest_of_blocks(chunks, largest);
#pragma unroll
        for (int i = 0; i < CHUNK_ROWS; ++i) block[i] = block_scale(largest[i], sixth);
    }
}

// Codes and scales of a tile, of which a thread has `chunks`. `random_of(i)` are the random words
// of two rows; `factors` is a table in shared memory; `sixth` is a sixth of the matrix's factor.
template <bool SQUARE, bool STOCHASTIC, class T, class Random>
__device__ __forceinline__ void quantize_tile(const Nvfp4Params& p, const Tile& tile,
                                              const Place<16>& place,
                                              const Chunk<T> (&chunks)[CHUNK_ROWS],
                                              Random random_of, uint32_t factors, float sixth) {
    const int64_t row = tile.row + place.row, column = tile.column + place.column;
    const int rows = static_cast<int>(min(p.x.rows - row, int64_t{CHUNK_ROWS}));
    const bool whole = tile.whole(p.x);

    uint32_t block[CHUNK_ROWS];
    find_block_scales<SQUARE>(chunks, sixth, block);
    const uint32_t scales = arch::shared_address(&arch::static_shared<Nvfp4Shared>());
    // Consecutive rows of a thread lie 16 bytes apart in an atom.
    const uint32_t scale_at =
        scales + place.column / 64 * ATOM + place_in_atom(place.row, place.column % 64 / NV_BLOCK);
    if (kittens::laneid() % 2 == 0) {
#pragma unroll
        for (int i = 0; i < CHUNK_ROWS; ++i) {
            const bool inside = !SQUARE || i < rows;
            arch::store_shared(scale_at + 16 * i, static_cast<uint8_t>(inside ? block[i] : 0));
        }
    }
    const int64_t line = tile.batch * p.x.rows + row;
    uint32_t codes[CHUNK_ROWS];
    uint32_t least = block[0], most = block[0];
#pragma unroll
    for (int i = 1; i < (SQUARE ? 1 : CHUNK_ROWS); ++i) {
        least = min(least, block[i]);
        most = max(most, block[i]);
    }
    // As bytes, for the sake of registers.
    uint32_t packed[CHUNK_ROWS / 4];
#pragma unroll
    for (int i = 0; i < CHUNK_ROWS; i += 4) {
        packed[i / 4] = low_bytes(block[i], block[i + 1], block[i + 2], block[i + 3]);
    }
    const auto block_of = [&](int i) { return packed[i / 4] >> 8 * (i % 4) & 0xffu; };
    const auto factor_of = [&](int i) {
        return arch::load_shared<float>(factors + 4 * block_of(i));
    };
    if constexpr (STOCHASTIC) {
#pragma unroll
        for (int i = 0; i < CHUNK_ROWS; i += 2) {
            const uint4 random = random_of(i / 2);
            codes[i] = random_codes(chunks[i], factor_of(i) * PLACE_SCALE, random.x, random.y);
            codes[i + 1] =
                random_codes(chunks[i + 1], factor_of(i + 1) * PLACE_SCALE, random.z, random.w);
        }
    } else if (least >= 8 && most < 0x7e) {
        // A normal scale that is not the largest is rounded by a 16th at most: no element becomes
        // as large as 7.
#pragma unroll
        for (int i = 0; i < CHUNK_ROWS; ++i) {
            codes[i] = nearest_codes<false>(chunks[i], factor_of(i));
        }
    } else {
#pragma unroll
        for (int i = 0; i < CHUNK_ROWS; ++i) {
            codes[i] = nearest_codes<true>(chunks[i], factor_of(i));
        }
    }
    if (most == 0x7f) {
#pragma unroll
        for (int i = 0; i < CHUNK_ROWS; ++i) {
            if (block_of(i) == 0x7f) codes[i] = 0x77777777u;
        }
    }
    const int64_t pitch = p.x.columns / 2;
    auto* at = static_cast<uint8_t*>(p.data) + line * pitch + column / 2;
    const bool words = p.x.columns % 8 == 0;
    if (whole && words) {
#pragma unroll
        for (int i = 0; i < CHUNK_ROWS; ++i) {
            arch::store_global(reinterpret_cast<uint32_t*>(at + i * pitch), codes[i]);
        }
    } else if (words) {
#pragma unroll
        for (int i = 0; i < CHUNK_ROWS; ++i) {
            if (i < rows && column < p.x.columns) {
                arch::store_global(reinterpret_cast<uint32_t*>(at + i * pitch), codes[i]);
            }
        }
    } else {
        // Rows that begin at any byte: a warp stages its own.
        constexpr int BYTES = TILE / 2, ROWS = 2 * CHUNK_ROWS;
        const uint32_t staged = arch::shared_address(arch::static_shared<Nvfp4Codes>().data) +
                                kittens::warpid() * (ROWS * BYTES);
#pragma unroll
        for (int i = 0; i < CHUNK_ROWS; ++i) {
            arch::store_shared(staged + (place.row % ROWS + i) * BYTES + place.column / 2,
                               codes[i]);
        }
        const int64_t first = tile.row + place.row / ROWS * ROWS;
        gemm::sm90::store_unaligned_rows<BYTES, ROWS>(
            static_cast<uint8_t*>(p.data) +
                ((tile.batch * p.x.rows + first) * pitch + tile.column / 2),
            pitch, p.x.rows - first, pitch - tile.column / 2, staged);
    }
    arch::sync_block();
    store_scales<2>(static_cast<uint8_t*>(p.scale), scales, p.swizzle, tile.batch, p.x.rows,
                    (p.x.columns + NV_BLOCK - 1) / NV_BLOCK, tile.row, tile.column / NV_BLOCK);
}

// fp32, and 16-bit elements that TMA cannot read. Two blocks an SM have registers for all loads at
// once; stochastic rounding of square blocks leaves those of fp32 room for one.
template <int INPUT, bool SQUARE, bool STOCHASTIC>
constexpr int QUANTIZE_BLOCKS_PER_SM =
    INPUT == int(DType::fp32) && SQUARE && STOCHASTIC ? 1 : NVFP4_BLOCKS_PER_SM;
template <int INPUT, bool SQUARE, bool STOCHASTIC, bool PORTABLE>
__global__ void __launch_bounds__(THREADS, (QUANTIZE_BLOCKS_PER_SM<INPUT, SQUARE, STOCHASTIC>))
    nvfp4_quantize_kernel(Nvfp4Params p) {
    using T = element_of<INPUT>;
    const int last = static_cast<int>(gridDim.x) - 1;
    const Tile tile = tile_at(last - static_cast<int>(blockIdx.x), p.x.rows, p.x.columns);
    const Place<16> place;
    Chunk<T> chunks[CHUNK_ROWS];
    load_chunks<Chunk<T>::PAIRS ? CHUNK_ROWS : gemm::sm90::WINDOWS>(chunks, p.x, tile, place);
    uint32_t keys = 0;
    if constexpr (STOCHASTIC) {
        keys = make_keys(arch::load_global_readonly(static_cast<const uint2*>(p.seed)));
    }
    const Encode encode = matrix_encode(p, tile.batch, tile.row == 0 && tile.column == 0);
    const uint32_t factors = make_factors(encode);
    const auto random_of = [&](int i) {
        // One pair of rows at a time, for the sake of registers.
        arch::sync_warp();
        return random_of_rows(tile, place, i, keys);
    };
    quantize_tile<SQUARE, STOCHASTIC>(p, tile, place, chunks, random_of, factors,
                                      encode.factor * (1.0f / 6.0f));
}

// The same by blocks that stay, with a ring of tiles that TMA fills: what is on its way needs no
// registers, and does not end with the tile that a block works on.
template <int INPUT>
struct RingTypes {
    using T = element_of<INPUT>;
    using tile = kittens::st<T, TILE, TILE, false>;
    struct Shared {
        tile stages[NVFP4_STAGES];
        kittens::semaphore full[NVFP4_STAGES];
    };
    static_assert(sizeof(Shared) <= NVFP4_RING_BYTES, "block_scaled.h knows another size");
    struct Globals {
        kittens::gl<T, -1, 1, -1, -1, tile> x;
        Nvfp4Params params;
        int tiles;
    };
};

template <int INPUT, bool SQUARE, bool STOCHASTIC>
__global__ void __launch_bounds__(THREADS, NVFP4_BLOCKS_PER_SM)
    nvfp4_quantize_ring_kernel(const __grid_constant__ typename RingTypes<INPUT>::Globals g) {
    using R = RingTypes<INPUT>;
    using T = typename R::T;
    kittens::shared_allocator allocator(kittens::shared_memory());
    auto& shared = allocator.template allocate<typename R::Shared>();
    const Nvfp4Params& p = g.params;
    const auto tile_of = [&](int i) { return tile_at(g.tiles - 1 - i, p.x.rows, p.x.columns); };
    const int step = static_cast<int>(gridDim.x), first = static_cast<int>(blockIdx.x);
    const auto load = [&](int i, int slot) {
        if (i >= g.tiles) return;
        const Tile tile = tile_of(i);
        kittens::tma::expect(shared.full[slot], shared.stages[slot]);
        kittens::tma::load_async<2, kittens::tma::CachePolicy::evict_first>(
            shared.stages[slot], g.x,
            kittens::elements(int(tile.batch), 0, int(tile.row), int(tile.column)),
            shared.full[slot]);
    };
    if (threadIdx.x == 0) {
        for (int i = 0; i < NVFP4_STAGES; ++i) kittens::init_semaphore(shared.full[i], 1);
        arch::mbarrier_init_fence();
        for (int i = 0; i < NVFP4_STAGES; ++i) load(first + i * step, i);
    }
    uint32_t keys = 0;
    if constexpr (STOCHASTIC) {
        keys = make_keys(arch::load_global_readonly(static_cast<const uint2*>(p.seed)));
    }
    arch::sync_block();
    const Place<16> place;
    int64_t matrix = -1;
    uint32_t factors = 0;
    float sixth = 0;
    int slot = 0, phase = 0;
#pragma unroll 1
    for (int i = first; i < g.tiles; i += step) {
        const Tile tile = tile_of(i);
        const bool writes_scale = tile.row == 0 && tile.column == 0;
        if (tile.batch != matrix || writes_scale) {
            const Encode encode = matrix_encode(p, tile.batch, writes_scale);
            factors = make_factors(encode);
            sixth = encode.factor * (1.0f / 6.0f);
            matrix = tile.batch;
        }
        // The random numbers need no data, and are made while it comes.
        uint4 random[CHUNK_ROWS / 2]{};
        if constexpr (STOCHASTIC) {
#pragma unroll
            for (int j = 0; j < CHUNK_ROWS / 2; ++j) {
                random[j] = random_of_rows(tile, place, j, keys);
            }
        }
        kittens::wait(shared.full[slot], phase);
        Chunk<T> chunks[CHUNK_ROWS];
#pragma unroll
        for (int j = 0; j < CHUNK_ROWS; ++j) {
            const auto words = arch::load_shared<uint4>(
                shared.stages[slot].address_of(place.row + j, place.column));
            chunks[j].words[0] = words.x;
            chunks[j].words[1] = words.y;
            chunks[j].words[2] = words.z;
            chunks[j].words[3] = words.w;
        }
        // All have read their chunks, and the scales of the last tile.
        arch::sync_block();
        if (threadIdx.x == 0) load(i + NVFP4_STAGES * step, slot);
        if (++slot == NVFP4_STAGES) slot = 0, phase ^= 1;
        const auto random_of = [&](int j) { return random[j]; };
        quantize_tile<SQUARE, STOCHASTIC>(p, tile, place, chunks, random_of, factors, sixth);
    }
}

template <int OUT, bool PORTABLE>
__global__ void __launch_bounds__(THREADS, 4)
    nvfp4_dequantize_kernel(DequantizeParams p, InOrder order) {
    const auto global_of = [&](int64_t batch) {
        return arch::load_global_readonly(static_cast<const float*>(p.global_scale) + batch);
    };
    const float first = global_of(0);
    dequantize<element_of<OUT>, uint32_t, NV_BLOCK>(
        p, order, [&](uint32_t codes, uint32_t byte, int64_t batch, float(&values)[CHUNK]) {
            const float global = batch == 0 ? first : global_of(batch);
            const E2m1Values scaled = e2m1_values(codes);
            const float scale = e4m3_value(byte) * 0x1p14f;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                values[j] = scaled.pair[j].x * scale * global;
                values[j + 4] = scaled.pair[j].y * scale * global;
            }
        });
}

}  // namespace sm90

template <Nvfp4Quantize C>
void quantize(const Nvfp4Params& params, Stream stream) {
    if constexpr (in_ring(C)) {
        using R = sm90::RingTypes<int(C.dtype)>;
        const Matrix& x = params.x;
        const int tiles = sm90::tile_blocks(x);
        const typename R::Globals globals{
            .x = {static_cast<typename R::T*>(const_cast<void*>(x.data)), x.batch, nullptr, x.rows,
                  x.columns, kittens::gl_strides{x.batch_stride, 0, x.row_stride}},
            .params = params,
            .tiles = tiles,
        };
        kittens::launch(sm90::nvfp4_quantize_ring_kernel<int(C.dtype), C.square, C.stochastic>,
                        dim3(std::min(tiles, params.blocks)), dim3(THREADS), dim3(1),
                        NVFP4_RING_BYTES, stream, globals);
    } else {
        kittens::launch(
            sm90::nvfp4_quantize_kernel<int(C.dtype), C.square, C.stochastic, C.portable>,
            dim3(sm90::tile_blocks(params.x)), dim3(THREADS), dim3(1), 0, stream, params);
    }
}
template <DType dtype, bool portable>
void find_maxima(const Nvfp4Params& params, Stream stream) {
    kittens::launch(sm90::nvfp4_maxima_kernel<int(dtype), portable>,
                    dim3(static_cast<unsigned>(params.x.batch * params.maxima_count)),
                    dim3(THREADS), dim3(1), 0, stream, params);
}
template <Nvfp4Dequantize C>
void dequantize(const DequantizeParams& params, Stream stream) {
    const sm90::InOrder order = sm90::in_order<sm90::NV_BLOCK>(params, sizeof(uint32_t));
    kittens::launch(sm90::nvfp4_dequantize_kernel<int(C.dtype), C.portable>,
                    dim3(sm90::dequantize_blocks(params, order)), dim3(THREADS), dim3(1), 0, stream,
                    params, order);
}

}  // namespace thunderkittens::block_scaled
