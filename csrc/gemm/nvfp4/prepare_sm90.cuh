// NVFP4 weights into the order of weights_sm90.cuh, and back as values. A block of 128
// threads has a piece of 64 x 64 elements; a thread makes, or reads, the words that are its own in
// the product.
#pragma once

#include "csrc/gemm/nvfp4/nvfp4_gemm.h"
#include "csrc/gemm/nvfp4/weights_sm90.cuh"

namespace thunderkittens::nvfp4_gemm {
namespace sm90 {

constexpr int PREPARE_THREADS = 128;

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

// Bit `bit` of a code of four bits, at `to`.
__device__ __forceinline__ uint32_t place_bit(uint32_t code, int bit, int to) {
    return (code >> bit & 1u) << to;
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

__device__ __forceinline__ void prepare(const PrepareParams& p) {
    const PiecePlace place(p);
    uint32_t words[4] = {}, scales[2] = {};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int64_t row = place.row + i % 2 * 8, column = place.column + k * 16 + i / 2 * 8;
            const uint32_t scale = scale_at(p, place.group, row, column / 16);
            uint32_t pair = 0;
            if (row < p.n && column < p.k && (scale & 127) != 0) {
                pair = arch::load_global_readonly(static_cast<const uint8_t*>(p.codes) +
                                                  place.group * p.codes_group_stride +
                                                  row * p.codes_stride + column / 2);
                if (scale & 128) pair ^= 0x88;
            }
            const Nvfp4Bits bits = nvfp4_bits(i);
#pragma unroll
            for (int odd = 0; odd < 2; ++odd) {
                const uint32_t code = pair >> 4 * odd;
                words[k] |= place_bit(code, 3, (bits.sign + 16 * odd) % 32) |
                            place_bit(code, 2, bits.high + 16 * odd) |
                            place_bit(code, 1, bits.low + 16 * odd) |
                            place_bit(code, 0, bits.mantissa + 16 * odd);
            }
            if (i < 2) scales[k / 2] |= scale_byte(scale & 127) << 8 * (i * 2 + k % 2);
        }
    }
    uint8_t* to = place.strip(p);
    const int lane = kittens::laneid();
    arch::store_global(reinterpret_cast<uint4*>(to) + lane,
                       uint4{words[0], words[1], words[2], words[3]});
    if (lane % 4 == 0) {
        arch::store_global(reinterpret_cast<uint2*>(to + Nvfp4Weights::CODES) + lane / 4,
                           uint2{scales[0], scales[1]});
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

template <int PASS>
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

template <Nvfp4Pass pass>
void run(const PrepareParams& p, Stream stream) {
    const int64_t blocks = pieces(p.n) * pieces(p.k) * p.groups;
    kittens::launch(sm90::nvfp4_prepare_kernel<int(pass)>, dim3(static_cast<unsigned>(blocks)),
                    dim3(sm90::PREPARE_THREADS), dim3(1), 0, stream, p);
}

}  // namespace thunderkittens::nvfp4_gemm
