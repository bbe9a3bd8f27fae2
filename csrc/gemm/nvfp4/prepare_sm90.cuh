// NVFP4 weights into the order of weights_sm90.cuh, and back as values. A block of 128 threads has
// a piece of 64 x 64 elements, or in the first case a few of them side by side; a thread makes, or
// reads, the words that are its own in the product.
#pragma once

#include "csrc/gemm/common/unaligned_rows_sm90.cuh"
#include "csrc/gemm/nvfp4/nvfp4_gemm.h"
#include "csrc/gemm/nvfp4/weights_sm90.cuh"

namespace thunderkittens::nvfp4_gemm {
namespace sm90 {

constexpr int PREPARE_THREADS = 128;
constexpr int PREPARE_PIECES = 4;  // side by side: lines of 128 bytes

// Which piece a block has, and its thread's first row and column.
struct PiecePlace {
    int64_t group, row, column;

    __device__ __forceinline__ PiecePlace(const PrepareParams& p) {
        const auto columns = static_cast<uint32_t>((p.k + PIECE - 1) / PIECE);
        const auto rows = static_cast<uint32_t>((p.n + PIECE - 1) / PIECE);
        const uint32_t line = blockIdx.x / columns;
        const int thread = static_cast<int>(threadIdx.x);
        group = line / rows;
        row = int64_t(line % rows) * PIECE + thread / 32 * 16 + thread % 32 / 4;
        column = int64_t(blockIdx.x % columns) * PIECE + thread % 4 * 2;
    }
    // The strip of the thread's warp.
    __device__ __forceinline__ uint8_t* strip(const PrepareParams& p) const {
        return static_cast<uint8_t*>(p.prepared) + int64_t(blockIdx.x) * Nvfp4Weights::BYTES +
               kittens::warpid() * Nvfp4Weights::STRIP;
    }
};

// The byte eeeeemmm of an e4m3 value without its sign.
__device__ __forceinline__ uint32_t scale_byte(uint32_t code) {
    if (code == 127) return 19 * 8 + 7;
    if (code >= 8) return code + 3 * 8;
    if (code >= 4) return 3 * 8 + (code - 4) * 2;
    if (code >= 2) return 2 * 8 + (code - 2) * 4;
    return code * 8;
}

// The word of a thread: bytes `byte` of four words of codes, elements 0 to 3 of either half of it
// (weights_sm90.cuh); the first of a byte's two is for the lower half.
__device__ __forceinline__ uint32_t arranged(uint32_t a, uint32_t b, uint32_t c, uint32_t d,
                                             uint32_t byte) {
    const auto halves = [&](uint32_t word) {
        const uint32_t two = arch::permute_bytes(word, 0, 0x4440 + byte);
        return (two & 0xfu) | (two & 0xf0u) << 12;
    };
    constexpr uint32_t ONE = 0x00010001;
    const uint32_t x = halves(a), y = halves(b), z = halves(c), w = halves(d);
    const uint32_t signs = z & 8 * ONE;
    return (x & 7 * ONE) | (x & 8 * ONE) << 6 | (y & 7 * ONE) << 4 | (y & 8 * ONE) << 10 |
           (z & 7 * ONE) << 10 | signs >> 16 | signs << 16 | (w & 6 * ONE) << 6 |
           (w & 1 * ONE) << 14 | (w & 8 * ONE) << 12;
}

__device__ __forceinline__ uint32_t scale_at(const PrepareParams& p, int64_t group, int64_t row,
                                             int64_t block) {
    const int64_t blocks = p.k / 16;
    if (row >= p.n || block >= blocks) return 0;
    int64_t at = (group * p.n + row) * blocks + block;
    if (p.swizzle) {
        const int64_t atoms = (blocks + 3) / 4, down = (p.n + 127) / 128;
        at = ((group * down + row / 128) * atoms + block / 4) * 512 + row % 32 * 16 +
             row % 128 / 32 * 4 + block % 4;
    }
    return arch::load_global_readonly(static_cast<const uint8_t*>(p.scales) + at);
}

// A lane loads a block of 16 codes of rows r and r + 8 of each piece, and its scale; four of them
// have the row, and hand the words to each other, of which a thread needs a byte.
__device__ __forceinline__ void prepare(const PrepareParams& p) {
    const auto columns = static_cast<uint32_t>((p.k + PIECE - 1) / PIECE);
    const auto rows = static_cast<uint32_t>((p.n + PIECE - 1) / PIECE);
    const uint32_t across = (columns + PREPARE_PIECES - 1) / PREPARE_PIECES;
    const uint32_t line = blockIdx.x / across, first = blockIdx.x % across * PREPARE_PIECES;
    const int lane = kittens::laneid(), quarter = lane % 4;
    const int64_t group = line / rows;
    const int64_t row = int64_t{line % rows} * PIECE + kittens::warpid() * 16 + lane / 4;
    const int64_t column = int64_t{first} * PIECE + quarter * 16;
    const auto begin = reinterpret_cast<uint64_t>(p.codes);
    const int64_t bytes =
        (p.groups - 1) * p.codes_group_stride + (p.n - 1) * p.codes_stride + p.k / 2;
    const gemm::sm90::Span span{begin, begin + static_cast<uint64_t>(bytes)};
    const bool aligned =
        (begin | static_cast<uint64_t>(p.codes_stride | p.codes_group_stride)) % 8 == 0;

    uint32_t codes[2][PREPARE_PIECES][2], scales[2][PREPARE_PIECES];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int64_t r = row + 8 * half;
        const int64_t left = r < p.n ? p.k - column : 0;
        const int there =
            static_cast<int>(min((left + PIECE - 1) / PIECE, int64_t{PREPARE_PIECES}));
        const uint64_t at = begin + static_cast<uint64_t>(group * p.codes_group_stride +
                                                          r * p.codes_stride + column / 2);
        if (aligned) {
#pragma unroll
            for (int i = 0; i < PREPARE_PIECES; ++i) {
                uint2 words{};
                if (i < there) {
                    words = arch::load_global_readonly(
                        reinterpret_cast<const uint2*>(at + i * (PIECE / 2)));
                }
                codes[half][i][0] = words.x, codes[half][i][1] = words.y;
            }
        } else {
            gemm::sm90::load_unaligned<8, 1, PREPARE_PIECES>(
                span, there, [&](int i) { return at + i * (PIECE / 2); }, [](int) { return 8; },
                [&](int i) -> auto& { return codes[half][i]; });
        }
#pragma unroll
        for (int i = 0; i < PREPARE_PIECES; ++i) {
            scales[half][i] = scale_at(p, group, r, column / 16 + i * (PIECE / 16));
        }
    }
#pragma unroll
    for (int i = 0; i < PREPARE_PIECES; ++i) {
        if (first + i >= columns) break;
        uint32_t bytes_of_scales = 0;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint32_t scale = scales[half][i];
            const uint32_t kept = (scale & 127) != 0 ? ~0u : 0, flip = scale & 128 ? 0x88888888 : 0;
#pragma unroll
            for (int w = 0; w < 2; ++w) codes[half][i][w] = (codes[half][i][w] ^ flip) & kept;
            bytes_of_scales |= scale_byte(scale & 127) << 16 * half;
        }
        bytes_of_scales <<= 8 * (quarter % 2);
        bytes_of_scales |= arch::shuffle_xor(bytes_of_scales, 1);
        uint32_t words[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const auto of = [&](uint32_t word) { return arch::shuffle(word, lane / 4 * 4 + k); };
            words[k] = arranged(of(codes[0][i][0]), of(codes[1][i][0]), of(codes[0][i][1]),
                                of(codes[1][i][1]), quarter);
        }
        uint8_t* to = static_cast<uint8_t*>(p.prepared) +
                      (int64_t{line} * columns + first + i) * Nvfp4Weights::BYTES +
                      kittens::warpid() * Nvfp4Weights::STRIP;
        arch::store_global(reinterpret_cast<uint4*>(to) + lane,
                           uint4{words[0], words[1], words[2], words[3]});
        if (lane % 2 == 0) {
            arch::store_global(reinterpret_cast<uint32_t*>(to + Nvfp4Weights::CODES) + lane / 2,
                               bytes_of_scales);
        }
    }
}

