// Rows that begin at any byte, read and written in words all the same.
//
// What is read lies in aligned vectors that reach beyond it: a thread loads those, and shifts their
// bytes into place; a neighbour's loads hit the same lines of L1. What is written comes from shared
// memory, where a row lies at a multiple of its size: each lane takes two words there, and makes of
// them the one that is a word in memory as well. Fewer than four bytes are left at either end.
#pragma once

#include <type_traits>

#include "kittens/kittens.cuh"

namespace thunderkittens::gemm {
namespace sm90 {

namespace arch = kittens::arch;

// Addresses around all bytes of a tensor: nothing else is read.
struct Span {
    uint64_t begin, end;
};

// A vector at a multiple of its size; bytes outside the span are zeros.
template <class Vector>
__device__ __forceinline__ Vector load_within(const Span& span, uint64_t at) {
    constexpr uint32_t BYTES = sizeof(Vector);
    if (at >= span.begin && at + BYTES <= span.end) {
        return arch::load_global_readonly(reinterpret_cast<const Vector*>(at));
    }
    struct Words {
        uint32_t word[BYTES / 4] = {};
    } words;
#pragma unroll 1
    for (uint32_t i = 0; i < BYTES; ++i) {
        if (at + i < span.begin || at + i >= span.end) continue;
        const uint32_t byte = arch::load_global_readonly(reinterpret_cast<const uint8_t*>(at + i));
#pragma unroll
        for (uint32_t w = 0; w < BYTES / 4; ++w) {
            if (i / 4 == w) words.word[w] |= byte << i % 4 * 8;
        }
    }
    return arch::bit_cast<Vector>(words);
}

// BYTES at a multiple of ELEMENT on their way: the vectors that they lie in.
template <int BYTES, int ELEMENT>
struct Window {
    using Vector =
        std::conditional_t<BYTES >= 16, uint4, std::conditional_t<BYTES == 8, uint2, uint32_t>>;
    static constexpr int SIZE = sizeof(Vector), COUNT = BYTES / SIZE, WORDS = BYTES / 4;
    static_assert(BYTES % SIZE == 0);
    Vector vectors[COUNT + 1];

    static __device__ __forceinline__ uint32_t shift(uint64_t at) { return at % SIZE; }

    __device__ __forceinline__ void load(const Span& span, uint64_t at) {
        const uint64_t first = at - shift(at);
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            vectors[i] = load_within<Vector>(span, first + i * SIZE);
        }
        if (shift(at) != 0) vectors[COUNT] = load_within<Vector>(span, first + COUNT * SIZE);
    }
    // The words at `at`, which was loaded, of which the first `count` bytes are not zero.
    __device__ __forceinline__ void words(uint64_t at, int count, uint32_t (&to)[WORDS]) const {
        constexpr int ALL = WORDS + SIZE / 4;
        struct Words {
            uint32_t word[ALL];
        };
        auto all = arch::bit_cast<Words>(vectors);
        uint32_t(&w)[ALL] = all.word;
        const uint32_t by = shift(at);
        if constexpr (SIZE == 16) {
#pragma unroll
            for (int i = 0; i < ALL - 2; ++i) w[i] = by & 8 ? w[i + 2] : w[i];
        }
        if constexpr (SIZE >= 8) {
#pragma unroll
            for (int i = 0; i < WORDS + (ELEMENT < 4); ++i) w[i] = by & 4 ? w[i + 1] : w[i];
        }
#pragma unroll
        for (int i = 0; i < WORDS; ++i) {
            to[i] = w[i];
            if constexpr (ELEMENT < 4) {
                to[i] = arch::permute_bytes(w[i], w[i + 1], 0x3210 + by % 4 * 0x1111);
            }
        }
        if (count >= BYTES) return;
#pragma unroll
        for (int i = 0; i < WORDS; ++i) {
            const int left = count - 4 * i;
            if (left < 4) to[i] = left <= 0 ? 0 : to[i] & ((1u << 8 * left) - 1);
        }
    }
};

// Pieces of BYTES, `pieces` of them, of which piece i lies at address at(i), and has count(i) bytes
// (none where that is not positive), to the words to(i). So many are on their way at once as
// registers suffice for.
constexpr int WINDOWS = 4;
template <int BYTES, int ELEMENT, int pieces, class At, class Count, class To>
__device__ __forceinline__ void load_unaligned(const Span& span, At at, Count count, To to) {
    static_assert(pieces % WINDOWS == 0);
#pragma unroll
    for (int first = 0; first < pieces; first += WINDOWS) {
        Window<BYTES, ELEMENT> windows[WINDOWS];
#pragma unroll
        for (int i = 0; i < WINDOWS; ++i) {
            windows[i] = {};
            if (count(first + i) > 0) windows[i].load(span, at(first + i));
        }
#pragma unroll
        for (int i = 0; i < WINDOWS; ++i) {
            windows[i].words(at(first + i), count(first + i), to(first + i));
        }
    }
}

// The first `count` bytes of a row of BYTES in shared memory, at `row`, to any address. Called by
// as many neighbouring lanes as the row has words, or by a warp; they meet in no bank, as long as
// the row is permuted by an exclusive or with `swizzle`, a multiple of 4, alone.
template <int BYTES>
__device__ __forceinline__ void store_unaligned(uint8_t* to, uint32_t row, uint32_t swizzle,
                                                int count) {
    constexpr int WORDS = BYTES / 4, LANES = WORDS < 32 ? WORDS : 32;
    static_assert(WORDS % LANES == 0 && (BYTES & (BYTES - 1)) == 0);
    const int lane = kittens::laneid() % LANES;
    // Before the first word of memory, in it, and behind the last.
    const int head = min(static_cast<int>(-reinterpret_cast<uint64_t>(to) % 4), count);
    const int words = (count - head) / 4, tail = (count - head) % 4;
#pragma unroll
    for (int j = 0; j < WORDS; j += LANES) {
        const int word = j + lane;
        if (word >= words) continue;
        const auto low = arch::load_shared<uint32_t>(row + (4 * word ^ swizzle));
        const auto high = arch::load_shared<uint32_t>(row + ((4 * word + 4) % BYTES ^ swizzle));
        arch::store_global(reinterpret_cast<uint32_t*>(to + head + 4 * word),
                           arch::permute_bytes(low, high, 0x3210 + head * 0x1111));
    }
    const bool first = lane < 4;
    if (lane % 4 < (first ? head : lane < 8 ? tail : 0)) {
        const int at = lane % 4 + (first ? 0 : count - tail);
        arch::store_global(to + at, arch::load_shared<uint8_t>(row + (at ^ swizzle)));
    }
}

}  // namespace sm90
}  // namespace thunderkittens::gemm
