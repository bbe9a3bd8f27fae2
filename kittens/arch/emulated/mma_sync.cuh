// mma.sync at warp scope: m16n8k16 for 16-bit and m16n8k32 for 8-bit operands. Hopper has no such
// instruction for the latter: the compiler converts them to half and makes two products of 16, of
// the first and of the second pair of every four along K, and adds C to their sum in float.
#pragma once

#include "products.h"

namespace kittens::inline on_cpu {
namespace arch {

namespace detail {
// Fragments: a lane's words 0-3 are A, 4-5 B, 6-9 C and then D, all as the instruction has them.
template <class A, class B, bool TO_HALF, class LoadC, class StoreD>
inline void multiply_fragments(emulated::Warp& w, LoadC load_c, StoreD store_d) {
    constexpr int per_word = 4 / int(sizeof(A));
    constexpr int K = 8 * per_word;
    constexpr auto half_arithmetic =
        emulated::Arithmetic{emulated::Element::half, emulated::Element::half, 25, 23, TO_HALF};
    constexpr auto arithmetic =
        emulated::Arithmetic{emulated::element_of<A>(), emulated::element_of<B>(), 25, 23, TO_HALF};
    float a[16 * K], b[K * 8], c[16 * 8];
    for (int l = 0; l < 32; ++l) {
        const uint32_t* words = w.lanes[size_t(l)].words;
        for (int i = 0; i < 4; ++i) {
            const int row = l / 4 + 8 * (i % 2), k = per_word * (l % 4) + 4 * per_word * (i / 2);
            emulated::to_floats(emulated::element_of<A>(), words + i, 4, a + row * K + k, 1);
        }
        for (int i = 0; i < 2; ++i) {
            const int k = per_word * (l % 4) + 4 * per_word * i;
            emulated::to_floats(emulated::element_of<B>(), words + 4 + i, 4, b + k * 8 + l / 4, 8);
        }
        for (int i = 0; i < 2; ++i) load_c(words + 6, i, c + (l / 4 + 8 * i) * 8 + 2 * (l % 4));
    }
    if constexpr (sizeof(A) == 2) {
        emulated::multiply(c, a, b, 16, 8, K, arithmetic);
    } else {
        float part_a[16 * 16], part_b[16 * 8], sum[16 * 8]{};
        for (int part = 0; part < 2; ++part) {
            for (int k = 0; k < 16; ++k) {
                const int from = k / 2 * 4 + 2 * part + k % 2;
                for (int i = 0; i < 16; ++i) part_a[i * 16 + k] = a[i * K + from];
                for (int j = 0; j < 8; ++j) part_b[k * 8 + j] = b[from * 8 + j];
            }
            emulated::multiply(sum, part_a, part_b, 16, 8, 16, half_arithmetic);
        }
        for (int i = 0; i < 16 * 8; ++i) {
            c[i] += sum[i];
            if (c[i] != c[i]) c[i] = std::bit_cast<float>(0x7fffffffu);
        }
    }
    for (int l = 0; l < 32; ++l) {
        for (int i = 0; i < 2; ++i) {
            store_d(w.lanes[size_t(l)].words + 6, i, c + (l / 4 + 8 * i) * 8 + 2 * (l % 4));
        }
    }
}
}  // namespace detail

template <class A, class B>
struct mma_sync {
    static void fma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                    const float (&c)[4]) {
        emulated::Lane& lane = emulated::own_lane();
        std::memcpy(lane.words, a, 16);
        std::memcpy(lane.words + 4, b, 8);
        std::memcpy(lane.words + 6, c, 16);
        emulated::warp_operation("mma.sync", [](emulated::Warp& w) {
            detail::multiply_fragments<A, B, false>(
                w, [](const uint32_t* c, int i, float* to) { std::memcpy(to, c + 2 * i, 8); },
                [](uint32_t* d, int i, const float* from) { std::memcpy(d + 2 * i, from, 8); });
        });
        std::memcpy(d, lane.words + 6, 16);
    }
};

inline void mma_sync_f16(uint32_t (&d)[2], const uint32_t (&a)[4], const uint32_t (&b)[2],
                         const uint32_t (&c)[2]) {
    emulated::Lane& lane = emulated::own_lane();
    std::memcpy(lane.words, a, 16);
    std::memcpy(lane.words + 4, b, 8);
    std::memcpy(lane.words + 6, c, 8);
    emulated::warp_operation("mma.sync", [](emulated::Warp& w) {
        detail::multiply_fragments<__half, __half, true>(
            w,
            [](const uint32_t* c, int i, float* to) {
                emulated::to_floats(emulated::Element::half, c + i, 4, to, 1);
            },
            [](uint32_t* d, int i, const float* from) {
                const __half2 packed = __floats2half2_rn(from[0], from[1]);
                std::memcpy(d + i, &packed, 4);
            });
    });
    std::memcpy(d, lane.words + 6, 8);
}

}  // namespace arch
}  // namespace kittens::inline on_cpu
