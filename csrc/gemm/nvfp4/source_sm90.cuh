// The fused dequantization's source for NVFP4: prepared weights to 16 bits, see
// fused_dequant/fused_dequant_sm90.cuh.
#pragma once

#include "csrc/gemm/fused_dequant/fused_dequant_sm90.cuh"
#include "csrc/gemm/nvfp4/weights_sm90.cuh"

namespace thunderkittens::gemm {
namespace sm90 {

template <>
struct Dequantizer<Nvfp4Source> {
    static constexpr bool both = false;
    static constexpr int rows = nvfp4_gemm::PIECE;
    static constexpr int early = 0, late = REGION_K / nvfp4_gemm::PIECE;  // strips

    struct Factor {
        static constexpr bool activates = true;
        const float* value;
        __device__ __forceinline__ float times(float alpha) const {
            return alpha * arch::load_global(value);
        }
    };
    static __device__ __forceinline__ Factor factor(const Nvfp4Source& source) {
        return {source.factor};
    }

    // Strips of 16 rows of up to four pieces side by side.
    template <int, class T, class Meanwhile>
    static __device__ __forceinline__ void dequantize(const Nvfp4Source& source, bool, T* to,
                                                      int pitch, const DequantItem& item,
                                                      Meanwhile meanwhile) {
        constexpr int PIECE = nvfp4_gemm::PIECE, STRIPS = REGION_K / PIECE;
        const uint32_t columns = uint32_t(item.k + PIECE - 1) / PIECE;
        const uint32_t first = uint32_t(item.column) / PIECE, row = item.row;
        const int lane = arch::lane_again();
        // Offsets of 32 bits: registers are few.
        const uint32_t piece = (row / PIECE * columns + first) * Weights::BYTES +
                               row % PIECE / ITEM_ROWS * Weights::STRIP;
        const auto* strip = static_cast<const uint8_t*>(source.prepared) + piece;
        const int there = min(uint32_t{STRIPS}, columns - first);
        uint4 codes[STRIPS];
#pragma unroll
        for (int i = 0; i < STRIPS; ++i) {
            if (i < there) {
                codes[i] = arch::load_global_readonly(
                    reinterpret_cast<const uint4*>(strip + i * Weights::BYTES) + lane);
            }
        }
        // The scales that four lanes share, of a strip each.
        const auto scales = arch::load_global_readonly(
            reinterpret_cast<const uint2*>(strip + min(lane % 4, there - 1) * Weights::BYTES +
                                           Weights::CODES) +
            lane / 4);
        meanwhile();
        // The even one of two lanes writes the first four columns of the eight that they share.
        const int again = arch::lane_again();
        const bool odd = again % 2 != 0;
        to += (row + again / 4) * pitch + item.column + again % 4 * 2 + (odd ? 6 : 0);
#pragma unroll
        for (int i = 0; i < STRIPS; ++i) {
            if (i >= there) break;
            uint32_t pairs = arch::shuffle(scales.x, again / 4 * 4 + i);
            const uint32_t later = arch::shuffle(scales.y, again / 4 * 4 + i);
#pragma unroll 1
            for (int k = 0; k < 4; ++k, to += 16) {
                store(codes[i].x, pairs, to, pitch, odd);
                codes[i] = {codes[i].y, codes[i].z, codes[i].w, codes[i].x};
                pairs = k == 1 ? later : pairs >> 8;
            }
        }
    }

  private:
    using Weights = nvfp4_gemm::sm90::Nvfp4Weights;

    // A lane has the pairs of columns 2 q and 2 q + 8 of 16, q = lane % 4: two lanes exchange one
    // each, so that four write 32 bytes of a row.
    template <class T>
    static __device__ __forceinline__ void store(uint32_t codes, uint32_t scales, T* to, int pitch,
                                                 bool odd) {
        rt<T, 16, nvfp4_gemm::PIECE> values;
        Weights::fragments({{codes, 0, 0, 0}, {scales, 0}}, values);
        const auto& data = values.tiles[0][0].data;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint32_t low = arch::bit_cast<uint32_t>(data[half]);
            const uint32_t high = arch::bit_cast<uint32_t>(data[half + 2]);
            const uint32_t other = arch::shuffle_xor(odd ? low : high, 1);
            arch::store_global(reinterpret_cast<uint2*>(to + half * 8 * uint32_t(pitch)),
                               odd ? uint2{other, high} : uint2{low, other});
        }
    }
};

}  // namespace sm90
}  // namespace thunderkittens::gemm
