// Passes over MXFP8 operands before a product, on Hopper: to bf16 (dequantize), and to e4m3 codes
// with one scale per row (rescale). One launch serves both operands of a product.
//
// Rescaling: a warp has two rows, or where rows are few a half of one. It finds the largest scale
// of each, then multiplies the codes of each block by 2^(byte - largest), in fp16, which is exact
// where it matters, and rounds them to e4m3. Lanes have 16 neighbours each, two of them a block.
#pragma once

#include <cuda_fp16.h>

#include "csrc/gemm/common/tile_mask_sm90.cuh"
#include "csrc/gemm/mxfp8/mxfp8_gemm.h"
#include "csrc/gemm/quantize/mxfp8_quantize_sm90.cuh"

namespace thunderkittens::mxfp8_gemm {
namespace sm90 {

using namespace block_scaled;
using namespace block_scaled::sm90;

constexpr int LANE_CODES = 16;
// Warps of a block that rescales; where they are more than its rows, several share a row.
constexpr int RESCALE_WARPS = THREADS / 32, MOST_RESCALE_WARPS = MOST_RESCALE_THREADS / 32;
constexpr int STEPS = 4;       // of a warp's row, loaded before the first is used
constexpr int E5M2_SHIFT = 7;  // between the largest exponents of e5m2 and e4m3

struct Words {
    uint32_t word[4];
};

// What a row is relative to.
struct Base {
    uint32_t byte;
    float factor;
    bool masked;  // beyond MAX_EXPONENT
};

// The scales of one row.
struct RowScales {
    const uint8_t* at;
    int step;  // bytes between groups of four
    int64_t blocks;
    bool swizzle;

    __device__ __forceinline__ uint32_t byte(int64_t block) const {
        return arch::load_global_readonly(at + block / 4 * step + block % 4);
    }
    // The largest of the row; NaN does not count.
    __device__ __forceinline__ uint32_t largest() const {
        const auto number = [](uint32_t byte) { return byte == 255 ? 0u : byte; };
        uint32_t result = 0;
        if (swizzle) {
            for (int64_t i = kittens::laneid(); 4 * i < blocks; i += 32) {
                const auto* word = reinterpret_cast<const uint32_t*>(at + i * step);
                const uint32_t bytes = arch::load_global_readonly(word);
                const int count = static_cast<int>(min(blocks - 4 * i, int64_t{4}));
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    if (j < count) result = max(result, number(bytes >> 8 * j & 255));
                }
            }
        } else {
            for (int64_t i = kittens::laneid(); i < blocks; i += 32) {
                result = max(result, number(byte(i)));
            }
        }
#pragma unroll
        for (int i = 16; i > 0; i /= 2) result = max(result, arch::shuffle_xor(result, i));
        return result;
    }
};

template <int DATA>
__device__ __forceinline__ Base base_of(uint32_t largest) {
    const int exponent = static_cast<int>(largest) - 127 + (Fp8<DATA>::E4M3 ? 0 : E5M2_SHIFT);
    const bool inside = exponent >= -MAX_EXPONENT && exponent <= MAX_EXPONENT;
    return {largest, bit_cast<float>(static_cast<uint32_t>(inside ? exponent + 127 : 127) << 23),
            !inside};
}

// 2^-shift in both halves; 0 where fp16 has no such number.
__device__ __forceinline__ uint32_t halves(int shift) {
    const uint32_t bits = shift <= 14   ? static_cast<uint32_t>(15 - shift) << 10
                          : shift <= 24 ? 1u << (24 - shift)
                                        : 0u;
    return bits | bits << 16;
}

constexpr uint32_t MAGNITUDES = 0x7f7f7f7f, TOPS = 0x80808080;
// Whether one of four codes has at least this magnitude, a code below 0x80.
__device__ __forceinline__ bool reaches(uint32_t codes, uint32_t magnitude) {
    return (((codes & MAGNITUDES) + (0x80 - magnitude) * 0x01010101u) & TOPS) != 0;
}

// Rescales half a block to a row's base; returns whether the block is to be put into the mask.
// Called by whole warps.
template <int DATA>
__device__ __forceinline__ bool rescale_codes(Words& codes, uint32_t byte, const Base& base) {
    using F = Fp8<DATA>;
    const int shift = static_cast<int>(base.byte) - static_cast<int>(byte);
    const auto factor = bit_cast<__half2>(halves(shift + (F::E4M3 ? 0 : E5M2_SHIFT)));
    bool some = false, large = false, beyond = byte == 255;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint32_t given = codes.word[i];
        some |= (given & MAGNITUDES) != 0;
        if constexpr (!F::E4M3) beyond |= reaches(given, 0x7c);  // infinity, NaN
        uint32_t pairs[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const __half2 value = gemm::sm80::pair_of_fp8<typename F::Element>(given >> 16 * j);
            pairs[j] = gemm::sm80::fp8_codes<kittens::fp8e4m3>(__hmul2(value, factor));
        }
        codes.word[i] = pairs[0] | pairs[1] << 16;
        large |= reaches(codes.word[i], 0x30);
    }
    // An element moves by at most 2^-10, half of e4m3's smallest; the largest of the block is then
    // 1/2 (code 0x30) or more. Codes of e4m3 that keep their scale do not move.
    uint32_t bits = (some ? 1u : 0u) | (large ? 2u : 0u) | (beyond ? 4u : 0u);
    bits |= arch::shuffle_xor(bits, 1);
    const bool moves = !F::E4M3 || shift > 0;
    return (bits & 4) != 0 || ((bits & 1) != 0 && (base.masked || (moves && (bits & 2) == 0)));
}

