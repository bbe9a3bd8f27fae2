// NVFP4 on Hopper: elements e2m1, two per byte; 16 neighbours share an e4m3 scale, a matrix an fp32
// one. The arithmetic is, operation by operation in fp32, that of NVIDIA's Transformer Engine.
//
// Where the matrix's scale is to be found, one kernel writes the largest magnitude of what each of
// its blocks has read, and the quantiser, which follows it on the stream, begins with the largest
// of those. It takes the tiles in the opposite order, so that the last of what was read comes from
// L2.
#pragma once

#include "csrc/gemm/block_scaled_sm90.cuh"

namespace thunderkittens::block_scaled {
namespace sm90 {

constexpr int NV_BLOCK = 16;
constexpr float NV_RANGE = 448.0f * 6.0f;  // of the largest scale and the largest element
constexpr float LARGEST_FLOAT = 3.402823466e38f;

// e4m3 of a number that is not negative, saturated, and back.
__device__ __forceinline__ uint32_t e4m3_code(float x) {
    return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
}
__device__ __forceinline__ float e4m3_value(uint32_t code) {
    return __half2float(bit_cast<__half>(
        __nv_cvt_fp8_to_halfraw(static_cast<__nv_fp8_storage_t>(code), __NV_E4M3)));
}

// By what a matrix is multiplied, and its inverse.
struct Encode {
    float factor, inverse;
};
__device__ __forceinline__ bool is_positive(float x) { return x > 0 && x <= LARGEST_FLOAT; }
__device__ __forceinline__ Encode encode_by(float factor) {
    if (!(factor > 0)) factor = 1;
    return {factor, 1 / factor};
}
__device__ __forceinline__ Encode encode_of_largest(float largest) {
    return encode_by(is_positive(largest) ? min(NV_RANGE / largest, LARGEST_FLOAT) : 1);
}
__device__ __forceinline__ Encode encode_of_scale(float scale) {
    return encode_by(is_positive(scale) ? min(1 / scale, LARGEST_FLOAT) : 1);
}

// The scale of a block with this largest magnitude. NaN makes it NaN.
__device__ __forceinline__ uint32_t block_scale(float largest, const Encode& encode) {
    constexpr float SIXTH = 1.0f / 6.0f;
    const float scale = min(largest * (encode.factor * SIXTH), LARGEST_FLOAT);
    return largest >= 0 ? e4m3_code(scale) : 0x7f;
}

// By what the elements of a block are multiplied, for each of the 128 scales that it may have: a
// division per thread of the block, instead of one per eight elements.
struct FactorsShared {
    float factor[128];
};
__device__ __forceinline__ uint32_t make_factors(const Encode& encode) {
    const uint32_t shared = arch::shared_address(&arch::static_shared<FactorsShared>());
    const auto code = static_cast<uint32_t>(threadIdx.x);
    if (code < 128) {
        const float factor = min(1 / (e4m3_value(code) * encode.inverse), LARGEST_FLOAT);
        arch::store_shared(shared + 4 * code, factor);
    }
    arch::sync_block();
    return shared;
}

// The code of a magnitude x in the low byte, rounded to nearest even. The codes are the integers of
// min(2 x, x + 2, x / 2 + 4), a line for each distance between neighbours, which begin at even
// codes. Added to 2^23, whose successor is 2^23 + 1, each line is rounded once.
__device__ __forceinline__ uint32_t e2m1_code(float x) {
    constexpr float ONE = 0x1p23f;
    const uint32_t near = bit_cast<uint32_t>(__fmaf_rn(x, 2, ONE));
    const uint32_t middle = bit_cast<uint32_t>(x + (ONE + 2));
    const uint32_t far = bit_cast<uint32_t>(__fmaf_rn(x, 0.5f, ONE + 4));
    return min(min(min(near, middle), far), bit_cast<uint32_t>(ONE + 7));
}
// The same, rounded up with a probability that is the place between the two codes; `dither` is
// uniform in (-1/2, 1/2).
__device__ __forceinline__ uint32_t e2m1_code(float x, float dither) {
    x = min(x, 6.0f);
    const float place = min(min(2 * x, x + 2), __fmaf_rn(x, 0.5f, 4));
    return bit_cast<uint32_t>(place + dither + 0x1.8p23f);
}
// The values of a word of eight codes, times 2^-14, as pairs of fp16: in the order 0 4, 1 5, 2 6,
// 3 7. The three bits of a magnitude are an fp16 number of that value.
struct E2m1Values {
    float2 pair[4];
};
__device__ __forceinline__ E2m1Values e2m1_values(uint32_t codes) {
    E2m1Values values;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint32_t c = codes >> 4 * i;
        const uint32_t bits = (c << 9 & 0x0e000e00u) | (c << 12 & 0x80008000u);
        values.pair[i] = __half22float2(bit_cast<__half2>(bits));
    }
    return values;
}

// Philox4x32 with 10 rounds: four random words of a counter and a key (Salmon et al., "Parallel
// random numbers: as easy as 1, 2, 3").
__device__ __forceinline__ uint4 random_words(uint64_t counter, uint64_t key) {
    uint32_t x[4] = {static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32), 0, 0};
    uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const uint64_t a = uint64_t{0xd2511f53u} * x[0], b = uint64_t{0xcd9e8d57u} * x[2];
        const uint32_t low = static_cast<uint32_t>(a), high = static_cast<uint32_t>(b);
        x[0] = static_cast<uint32_t>(b >> 32) ^ x[1] ^ k0;
        x[2] = static_cast<uint32_t>(a >> 32) ^ x[3] ^ k1;
        x[1] = high;
        x[3] = low;
        k0 += 0x9e3779b9u;
        k1 += 0xbb67ae85u;
    }
    return {x[0], x[1], x[2], x[3]};
}

