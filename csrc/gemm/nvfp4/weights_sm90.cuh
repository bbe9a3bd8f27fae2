// NVFP4 weights as swap_ab/nvfp4_sm90.cuh takes them: pieces of 64 x 64 elements, and how a thread
// makes fragments of them.
//
// A product of 16 of k takes one block of 16 elements of each of 64 rows. A thread has eight
// elements of it, a 32-bit word: rows r and r + 8, columns 2 q, 2 q + 1 and 8 more, with
// r = 16 * warp + lane / 4 and q = lane % 4. A piece is four strips, one per warp and its 16 rows:
// a 16-byte word per thread, four products, and then for each r eight bytes of scales: (r, 0),
// (r, 1), (r + 8, 0), (r + 8, 1), and the same of products 2 and 3.
//
// An element is four bits, s e e m. In either half of the word four of them lie so that shifts,
// which need not be one per bit, bring each to where a 16-bit float has them: the sign in the
// highest bit, the exponent's in its lowest two, m in the highest of the mantissa. That is the
// element times a power of two, subnormal or not, and one product with the scale makes it the
// element times the scale over 128, exactly. (The 128 keep the scale itself within a bf16.)
//
// A scale is an unsigned byte eeeeemmm, the e4m3 value 2^(e - 10) * (1 + m / 8), so that a shift
// and an addition make a float of it: subnormals of e4m3 are normal here, and NaN is
// e = 19, which becomes the exponent of NaN. Zero, and the sign of a negative scale, are in the
// elements.
#pragma once

#include "csrc/gemm/nvfp4/nvfp4_gemm.h"
#include "kittens/kittens.cuh"

namespace thunderkittens::nvfp4_gemm {
namespace sm90 {

using namespace kittens;

// Where the bits s, e, e, m of the elements of a half word lie, in the order of the fragment's
// registers: 9, 2, 1, 0; 13, 6, 5, 4; 3 of the other half, 12, 11, 10; 15, 8, 7, 14.
struct Nvfp4Weights {
    static constexpr int BYTES = PIECE_BYTES;
    static constexpr int STRIP = STRIP_BYTES;
    static constexpr int CODES = STRIP_ROWS * PIECE / 2;  // of a strip
    static constexpr float FACTOR = 128.f;                // that the sums have to be multiplied by

    struct Words {
        uint4 codes;
        uint2 scales;
    };
    static constexpr int LANE_CODES = sizeof(uint4);
    static __device__ __forceinline__ uint32_t scales_of(int lane) { return CODES + lane / 4 * 8; }
    static __device__ __forceinline__ Words load_words(uint32_t codes, uint32_t scales) {
        return {arch::load_shared<uint4>(codes), arch::load_shared<uint2>(scales)};
    }
    static __device__ __forceinline__ Words load_strip(uint32_t strip, int lane) {
        return load_words(strip + lane * LANE_CODES, strip + scales_of(lane));
    }
    static __device__ __forceinline__ Words load(uint32_t piece, int thread) {
        return load_strip(piece + thread / WARP_THREADS * STRIP, thread % WARP_THREADS);
    }

    // Of product k: (r, 2 q), (r + 8, 2 q), (r, 2 q + 8), (r + 8, 2 q + 8), pairs each.
    template <class T>
    static __device__ __forceinline__ void fragment(const Words& words, int k, uint32_t (&to)[4]) {
        const uint32_t codes[4] = {words.codes.x, words.codes.y, words.codes.z, words.codes.w};
        const uint32_t pairs = k < 2 ? words.scales.x : words.scales.y;
        // Rows r and r + 8 in the two halves.
        const uint32_t bytes = (k % 2 == 0 ? pairs : pairs >> 8) & 0x00ff00ffu;
        if constexpr (std::same_as<T, bf16>)
            elements_bf16(codes[k], bytes * 16 + 0x76007600u, to);
        else
            elements_fp16(codes[k], bytes * 128 + 0x30003000u, to);
    }
    template <class T>
    static __device__ __forceinline__ void fragments(const Words& words, rt<T, 16, PIECE>& to) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            uint32_t results[4];
            fragment<T>(words, k, results);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                to.tiles[0][k].data[i] = arch::bit_cast<packed_type<T>>(results[i]);
            }
        }
    }

  private:
    static __device__ __forceinline__ uint32_t rotate_right_4(uint32_t x) {
        return x >> 4 | x << 28;
    }
    static __device__ __forceinline__ void elements_bf16(uint32_t word, uint32_t scales,
                                                         uint32_t (&to)[4]) {
        constexpr uint32_t mask = 0x81c081c0;
        const uint32_t element[4] = {word << 6 & mask, word << 2 & mask,
                                     rotate_right_4(word) & mask,
                                     (word & 0x81808180u) | (word >> 8 & 0x00400040u)};
        to[0] = arch::multiply_by_half_bf16<0>(element[0], scales);
        to[1] = arch::multiply_by_half_bf16<1>(element[1], scales);
        to[2] = arch::multiply_by_half_bf16<0>(element[2], scales);
        to[3] = arch::multiply_by_half_bf16<1>(element[3], scales);
    }
    static __device__ __forceinline__ void elements_fp16(uint32_t word, uint32_t scales,
                                                         uint32_t (&to)[4]) {
        constexpr uint32_t sign = 0x80008000, rest = 0x0e000e00;
        const uint32_t element[4] = {
            (word << 6 & sign) | (word << 9 & rest), (word << 2 & sign) | (word << 5 & rest),
            (rotate_right_4(word) & sign) | (word >> 1 & rest),
            (word & sign) | (word << 3 & 0x0c000c00u) | (word >> 5 & 0x02000200u)};
        to[0] = arch::multiply_by_half_fp16<0>(element[0], scales);
        to[1] = arch::multiply_by_half_fp16<1>(element[1], scales);
        to[2] = arch::multiply_by_half_fp16<0>(element[2], scales);
        to[3] = arch::multiply_by_half_fp16<1>(element[3], scales);
    }
};

}  // namespace sm90
}  // namespace thunderkittens::nvfp4_gemm
