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

// BYTES at a multiple of ELEMENT on their way: the vectors that they lie in.
template <int BYTES, int ELEMENT>
struct Window {
    using Vector =
        std::conditional_t<BYTES >= 16, uint4, std::conditional_t<BYTES == 8, uint2, uint32_t>>;
    static constexpr int SIZE = sizeof(Vector), COUNT = BYTES / SIZE, WORDS = BYTES / 4;
    static_assert(BYTES % SIZE == 0);
    Vector vectors[COUNT + 1];

    static __device__ __forceinline__ uint32_t shift(uint64_t at) { return at % SIZE; }
    // The vectors of the first byte and of the last.
    static __device__ __forceinline__ uint64_t first(uint64_t at) { return at - shift(at); }
    static __device__ __forceinline__ uint64_t last(uint64_t at) { return first(at + BYTES - 1); }

    __device__ __forceinline__ void load(uint64_t at) {
        const auto* from = reinterpret_cast<const Vector*>(first(at));
#pragma unroll
        for (int i = 0; i < COUNT; ++i) vectors[i] = arch::load_global_readonly(from + i);
        vectors[COUNT] = Vector{};
        if (shift(at) != 0) vectors[COUNT] = arch::load_global_readonly(from + COUNT);
    }
    // The words at `at`, which was loaded.
    __device__ __forceinline__ void words(uint64_t at, uint32_t (&to)[WORDS]) const {
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
    }
};

// Zeros from byte `count` on.
template <int WORDS>
__device__ __forceinline__ void clear_from(int count, uint32_t (&words)[WORDS]) {
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
        const int left = count - 4 * i;
        if (left < 4) words[i] = left <= 0 ? 0 : words[i] & ((1u << 8 * left) - 1);
    }
}

// The first `count` bytes at `at`, by elements, and zeros.
template <int ELEMENT, int WORDS>
__device__ __forceinline__ void load_elements(uint64_t at, int count, uint32_t (&to)[WORDS]) {
    using Element = std::conditional_t<ELEMENT == 4, uint32_t,
                                       std::conditional_t<ELEMENT == 2, uint16_t, uint8_t>>;
#pragma unroll
    for (int w = 0; w < WORDS; ++w) to[w] = 0;
#pragma unroll
    for (int i = 0; i < 4 * WORDS; i += ELEMENT) {
        if (i >= count) break;
        const uint32_t element =
            arch::load_global_readonly(reinterpret_cast<const Element*>(at + i));
        to[i / 4] |= element << i % 4 * 8;
    }
}

// Pieces of BYTES, at most `PIECES` of them, of which `pieces` are there: piece i lies at address
// at(i), which grows with i, and has count(i) bytes, the last of them the fewest, of which the
// words to(i) are made; zeros are where there are fewer. AT_ONCE of them are on their way at once;
// 80 registers suffice for WINDOWS. A thread whose vectors might reach beyond the span, because it
// has the first bytes or the last, loads elements.
constexpr int WINDOWS = 3;
template <int BYTES, int ELEMENT, int PIECES, int AT_ONCE = WINDOWS, class At, class Count,
          class To>
__device__ __forceinline__ void load_unaligned(const Span& span, int pieces, At at, Count count,
                                               To to) {
    using Pieces = Window<BYTES, ELEMENT>;
    const bool inside = pieces > 0 && Pieces::first(at(0)) >= span.begin &&
                        Pieces::last(at(pieces - 1)) + Pieces::SIZE <= span.end;
    if (!inside) {
#pragma unroll
        for (int i = 0; i < PIECES; ++i) {
            load_elements<ELEMENT>(at(i), i < pieces ? count(i) : 0, to(i));
        }
        return;
    }
#pragma unroll
    for (int first = 0; first < PIECES; first += AT_ONCE) {
        // A branch, across which the compiler does not move loads: it would spill.
        if (first >= pieces) break;
        Pieces windows[AT_ONCE];
        // Where there is no piece, the last one is loaded again: that takes no branch.
#pragma unroll
        for (int i = 0; i < AT_ONCE && first + i < PIECES; ++i)
            windows[i].load(at(min(first + i, pieces - 1)));
#pragma unroll
        for (int i = 0; i < AT_ONCE && first + i < PIECES; ++i) {
            windows[i].words(at(first + i), to(first + i));
        }
    }
    if (pieces >= PIECES && count(PIECES - 1) >= BYTES) return;
#pragma unroll
    for (int i = 0; i < PIECES; ++i) clear_from(i < pieces ? count(i) : 0, to(i));
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

// Rows of BYTES that a warp has staged one behind the other, at most ROWS of them, to rows that are
// `pitch` bytes apart from `to` on; of each the first `count` bytes. Called by whole warps.
template <int BYTES, int ROWS>
__device__ __forceinline__ void store_unaligned_rows(uint8_t* to, int64_t pitch, int64_t rows,
                                                     int64_t count, uint32_t staged) {
    constexpr int AT_ONCE = BYTES < 128 ? 128 / BYTES : 1;
    const int last = static_cast<int>(min(rows, int64_t{ROWS}));
    const int bytes = static_cast<int>(min(count, int64_t{BYTES}));
    arch::sync_warp();
    if (bytes <= 0) return;
#pragma unroll 4
    for (int i = AT_ONCE == 1 ? 0 : kittens::laneid() / (BYTES / 4); i < last; i += AT_ONCE) {
        store_unaligned<BYTES>(to + i * pitch, staged + i * BYTES, 0, bytes);
    }
}

}  // namespace sm90
}  // namespace thunderkittens::gemm
