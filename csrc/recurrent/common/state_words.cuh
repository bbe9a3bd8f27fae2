// States in memory, 16 bytes at a time, and sums over lanes, for kernels of a few tokens.
#pragma once

#include "kittens/kittens.cuh"

namespace thunderkittens::recurrent {

// 16 bytes of a state as they are in memory. Loads are of such words, so that no conversion makes
// one wait for another; they are told apart from numbers when all are on their way.
template <class S>
struct StateWord {
    static constexpr int elements = 16 / int(sizeof(S));

    static __device__ __forceinline__ uint4 load(const S* from) {
        return kittens::arch::load_global(reinterpret_cast<const uint4*>(from));
    }
    static __device__ __forceinline__ void unpack(float (&to)[elements], const uint4& word) {
        uint32_t w[4] = {word.x, word.y, word.z, word.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            // Not before: numbers of 16 bits take twice the registers.
            if constexpr (sizeof(S) == 2) kittens::arch::pin_register(w[i]);
            if constexpr (std::is_same_v<S, float>) {
                to[i] = kittens::arch::bit_cast<float>(w[i]);
            } else {
                const float2 two =
                    kittens::unpack_pair<S>(kittens::arch::bit_cast<kittens::packed_type<S>>(w[i]));
                to[2 * i] = two.x, to[2 * i + 1] = two.y;
            }
        }
    }
    static __device__ __forceinline__ void store(S* to, const float (&from)[elements]) {
        uint32_t w[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if constexpr (std::is_same_v<S, float>) {
                w[i] = kittens::arch::bit_cast<uint32_t>(from[i]);
            } else {
                w[i] = kittens::arch::bit_cast<uint32_t>(
                    kittens::pack_pair<S>(from[2 * i], from[2 * i + 1]));
            }
        }
        kittens::arch::store_global_whole(to, uint4{w[0], w[1], w[2], w[3]});
    }
};

// The same number, such that what is computed of it is computed again: kept over a loop, addresses
// of a thread's words would take two registers each.
__device__ __forceinline__ int64_t computed_again(int64_t x) {
    uint32_t low = uint32_t(x), high = uint32_t(uint64_t(x) >> 32);
    kittens::arch::pin_register(low);
    kittens::arch::pin_register(high);
    return int64_t(uint64_t(high) << 32 | low);
}
__device__ __forceinline__ int computed_again(int x) {
    uint32_t word = uint32_t(x);
    kittens::arch::pin_register(word);
    return int(word);
}

// Neighbouring numbers of a vector in shared memory, from a multiple of four on.
template <int count, class Vector>
__device__ __forceinline__ void load_row(float (&to)[count], const Vector& from, int first) {
    static_assert(count % 4 == 0);
#pragma unroll
    for (int i = 0; i < count; i += 4) {
        const auto x = kittens::arch::load_shared<float4>(from.address_of(first + i));
        to[i] = x.x, to[i + 1] = x.y, to[i + 2] = x.z, to[i + 3] = x.w;
    }
}

// Sums of `count` numbers over the lanes that differ in the bits of their numbers from `low` to
// `high`, of which each lane keeps a part, at the beginning of x: it hands over half of what it has
// and adds what it is given to the other half, for each bit. With all sums in all lanes that would
// take `count` shuffles for each bit. Lanes in order of those bits have the parts in order; with
// more lanes than numbers, neighbours have the same sum.
template <int high, int low, int count>
__device__ __forceinline__ void scatter_sums(float (&x)[count]) {
    int have = count;
#pragma unroll
    for (int distance = high; distance >= low; distance /= 2) {
        if (have == 1) {
            x[0] += kittens::arch::shuffle_xor(x[0], distance);
            continue;
        }
        have /= 2;
        const bool upper = (kittens::laneid() & distance) != 0;
#pragma unroll
        for (int i = 0; i < count / 2; ++i) {
            if (i >= have) continue;
            const float give = upper ? x[i] : x[i + have], keep = upper ? x[i + have] : x[i];
            x[i] = keep + kittens::arch::shuffle_xor(give, distance);
        }
    }
}

}  // namespace thunderkittens::recurrent