// Rescales the rows of a warp, or its share of one; returns whether they are to be put into the
// mask.
template <int DATA, int WARPS>
__device__ __forceinline__ bool rescale_rows(const Rescale& o, int64_t batch, int64_t group,
                                             int first) {
    constexpr int WARP_ROWS = WARPS < ROWS ? ROWS / WARPS : 1;
    constexpr int SHARES = WARPS < ROWS ? 1 : WARPS / ROWS;
    const Matrix& m = o.data;
    const int64_t blocks = (m.columns + BLOCK - 1) / BLOCK, atoms = (blocks + 3) / 4;
    const int share = kittens::warpid() % SHARES;
    const uint8_t* data[WARP_ROWS];
    uint8_t* to[WARP_ROWS];
    bool there[WARP_ROWS];
    RowScales scales[WARP_ROWS];
    Base base[WARP_ROWS];
#pragma unroll
    for (int i = 0; i < WARP_ROWS; ++i) {
        const int number = kittens::warpid() / SHARES * WARP_ROWS + i;
        const int in_group = first + number % 4 + number / 4 * 32;
        const int64_t row = group * TILE + in_group;
        there[i] = row < m.rows;
        const auto* scale = static_cast<const uint8_t*>(o.scale);
        if (o.swizzle) {
            const int64_t down = (m.rows + TILE - 1) / TILE;
            scale += (batch * down + group) * atoms * ATOM + place_in_atom(in_group, 0);
        } else {
            scale += (batch * m.rows + row) * blocks;
        }
        scales[i] = {scale, o.swizzle ? ATOM : 4, there[i] ? blocks : 0, o.swizzle};
        base[i] = base_of<DATA>(scales[i].largest());
        data[i] = static_cast<const uint8_t*>(m.data) + batch * m.batch_stride + row * m.row_stride;
        to[i] = static_cast<uint8_t*>(o.codes) + (batch * m.rows + row) * o.pitch;
        if (there[i] && share == 0 && kittens::laneid() == 0) {
            arch::store_global(o.factor + batch * m.rows + row, base[i].factor);
        }
    }
    const bool aligned =
        (reinterpret_cast<uintptr_t>(m.data) | m.batch_stride | m.row_stride) % LANE_CODES == 0;
    bool masked = false;
    constexpr int LOADED = STEPS * 32 * LANE_CODES;
    for (int64_t begin = share * LOADED; begin < o.pitch; begin += SHARES * LOADED) {
        Words codes[STEPS][WARP_ROWS];
        uint32_t byte[STEPS][WARP_ROWS];
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            const int64_t column = begin + (step * 32 + kittens::laneid()) * LANE_CODES;
#pragma unroll
            for (int i = 0; i < WARP_ROWS; ++i) {
                const int64_t count = there[i] ? m.columns - column : 0;
                codes[step][i] = bit_cast<Words>(
                    load_bytes<uint4>(data[i] + column, aligned, max(count, int64_t{0})));
                // What is behind the row's end is zero, whatever its scale.
                byte[step][i] = count > 0 ? scales[i].byte(column / BLOCK) : base[i].byte;
            }
        }
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            const int64_t column = begin + (step * 32 + kittens::laneid()) * LANE_CODES;
#pragma unroll
            for (int i = 0; i < WARP_ROWS; ++i) {
                masked |= rescale_codes<DATA>(codes[step][i], byte[step][i], base[i]);
                if (there[i] && column < o.pitch) {
                    arch::store_global(reinterpret_cast<uint4*>(to[i] + column),
                                       bit_cast<uint4>(codes[step][i]));
                }
            }
        }
    }
    return masked;
}

