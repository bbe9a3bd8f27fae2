// Four elements at a time: neighbours in memory, and 16 bytes of an accumulator's registers.
#pragma once

#include "csrc/common/dtype.h"
#include "kittens/kittens.cuh"

namespace thunderkittens::gemm {
namespace sm90 {

using namespace kittens;

// Loads four neighbouring values, or those of them that exist.
template <class T>
__device__ __forceinline__ void load_four(float (&to)[4], const T* from, bool aligned, int count) {
    if (aligned && count >= 4) {
        const auto run = arch::load_global(reinterpret_cast<const detail::elements<T, 4>*>(from));
#pragma unroll
        for (int i = 0; i < 4; ++i) to[i] = convert<float>(run.v[i]);
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            to[i] = i < count ? convert<float>(arch::load_global(from + i)) : 0.f;
        }
    }
}
template <class T>
__device__ __forceinline__ void store_four(T* to, const float (&from)[4], bool aligned, int count) {
    if (aligned && count >= 4) {
        detail::elements<T, 4> run;
#pragma unroll
        for (int i = 0; i < 4; ++i) run.v[i] = convert<T>(from[i]);
        arch::store_global(reinterpret_cast<detail::elements<T, 4>*>(to), run);
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i < count) arch::store_global(to + i, convert<T>(from[i]));
        }
    }
}

// Calls store(out) with an output that has its type.
template <class Store>
__device__ __forceinline__ void with_type(void* const& out, DType dtype, Store store) {
    if (dtype == DType::bf16)
        store(static_cast<bf16*>(out));
    else if (dtype == DType::fp16)
        store(static_cast<half*>(out));
    else
        store(static_cast<float*>(out));
}

// Of an accumulator of 16 x `rows`, a thread has rows / 8 times 16 bytes.
template <int rows>
__device__ __forceinline__ float4 vec4_of(const rt_fl<16, rows>& d, int i) {
    const auto& data = d.tiles[0][i / 2].data;
    const float2 low = data[i % 2 * 2], high = data[i % 2 * 2 + 1];
    return make_float4(low.x, low.y, high.x, high.y);
}
template <int rows>
__device__ __forceinline__ void add_vec4(rt_fl<16, rows>& d, int i, const float4& more) {
    auto& data = d.tiles[0][i / 2].data;
    float2 &low = data[i % 2 * 2], &high = data[i % 2 * 2 + 1];
    low.x += more.x, low.y += more.y, high.x += more.z, high.y += more.w;
}

}  // namespace sm90
}  // namespace thunderkittens::gemm
