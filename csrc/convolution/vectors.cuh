// Neighbours in memory as vectors of words, coefficients in registers, and the activation: what the
// kernels of convolutions read, compute with and write.
#pragma once

#include <type_traits>

#include "csrc/convolution/convolution.h"
#include "csrc/gemm/common/activation_sm90.cuh"
#include "kittens/kittens.cuh"

namespace thunderkittens::convolution {

namespace arch = kittens::arch;
using arch::bit_cast;

template <int DTYPE>
using element_of =
    std::conditional_t<DTYPE == int(DType::fp32), float,
                       std::conditional_t<DTYPE == int(DType::bf16), kittens::bf16, kittens::half>>;

// N neighbours, which begin at a multiple of their size; a single one may be of 16 bits.
template <class T, int N>
struct Neighbours {
    static constexpr int BYTES = N * sizeof(T), WORDS = BYTES < 4 ? 1 : BYTES / 4;
    using Memory = std::conditional_t<
        BYTES == 2, uint16_t,
        std::conditional_t<BYTES == 4, uint32_t, std::conditional_t<BYTES == 8, uint2, uint4>>>;
    static_assert(BYTES == sizeof(Memory));
    uint32_t words[WORDS];

    __device__ __forceinline__ void load(const T* from) {
        const auto memory = arch::load_global_readonly(reinterpret_cast<const Memory*>(from));
        if constexpr (BYTES == 2) {
            words[0] = memory;
        } else {
            *this = bit_cast<Neighbours>(memory);
        }
    }
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < WORDS; ++i) words[i] = 0;
    }
    __device__ __forceinline__ float value(int i) const {
        if constexpr (std::is_same_v<T, float>) {
            return bit_cast<float>(words[i]);
        } else if constexpr (std::is_same_v<T, kittens::bf16>) {
            return bit_cast<float>(i % 2 == 0 ? words[i / 2] << 16 : words[i / 2] & 0xffff0000u);
        } else {
            const auto word = bit_cast<kittens::packed_type<T>>(words[i / 2]);
            const float2 pair = kittens::unpack_pair<T>(word);
            return i % 2 == 0 ? pair.x : pair.y;
        }
    }
    // Rounds the values of a word.
    __device__ __forceinline__ void set_word(int word, float low, float high) {
        if constexpr (std::is_same_v<T, float>) {
            words[word] = bit_cast<uint32_t>(low);
        } else {
            words[word] = bit_cast<uint32_t>(kittens::pack_pair<T>(low, high));
        }
    }
    __device__ __forceinline__ void store(T* to) const {
        if constexpr (BYTES == 2) {
            arch::store_global(reinterpret_cast<Memory*>(to), static_cast<uint16_t>(words[0]));
        } else if constexpr (BYTES == 16) {
            arch::store_global_whole(to, bit_cast<uint4>(words));
        } else {
            arch::store_global(reinterpret_cast<Memory*>(to), bit_cast<Memory>(words));
        }
    }
};
// Values of a word, of a vector of N.
template <class T, int N>
constexpr int PER_WORD = sizeof(T) == 4 || N == 1 ? 1 : 2;

template <class T, int N>
__device__ __forceinline__ Neighbours<T, N> rounded(const float (&values)[N]) {
    constexpr int PER = PER_WORD<T, N>;
    Neighbours<T, N> result;
#pragma unroll
    for (int i = 0; i < Neighbours<T, N>::WORDS; ++i) {
        result.set_word(i, values[PER * i], values[PER * i + PER - 1]);
    }
    return result;
}

template <class T>
__device__ __forceinline__ float load_element(const void* data, int64_t at) {
    return kittens::convert<float>(arch::load_global_readonly(static_cast<const T*>(data) + at));
}
template <class T>
__device__ __forceinline__ void store_element(void* data, int64_t at, float value) {
    arch::store_global(static_cast<T*>(data) + at, kittens::convert<T>(value));
}