template <int WARPS>
struct MaskedWarps {
    uint32_t masked[WARPS];
};

// A template, so that the kernel is where it is instantiated.
template <class Params, int WARPS, bool PORTABLE>
__global__ void __launch_bounds__(WARPS * 32, WARPS < MOST_RESCALE_WARPS ? 2 : 1)
    mxfp8_rescale_pass_kernel(Params p) {
    if constexpr (!PORTABLE) {
        arch::wait_for_dependencies();
        // Blocks that are all there at once leave room for those of the kernel that multiplies.
        if (WARPS == MOST_RESCALE_WARPS) arch::launch_dependents();
    }
    const bool second = static_cast<int>(blockIdx.x) >= p.operands[0].blocks;
    const Rescale& o = p.operands[second ? 1 : 0];
    const int index = static_cast<int>(blockIdx.x) - (second ? p.operands[0].blocks : 0);
    const int groups = static_cast<int>((o.data.rows + TILE - 1) / TILE);
    const int64_t batch = index / MASK_BYTES / groups, group = index / MASK_BYTES % groups;
    const int first = index % MASK_BYTES * 4;
    const bool masked = o.e5m2 ? rescale_rows<int(DType::e5m2), WARPS>(o, batch, group, first)
                               : rescale_rows<int(DType::e4m3), WARPS>(o, batch, group, first);
    const bool any = arch::any_lane(masked);
    const uint32_t shared = arch::shared_address(&arch::static_shared<MaskedWarps<WARPS>>());
    if (kittens::laneid() == 0) {
        arch::store_shared(shared + kittens::warpid() * 4, any ? 1u : 0u);
    }
    arch::sync_block();
    if (threadIdx.x == 0) {
        uint32_t mask = 0;
        for (int i = 0; i < WARPS; ++i) {
            mask |= arch::load_shared<uint32_t>(shared + i * 4);
        }
        arch::store_global(o.mask + index, static_cast<uint8_t>(mask));
    }
}

// Where an element of CHUNK_K of k lies in the order that the swap-AB kernel takes.
__device__ __forceinline__ constexpr int position_of(int k) {
    return k % 32 / 4 * 16 + k % 4 / 2 * 8 + k / 32 * 2 + k % 2;
}