// The sign bits of the eight elements of a chunk: those of the even ones are the top bits of the
// bytes of the first word, those of the odd ones of the second.
template <class T>
__device__ __forceinline__ uint2 signs(const Chunk<T>& chunk) {
    const auto& w = chunk.words;
    if constexpr (Chunk<T>::PAIRS) {
        const uint32_t a = arch::permute_bytes(w[0], w[1], 0x7351);
        const uint32_t b = arch::permute_bytes(w[2], w[3], 0x7351);
        return {arch::permute_bytes(a, b, 0x5410), arch::permute_bytes(a, b, 0x7632)};
    } else {
        const auto top = [](uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
            return arch::permute_bytes(arch::permute_bytes(a, b, 0x0073),
                                       arch::permute_bytes(c, d, 0x0073), 0x5410);
        };
        return {top(w[0], w[2], w[4], w[6]), top(w[1], w[3], w[5], w[7])};
    }
}
// The low bytes of four words.
__device__ __forceinline__ uint32_t low_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    return arch::permute_bytes(arch::permute_bytes(a, b, 0x0040), arch::permute_bytes(c, d, 0x0040),
                               0x5410);
}

// The codes of a chunk in a word, the first in the lowest four bits.
template <class T, bool STOCHASTIC>
__device__ __forceinline__ uint32_t chunk_codes(const Chunk<T>& chunk, float factor,
                                                uint64_t counter, uint64_t key) {
    const uint4 random = STOCHASTIC ? random_words(counter, key) : uint4{};
    const uint32_t dice[4] = {random.x, random.y, random.z, random.w};
    uint32_t code[CHUNK];
#pragma unroll
    for (int j = 0; j < CHUNK; ++j) {
        const float x = fabsf(chunk.value(j)) * factor;
        if constexpr (STOCHASTIC) {
            // 16 bits as the fraction of a number in [1, 2).
            const uint32_t bits = j % 2 == 0 ? dice[j / 2] & 0xffffu : dice[j / 2] >> 16;
            code[j] = e2m1_code(x, bit_cast<float>(0x3f800000u | bits << 7) - (1.5f - 0x1p-17f));
        } else {
            code[j] = e2m1_code(x);
        }
    }
    const uint32_t even = low_bytes(code[0], code[2], code[4], code[6]);
    const uint32_t odd = low_bytes(code[1], code[3], code[5], code[7]);
    const uint2 sign = signs(chunk);
    return even | (sign.x & 0x80808080u) >> 4 | odd << 4 | (sign.y & 0x80808080u);
}

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

template <int INPUT>
__global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM<INPUT>)
    nvfp4_maxima_kernel(Nvfp4Params p) {
    using T = element_of<INPUT>;
    const auto matrix = static_cast<int64_t>(blockIdx.y);
    const int count = tiles_of_matrix(p.x.rows, p.x.columns);
    const Place<16> place;
    uint32_t word = 0;
    for (int i = static_cast<int>(blockIdx.x); i < count; i += static_cast<int>(gridDim.x)) {
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
        arch::store_global(static_cast<uint32_t*>(p.maxima) + matrix * gridDim.x + blockIdx.x,
                           bit_cast<uint32_t>(largest));
    }
}

// By what the elements of a matrix are multiplied. Called by all threads.
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

