// MXFP8 on Hopper: 32 neighbours share a scale 2^(byte - 127); elements are e4m3 or e5m2.
//
// The quantiser reads x once. With `down` it also makes, of the same registers, the blocks along
// the rows: the eight rows of a thread and those of the lanes above and below it are such a block,
// and its codes are packed along the rows, so that eight of them are one word of the transposed
// tile. That tile passes through shared memory to leave in whole lines; so do codes along the
// columns where rows of them begin at any byte.
#pragma once

#include "csrc/gemm/common/fp8_codes_sm80.cuh"
#include "csrc/gemm/quantize/block_scaled_sm90.cuh"

namespace thunderkittens::block_scaled {
namespace sm90 {

constexpr int MX_BLOCK = 32;

template <int DATA>
struct Fp8 {
    static constexpr bool E4M3 = DATA == int(DType::e4m3);
    using Element = std::conditional_t<E4M3, kittens::fp8e4m3, kittens::fp8e5m2>;
    static constexpr float RECIPROCAL_OF_MAX = 1.0f / (E4M3 ? 448.0f : 57344.0f);
    static constexpr int MAX_EXPONENT = E4M3 ? 8 : 15;

    // The byte of the scale of a block with this largest magnitude. NaN has 255; infinity the
    // largest scale.
    static __device__ __forceinline__ uint32_t scale(float largest, bool floor) {
        const uint32_t given = bit_cast<uint32_t>(largest);
        if (floor) {
            const int byte = static_cast<int>(given >> 23) - MAX_EXPONENT;
            return given > 0x7f800000u    ? 255
                   : given == 0x7f800000u ? 254
                                          : static_cast<uint32_t>(max(byte, 0));
        }
        const uint32_t bits = bit_cast<uint32_t>(largest * RECIPROCAL_OF_MAX);
        return bits > 0x7f800000u  ? 255
               : bits <= 0x400000u ? 0
                                   : min((bits + 0x7fffffu) >> 23, 254u);
    }
    // Two codes, rounded to nearest even, saturated; the first in the low byte.
    static __device__ __forceinline__ uint32_t codes(float low, float high) {
        return gemm::sm80::fp8_codes<Element>(low, high);
    }
    static __device__ __forceinline__ float2 values(uint32_t codes) {
        return __half22float2(gemm::sm80::pair_of_fp8<Element>(codes));
    }
};

// 2^(127 - byte), by which a block is multiplied, and 2^(byte - 127), its scale.
__device__ __forceinline__ float inverse_of_scale(uint32_t byte) {
    const uint32_t bits = byte == 255 ? 0x7fc00000u : byte == 254 ? 0x400000u : (254 - byte) << 23;
    return bit_cast<float>(bits);
}
__device__ __forceinline__ float scale_of_byte(uint32_t byte) {
    return bit_cast<float>(byte == 255 ? 0x7fc00000u : byte == 0 ? 0x400000u : byte << 23);
}

struct Mxfp8Shared {
    uint4 scales[ATOM / 16];
};
struct Mxfp8SharedDown {
    uint4 scales[ATOM / 16];
};
struct StagedCodes {
    uint4 data[TILE * TILE / 16];
};

// Where eight codes of a column, from `row` on, lie in the transposed tile: chunks of 16 bytes,
// swizzled so that neither the words written nor the chunks read meet in a bank.
__device__ __forceinline__ int place_in_transposed(int column, int row) {
    return column * TILE + (row ^ column / 8 % 8 * 16);
}

// Stores the codes along columns, which are rows of the transposed tile.
__device__ __forceinline__ void store_transposed(const Mxfp8Params& p, const Tile& tile,
                                                 uint32_t transposed) {
    const int64_t line = tile.batch * p.x.columns + tile.column;
    auto* data = static_cast<uint8_t*>(p.down_data) + line * p.x.rows;
    if (p.x.rows % 16 != 0) {
        const int count = static_cast<int>(min(p.x.rows - tile.row, int64_t{TILE}));
#pragma unroll 4
        for (int i = 0; i < TILE; i += THREADS / 32) {
            const int row = kittens::warpid() + i;
            if (tile.column + row >= p.x.columns) break;
            gemm::sm90::store_unaligned<TILE>(data + row * p.x.rows + tile.row,
                                              transposed + row * TILE,
                                              place_in_transposed(row, 0) - row * TILE, count);
        }
        return;
    }
    const int chunk = static_cast<int>(threadIdx.x) % 8;
    const int64_t first = tile.row + chunk * 16;
#pragma unroll
    for (int i = 0; i < TILE; i += THREADS / 8) {
        const int row = static_cast<int>(threadIdx.x) / 8 + i;  // a column of x
        const auto word =
            arch::load_shared<uint4>(transposed + place_in_transposed(row, chunk * 16));
        if (tile.column + row < p.x.columns && first < p.x.rows) {
            arch::store_global(reinterpret_cast<uint4*>(data + row * p.x.rows + first), word);
        }
    }
}

template <int INPUT, int DATA, bool DOWN, bool PORTABLE>
__global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM<INPUT>)
    mxfp8_quantize_kernel(Mxfp8Params p) {
    using T = element_of<INPUT>;
    using F = Fp8<DATA>;
    constexpr int LANES = DOWN ? 8 : 16;
    const Tile tile = tile_at(static_cast<int>(blockIdx.x), p.x.rows, p.x.columns);
    const Place<LANES> place;
    Chunk<T> chunks[CHUNK_ROWS];
    load_chunks(chunks, p.x, tile, place);

    const bool words = p.x.columns % 8 == 0, whole_words = tile.whole(p.x) && words;
    // Codes along the columns leave from rows that a warp stages by itself, as many lanes wide as
    // it is; those along the rows from the whole tile.
    constexpr int BYTES = LANES * CHUNK, ROWS = 32 / LANES * CHUNK_ROWS;
    const uint32_t tile_codes = arch::shared_address(arch::static_shared<StagedCodes>().data);
    const uint32_t staged = tile_codes + kittens::warpid() * (ROWS * BYTES);
    const uint32_t scales = arch::shared_address(&arch::static_shared<Mxfp8Shared>());
    if (!DOWN || p.data != nullptr) {
        const int64_t row = tile.row + place.row, column = tile.column + place.column;
        const uint32_t scale_at = scales + place_in_atom(place.row, place.column / MX_BLOCK);
        auto* at =
            static_cast<uint8_t*>(p.data) + (tile.batch * p.x.rows + row) * p.x.columns + column;
#pragma unroll
        for (int i = 0; i < CHUNK_ROWS; ++i) {
            uint32_t largest = largest_of(chunks[i]);
            largest = max(largest, arch::shuffle_xor(largest, 1));
            largest = max(largest, arch::shuffle_xor(largest, 2));
            const uint32_t byte = F::scale(magnitude_value<T>(largest, 0), p.floor);
            const float factor = inverse_of_scale(byte);
            uint32_t codes[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                codes[j] =
                    F::codes(chunks[i].value(2 * j) * factor, chunks[i].value(2 * j + 1) * factor);
            }
            const uint2 word{codes[0] | codes[1] << 16, codes[2] | codes[3] << 16};
            if (whole_words) {
                arch::store_global(reinterpret_cast<uint2*>(at + i * p.x.columns), word);
            } else if (!words) {
                arch::store_shared(staged + (place.row % ROWS + i) * BYTES + place.column % BYTES,
                                   word);
            } else if (row + i < p.x.rows && column < p.x.columns) {
                arch::store_global(reinterpret_cast<uint2*>(at + i * p.x.columns), word);
            }
            // Consecutive rows of a thread lie 16 bytes apart in an atom.
            if (kittens::laneid() % 4 == 0) {
                arch::store_shared(scale_at + 16 * i, static_cast<uint8_t>(byte));
            }
        }
        if (!words) {
            const int64_t first = tile.row + place.row / ROWS * ROWS;
            const int64_t left = tile.column + place.column / BYTES * BYTES;
            gemm::sm90::store_unaligned_rows<BYTES, ROWS>(
                static_cast<uint8_t*>(p.data) +
                    ((tile.batch * p.x.rows + first) * p.x.columns + left),
                p.x.columns, p.x.rows - first, p.x.columns - left, staged);
            // What warps have staged makes room for the transposed tile.
            if (DOWN) arch::sync_block();
        }
    }
    uint32_t down_scales = 0;
    if constexpr (DOWN) {
        auto& shared = arch::static_shared<Mxfp8SharedDown>();
        down_scales = arch::shared_address(shared.scales);
        Chunk<T> largest;
#pragma unroll
        for (int w = 0; w < Chunk<T>::WORDS; ++w) {
            uint32_t word = magnitudes<T>(chunks[0].words[w]);
#pragma unroll
            for (int i = 1; i < CHUNK_ROWS; ++i) {
                word = larger<T>(word, magnitudes<T>(chunks[i].words[w]));
            }
            word = larger<T>(word, arch::shuffle_xor(word, 8));
            largest.words[w] = larger<T>(word, arch::shuffle_xor(word, 16));
        }
#pragma unroll
        for (int j = 0; j < CHUNK; ++j) {
            const uint32_t byte = F::scale(largest.value(j), p.floor);
            const float factor = inverse_of_scale(byte);
            uint32_t codes[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                codes[i] =
                    F::codes(chunks[2 * i].value(j) * factor, chunks[2 * i + 1].value(j) * factor);
            }
            const uint2 word{codes[0] | codes[1] << 16, codes[2] | codes[3] << 16};
            const int column = place.column + j;
            arch::store_shared(tile_codes + place_in_transposed(column, place.row), word);
            if (kittens::laneid() / 8 == j / 2) {
                const int in_atom = place_in_atom(column, place.row / MX_BLOCK);
                arch::store_shared(down_scales + in_atom, static_cast<uint8_t>(byte));
            }
        }
    }
    arch::sync_block();
    if (!DOWN || p.data != nullptr) {
        const int64_t blocks = (p.x.columns + MX_BLOCK - 1) / MX_BLOCK;
        store_scales<1>(static_cast<uint8_t*>(p.scale), scales, p.swizzle, tile.batch, p.x.rows,
                        blocks, tile.row, tile.column / MX_BLOCK);
    }
    if constexpr (DOWN) {
        const int64_t blocks = (p.x.rows + MX_BLOCK - 1) / MX_BLOCK;
        store_scales<1>(static_cast<uint8_t*>(p.down_scale), down_scales, p.swizzle, tile.batch,
                        p.x.columns, blocks, tile.column, tile.row / MX_BLOCK);
        store_transposed(p, tile, tile_codes);
    }
}

// The values of eight codes with the byte of their scale.
template <int DATA>
__device__ __forceinline__ void dequantize_chunk(const uint2& codes, uint32_t byte,
                                                 float (&values)[CHUNK]) {
    const float scale = scale_of_byte(byte);
#pragma unroll
    for (int j = 0; j < CHUNK; j += 2) {
        const uint32_t word = j < 4 ? codes.x : codes.y;
        const float2 pair = Fp8<DATA>::values(word >> 8 * (j % 4) & 0xffffu);
        values[j] = pair.x * scale;
        values[j + 1] = pair.y * scale;
    }
}

template <int OUT, int DATA, bool PORTABLE>
__global__ void __launch_bounds__(THREADS, 4)
    mxfp8_dequantize_kernel(DequantizeParams p, InOrder order) {
    dequantize<element_of<OUT>, uint2, MX_BLOCK>(
        p, order, [&](const uint2& codes, uint32_t byte, int64_t, float(&values)[CHUNK]) {
            dequantize_chunk<DATA>(codes, byte, values);
        });
}

}  // namespace sm90

template <Mxfp8Quantize C>
void quantize(const Mxfp8Params& params, Stream stream) {
    kittens::launch(
        sm90::mxfp8_quantize_kernel<int(C.dtype), int(C.data_dtype), C.down, C.portable>,
        dim3(sm90::tile_blocks(params.x)), dim3(THREADS), dim3(1), 0, stream, params);
}
template <Mxfp8Dequantize C>
void dequantize(const DequantizeParams& params, Stream stream) {
    const sm90::InOrder order = sm90::in_order<sm90::MX_BLOCK>(params, sizeof(uint2));
    kittens::launch(sm90::mxfp8_dequantize_kernel<int(C.dtype), int(C.data_dtype), C.portable>,
                    dim3(sm90::dequantize_blocks(params, order)), dim3(THREADS), dim3(1), 0, stream,
                    params, order);
}

}  // namespace thunderkittens::block_scaled