// Coefficients from an element on, a multiple of their number, of either type: which one, all
// threads agree on.
template <class T, int COUNT>
__device__ __forceinline__ void load_coefficients(const Coefficients& from, int64_t at,
                                                  float (&to)[COUNT]) {
    const auto load = [&]<class Element>(const Element* data) {
        constexpr int MOST = 16 / sizeof(Element);
        constexpr int SIZE = COUNT % MOST == 0 ? MOST : COUNT % 4 == 0 ? 4 : COUNT % 2 == 0 ? 2 : 1;
#pragma unroll
        for (int i = 0; i < COUNT; i += SIZE) {
            Neighbours<Element, SIZE> vector;
            vector.load(data + at + i);
#pragma unroll
            for (int j = 0; j < SIZE; ++j) to[i + j] = vector.value(j);
        }
    };
    if (std::is_same_v<T, float> || from.wide)
        load(static_cast<const float*>(from.data));
    else
        load(static_cast<const T*>(from.data));
}
// The taps and the bias of V channels.
template <class T, int V, int WIDTH>
struct Taps {
    float taps[V * WIDTH];  // of a channel after those of another, as in memory
    float bias[V];

    __device__ __forceinline__ void load(const Coefficients& weight, const Coefficients& biases,
                                         int64_t channel) {
        load_coefficients<T>(weight, channel * WIDTH, taps);
#pragma unroll
        for (int v = 0; v < V; ++v) bias[v] = 0.0f;
        if (biases.data != nullptr) load_coefficients<T>(biases, channel, bias);
    }
    __device__ __forceinline__ float tap(int v, int w) const { return taps[v * WIDTH + w]; }
};

// The lane of the warp that is so far beside one of a row of lanes, around its end.
__device__ __forceinline__ int lane_beside(int lane, int lanes, int distance) {
    const int in_warp = static_cast<int>(threadIdx.x) % 32;
    return in_warp - lane + ((lane + distance) & (lanes - 1));
}
// Of vectors of 16 bytes in the lanes of a row, which then go on by the row: the one before each,
// as far as it has the WIDTH - 1 elements before it. The first lane's is the last one's of before.
template <class T, int WIDTH>
struct Preceding {
    using Vector = Neighbours<T, 16 / sizeof(T)>;
    static constexpr int HALO = ((WIDTH - 1) * sizeof(T) + 3) / 4, FROM = 4 - HALO;
    const int source;
    const bool is_last;
    Vector carried;  // the last lane's of the vectors before

    __device__ __forceinline__ Preceding(int lane, int lanes)
        : source(lane_beside(lane, lanes, -1)), is_last(lane == lanes - 1) {
        carried.clear();
    }
    __device__ __forceinline__ Vector before(const Vector& now) {
        Vector result;
#pragma unroll
        for (int i = FROM; i < 4; ++i) {
            const uint32_t given = is_last ? carried.words[i] : now.words[i];
            result.words[i] = arch::shuffle(given, source);
            carried.words[i] = now.words[i];
        }
        return result;
    }
};

// 1 / (1 + exp(-x)), as exactly as results of this type need it.
template <class T>
__device__ __forceinline__ float sigmoid(float x) {
    if constexpr (std::is_same_v<T, float>) {
        return gemm::sm90::sigmoid(x).value;
    } else {
        constexpr float LOG2_E = 1.4426950408889634f;
        return arch::reciprocal_approx(1.0f + arch::exp2_approx(-LOG2_E * x));
    }
}
template <class T>
__device__ __forceinline__ float silu(float x) {
    return x * sigmoid<T>(x);
}
// The gradient of SiLU's argument, from that of its result.
template <class T>
__device__ __forceinline__ float through_silu(float x, float gradient) {
    const float s = sigmoid<T>(x), scaled = gradient * s;
    return fmaf(scaled, fmaf(-s, x, x), scaled);
}

}  // namespace thunderkittens::convolution