template <int INPUT, bool SQUARE, bool STOCHASTIC>
__global__ void __launch_bounds__(THREADS,
                                  STOCHASTIC ? BLOCKS_PER_SM<INPUT> - 1 : BLOCKS_PER_SM<INPUT>)
    nvfp4_quantize_kernel(Nvfp4Params p) {
    using T = element_of<INPUT>;
    constexpr int LANES = 16;
    const int last = static_cast<int>(gridDim.x) - 1;
    const Tile tile = tile_at(last - static_cast<int>(blockIdx.x), p.x.rows, p.x.columns);
    const Place<LANES> place;
    Chunk<T> chunks[CHUNK_ROWS];
    load_chunks(chunks, p.x, tile, place);
    uint64_t key = 0;
    if constexpr (STOCHASTIC) {
        key = bit_cast<uint64_t>(arch::load_global_readonly(static_cast<const uint2*>(p.seed)));
    }
    const Encode encode = matrix_encode(p, tile.batch, tile.row == 0 && tile.column == 0);
    const uint32_t factors = make_factors(encode);

    uint32_t largest[CHUNK_ROWS], square = 0;
#pragma unroll
    for (int i = 0; i < CHUNK_ROWS; ++i) {
        largest[i] = largest_of(chunks[i]);
        square = max(square, largest[i]);
        if constexpr (!SQUARE) largest[i] = max(largest[i], arch::shuffle_xor(largest[i], 1));
    }
    uint32_t block = 0;
    if constexpr (SQUARE) {
        square = max(square, arch::shuffle_xor(square, 1));
        square = max(square, arch::shuffle_xor(square, LANES));
        block = block_scale(magnitude_value<T>(square, 0), encode);
    }
    const uint32_t scales = arch::shared_address(&arch::static_shared<Nvfp4Shared>());
    // Consecutive rows of a thread lie 16 bytes apart in an atom.
    const uint32_t scale_at =
        scales + place.column / 64 * ATOM + place_in_atom(place.row, place.column % 64 / NV_BLOCK);
    const int64_t row = tile.row + place.row, column = tile.column + place.column;
    const int64_t line = tile.batch * p.x.rows + row;
    const int64_t chunks_across = (p.x.columns + CHUNK - 1) / CHUNK;
    const bool whole = tile.whole(p.x), writes_scale = kittens::laneid() % 2 == 0;
    uint32_t codes[CHUNK_ROWS];
#pragma unroll
    for (int i = 0; i < CHUNK_ROWS; ++i) {
        if constexpr (!SQUARE) block = block_scale(magnitude_value<T>(largest[i], 0), encode);
        codes[i] =
            chunk_codes<T, STOCHASTIC>(chunks[i], arch::load_shared<float>(factors + 4 * block),
                                       (line + i) * chunks_across + column / CHUNK, key);
        if (block == 0x7f) codes[i] = 0x77777777u;
        const bool inside = whole || row + i < p.x.rows;
        if (writes_scale) {
            arch::store_shared(scale_at + 16 * i, static_cast<uint8_t>(inside ? block : 0));
        }
    }
    const int64_t pitch = p.x.columns / 2;
    auto* at = static_cast<uint8_t*>(p.data) + line * pitch + column / 2;
    if (whole && p.x.columns % 8 == 0) {
#pragma unroll
        for (int i = 0; i < CHUNK_ROWS; ++i) {
            arch::store_global(reinterpret_cast<uint32_t*>(at + i * pitch), codes[i]);
        }
    } else if (column < p.x.columns) {
#pragma unroll
        for (int i = 0; i < CHUNK_ROWS; ++i) {
            if (row + i < p.x.rows) {
                store_bytes(at + i * pitch, codes[i], p.x.columns % 8 == 0, pitch - column / 2);
            }
        }
    }
    arch::sync_block();
    store_scales<2>(static_cast<uint8_t*>(p.scale), scales, p.swizzle, tile.batch, p.x.rows,
                    (p.x.columns + NV_BLOCK - 1) / NV_BLOCK, tile.row, tile.column / NV_BLOCK);
}

template <int OUT>
__global__ void __launch_bounds__(THREADS) nvfp4_dequantize_kernel(DequantizeParams p) {
    using T = element_of<OUT>;
    const Matrix& m = p.data;
    const Tile tile = tile_at(static_cast<int>(blockIdx.x), m.rows, m.columns);
    const Place<16> place;
    const int64_t row = tile.row + place.row, column = tile.column + place.column;
    const float global =
        arch::load_global_readonly(static_cast<const float*>(p.global_scale) + tile.batch);
    const auto codes = load_codes<uint32_t, NV_BLOCK>(p, tile, row, column);
    T* out = static_cast<T*>(p.out) + (tile.batch * m.rows + row) * m.columns + column;
    store_rows(out, m, tile, row, column, [&](int i, float(&values)[CHUNK]) {
        const E2m1Values scaled = e2m1_values(codes.word[i]);
        const float scale = e4m3_value(codes.scale[i]) * 0x1p14f;
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
    kittens::launch(sm90::nvfp4_quantize_kernel<int(C.dtype), C.square, C.stochastic>,
                    dim3(sm90::tile_blocks(params.x)), dim3(THREADS), dim3(1), 0, stream, params);
}
template <DType dtype>
void find_maxima(const Nvfp4Params& params, Stream stream) {
    kittens::launch(sm90::nvfp4_maxima_kernel<int(dtype)>,
                    dim3(params.maxima_count, static_cast<unsigned>(params.x.batch)), dim3(THREADS),
                    dim3(1), 0, stream, params);
}
template <Nvfp4Dequantize C>
void dequantize(const DequantizeParams& params, Stream stream) {
    kittens::launch(sm90::nvfp4_dequantize_kernel<int(C.dtype)>,
                    dim3(sm90::tile_blocks(params.data)), dim3(THREADS), dim3(1), 0, stream,
                    params);
}

}  // namespace thunderkittens::block_scaled
