// mma.sync at warp scope: m16n8k16 for 16-bit and m16n8k32 for 8-bit operands. Hopper has no such
// instruction for the latter: the compiler converts them to half and makes two products of 16, of
// the first and of the second pair of every four along K, and adds C to their sum in float.
#pragma once

#include "calls.h"

namespace kittens::inline on_cpu {
namespace arch {

template <class A, class B>
struct mma_sync {
    static void fma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                    const float (&c)[4]) {
        emulated::multiply_fragments(reinterpret_cast<uint32_t*>(d), a, b,
                                     reinterpret_cast<const uint32_t*>(c),
                                     emulated::element_of<A>(), emulated::element_of<B>(), false);
    }
};

inline void mma_sync_f16(uint32_t (&d)[2], const uint32_t (&a)[4], const uint32_t (&b)[2],
                         const uint32_t (&c)[2]) {
    emulated::multiply_fragments(d, a, b, c, emulated::Element::half, emulated::Element::half,
                                 true);
}

}  // namespace arch
}  // namespace kittens::inline on_cpu