template <class O>
__device__ __forceinline__ void restore(const PrepareParams& p) {
    const PiecePlace place(p);
    const uint8_t* from = place.strip(p);
    const int lane = kittens::laneid();
    const Nvfp4Weights::Words words{
        arch::load_global(reinterpret_cast<const uint4*>(from) + lane),
        arch::load_global(reinterpret_cast<const uint2*>(from + Nvfp4Weights::CODES) + lane / 4)};
    rt_bf<16, PIECE> fragments;
    Nvfp4Weights::fragments(words, fragments);
    const float scale = arch::load_global(p.global_scale + place.group);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int64_t row = place.row + i % 2 * 8, column = place.column + k * 16 + i / 2 * 8;
            if (row >= p.n || column >= p.k) continue;
            const float2 pair = unpack_pair<bf16>(fragments.tiles[0][k].data[i]);
            O* to = static_cast<O*>(p.values) + (place.group * p.n + row) * p.k + column;
            // k is a multiple of 16: pairs are aligned.
            arch::store_global(reinterpret_cast<packed_type<O>*>(to),
                               pack_pair<O>(pair.x * Nvfp4Weights::FACTOR * scale,
                                            pair.y * Nvfp4Weights::FACTOR * scale));
        }
    }
}

template <int PASS, bool PORTABLE>
__global__ void __launch_bounds__(PREPARE_THREADS)
    nvfp4_prepare_kernel(const __grid_constant__ PrepareParams p) {
    if constexpr (PASS == int(Nvfp4Pass::prepare)) {
        prepare(p);
    } else {
        switch (p.values_dtype) {
            case DType::bf16: return restore<bf16>(p);
            case DType::fp16: return restore<half>(p);
            default: return restore<float>(p);
        }
    }
}

}  // namespace sm90

template <Nvfp4Pass pass, bool portable>
void run(const PrepareParams& p, Stream stream) {
    const int64_t of_block = pass == Nvfp4Pass::prepare ? sm90::PREPARE_PIECES : 1;
    const int64_t blocks = pieces(p.n) * ((pieces(p.k) + of_block - 1) / of_block) * p.groups;
    kittens::launch(sm90::nvfp4_prepare_kernel<int(pass), portable>,
                    dim3(static_cast<unsigned>(blocks)), dim3(sm90::PREPARE_THREADS), dim3(1), 0,
                    stream, p);
}

}  // namespace thunderkittens::nvfp4_gemm