template <int DATA>
__device__ __forceinline__ void dequantize_tile(const DequantizePass& o, int index) {
    const Matrix& m = o.source.data;
    const Tile tile = tile_at(index, m.rows, m.columns);
    const Place<16> place;
    const int64_t row = tile.row + place.row, column = tile.column + place.column;
    const auto codes = load_codes<uint2, MX_BLOCK>(o.source, tile, row, column);
    auto* out = static_cast<kittens::bf16*>(o.source.out) + (tile.batch * m.rows + row) * o.pitch;
    if (o.swap_ab_order) {
        // Pairs of neighbours stay together.
        out += tile.column + position_of(place.column);
#pragma unroll
        for (int i = 0; i < CHUNK_ROWS; ++i) {
            if (row + i >= m.rows) break;
            float values[CHUNK];
            dequantize_chunk<DATA>(codes.word[i], codes.scale[i], values);
#pragma unroll
            for (int j = 0; j < CHUNK; j += 2) {
                const auto pair = kittens::pack_pair<kittens::bf16>(values[j], values[j + 1]);
                arch::store_global(reinterpret_cast<uint32_t*>(out + i * o.pitch + position_of(j)),
                                   bit_cast<uint32_t>(pair));
            }
        }
        return;
    }
    Matrix to = m;
    to.columns = o.pitch;
    store_rows(out + column, to, tile, row, column, [&](int i, float(&values)[CHUNK]) {
        dequantize_chunk<DATA>(codes.word[i], codes.scale[i], values);
    });
}

template <class Params, bool PORTABLE>
__global__ void __launch_bounds__(mxfp8_gemm::THREADS, 3) mxfp8_dequantize_pass_kernel(Params p) {
    // The swap-AB kernel may begin early, and load what was there before the pass; and the one for
    // the tiles of a mask, which are few. The kernel for many rows would only be in the way.
    if constexpr (!PORTABLE) {
        arch::wait_for_dependencies();
        if (p.ones != nullptr || p.mask.rows != nullptr) arch::launch_dependents();
    }
    if (p.mask.rows != nullptr &&
        !gemm::sm90::any_in_mask(p.mask, static_cast<uint32_t>(p.m), static_cast<uint32_t>(p.n))) {
        return;
    }
    for (int64_t i = int64_t{blockIdx.x} * THREADS + threadIdx.x; i < p.ones_count;
         i += int64_t{gridDim.x} * THREADS) {
        arch::store_global(p.ones + i, 1.f);
    }
    const int tiles = p.operands[0].tiles + p.operands[1].tiles;
    for (int i = static_cast<int>(blockIdx.x); i < tiles; i += static_cast<int>(gridDim.x)) {
        const bool second = i >= p.operands[0].tiles;
        const DequantizePass& o = p.operands[second ? 1 : 0];
        const int index = i - (second ? p.operands[0].tiles : 0);
        if (o.e5m2)
            dequantize_tile<int(DType::e5m2)>(o, index);
        else
            dequantize_tile<int(DType::e4m3)>(o, index);
    }
}

}  // namespace sm90

template <class Params, bool PORTABLE>
void run_pass(const Params& params, Stream stream) {
    if constexpr (std::is_same_v<Params, RescaleParams>) {
        const int blocks = params.operands[0].blocks + params.operands[1].blocks;
        if (blocks == 0) return;
        const auto launch = [&]<int WARPS>() {
            kittens::launch({.dependent = !PORTABLE},
                            sm90::mxfp8_rescale_pass_kernel<Params, WARPS, PORTABLE>, dim3(blocks),
                            dim3(WARPS * 32), dim3(1), 0, stream, params);
        };
        if (rescale_threads(blocks) == THREADS)
            launch.template operator()<sm90::RESCALE_WARPS>();
        else
            launch.template operator()<sm90::MOST_RESCALE_WARPS>();
    } else {
        kittens::launch({.dependent = !PORTABLE},
                        sm90::mxfp8_dequantize_pass_kernel<Params, PORTABLE>, dim3(params.blocks),
                        dim3(THREADS), dim3(1), 0, stream, params);
    }
}

}  // namespace thunderkittens::mxfp8_gemm
