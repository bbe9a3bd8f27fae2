// Typed loads and stores of shared memory (32-bit addresses), of another block's shared memory, and
// of global memory with cache hints. The memory clobbers keep them ordered with barriers.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace kittens::inline on_gpu {
namespace arch {

template <int BYTES>
struct word;
template <>
struct word<1> {
    using type = uint8_t;
};
template <>
struct word<2> {
    using type = uint16_t;
};
template <>
struct word<4> {
    using type = uint32_t;
};
template <>
struct word<8> {
    using type = uint2;
};
template <>
struct word<16> {
    using type = uint4;
};
template <class T>
using word_of = typename word<sizeof(T)>::type;

template <class To, class From>
__device__ __forceinline__ To bit_cast(const From& from) {
    static_assert(sizeof(To) == sizeof(From), "bit_cast needs types of equal size");
    To to;
    __builtin_memcpy(&to, &from, sizeof(To));
    return to;
}

template <class T>
__device__ __forceinline__ T load_shared(uint32_t address) {
    if constexpr (sizeof(T) == 1) {
        uint32_t v;
        asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
        return bit_cast<T>(static_cast<uint8_t>(v));
    } else if constexpr (sizeof(T) == 2) {
        uint16_t v;
        asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(address) : "memory");
        return bit_cast<T>(v);
    } else if constexpr (sizeof(T) == 4) {
        uint32_t v;
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
        return bit_cast<T>(v);
    } else if constexpr (sizeof(T) == 8) {
        uint2 v;
        asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                     : "=r"(v.x), "=r"(v.y)
                     : "r"(address)
                     : "memory");
        return bit_cast<T>(v);
    } else {
        static_assert(sizeof(T) == 16, "shared memory is accessed in 1, 2, 4, 8 or 16 bytes");
        uint4 v;
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                     : "r"(address)
                     : "memory");
        return bit_cast<T>(v);
    }
}

template <class T>
__device__ __forceinline__ void store_shared(uint32_t address, const T& value) {
    if constexpr (sizeof(T) == 1) {
        asm volatile("st.shared.u8 [%0], %1;" ::"r"(address),
                     "r"(static_cast<uint32_t>(bit_cast<uint8_t>(value)))
                     : "memory");
    } else if constexpr (sizeof(T) == 2) {
        asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(bit_cast<uint16_t>(value))
                     : "memory");
    } else if constexpr (sizeof(T) == 4) {
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(bit_cast<uint32_t>(value))
                     : "memory");
    } else if constexpr (sizeof(T) == 8) {
        const uint2 v = bit_cast<uint2>(value);
        asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(v.x), "r"(v.y)
                     : "memory");
    } else {
        static_assert(sizeof(T) == 16, "shared memory is accessed in 1, 2, 4, 8 or 16 bytes");
        const uint4 v = bit_cast<uint4>(value);
        asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y),
                     "r"(v.z), "r"(v.w)
                     : "memory");
    }
}

// Shared memory of another block of the cluster; the address comes from `map_shared_rank`.
template <class T>
__device__ __forceinline__ T load_cluster_shared(uint32_t address) {
    if constexpr (sizeof(T) == 4) {
        uint32_t v;
        asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
        return bit_cast<T>(v);
    } else if constexpr (sizeof(T) == 2) {
        uint16_t v;
        asm volatile("ld.shared::cluster.u16 %0, [%1];" : "=h"(v) : "r"(address) : "memory");
        return bit_cast<T>(v);
    } else {
        static_assert(sizeof(T) == 16, "cluster shared memory is accessed in 2, 4 or 16 bytes");
        uint4 v;
        asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                     : "r"(address)
                     : "memory");
        return bit_cast<T>(v);
    }
}
template <class T>
__device__ __forceinline__ void store_cluster_shared(uint32_t address, const T& value) {
    if constexpr (sizeof(T) == 4) {
        asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(address),
                     "r"(bit_cast<uint32_t>(value))
                     : "memory");
    } else if constexpr (sizeof(T) == 2) {
        asm volatile("st.shared::cluster.u16 [%0], %1;" ::"r"(address),
                     "h"(bit_cast<uint16_t>(value))
                     : "memory");
    } else {
        static_assert(sizeof(T) == 16, "cluster shared memory is accessed in 2, 4 or 16 bytes");
        const uint4 v = bit_cast<uint4>(value);
        asm volatile("st.shared::cluster.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x),
                     "r"(v.y), "r"(v.z), "r"(v.w)
                     : "memory");
    }
}

// Global memory goes through plain pointers of the right width; the functions exist so that a
// kernel never forms a reference to global memory itself.
template <class T>
__device__ __forceinline__ T load_global(const T* pointer) {
    // By value: bit_cast of a reference to memory would copy byte by byte.
    const word_of<T> value = *reinterpret_cast<const word_of<T>*>(pointer);
    return bit_cast<T>(value);
}
template <class T>
__device__ __forceinline__ void store_global(T* pointer, const T& value) {
    *reinterpret_cast<word_of<T>*>(pointer) = bit_cast<word_of<T>>(value);
}
// Adds four floats in memory, each atomically, without returning them; 16-byte aligned.
__device__ __forceinline__ void reduce_add_global(float* pointer, const float4& value) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(pointer),
                 "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w)
                 : "memory");
}
// Adds to an integer in memory and returns what was there.
__device__ __forceinline__ int fetch_add_global(int* pointer, int value) {
    return atomicAdd(pointer, value);
}
// The larger of a number in memory and `value` takes its place.
__device__ __forceinline__ void reduce_max_global(uint32_t* pointer, uint32_t value) {
    atomicMax(pointer, value);
}
// A flag between blocks: what was written before the release is seen after the acquire.
__device__ __forceinline__ int load_acquire_global(const int* pointer) {
    int value;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(pointer) : "memory");
    return value;
}
__device__ __forceinline__ void store_release_global(int* pointer, int value) {
    asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(pointer), "r"(value) : "memory");
}
// The same of flags of 64 bits.
__device__ __forceinline__ uint64_t load_acquire_global(const uint64_t* pointer) {
    uint64_t value;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(pointer) : "memory");
    return value;
}
__device__ __forceinline__ void store_release_global(uint64_t* pointer, uint64_t value) {
    asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(pointer), "l"(value) : "memory");
}
// Read-only data that this kernel never writes (ld.global.nc).
template <class T>
__device__ __forceinline__ T load_global_readonly(const T* pointer) {
    return bit_cast<T>(__ldg(reinterpret_cast<const word_of<T>*>(pointer)));
}
// Such data where a condition holds, else zeros: without a branch, so that several such loads are
// on their way together.
__device__ __forceinline__ uint4 load_global_readonly_if(bool condition, const uint4* pointer) {
    uint4 v{};
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n"
        "@p ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];\n}\n"
        : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
        : "l"(pointer), "r"(static_cast<int>(condition)));
    return v;
}

// Counters by which blocks hand memory over to each other, see fences.cuh. claim_global is
// fetch_add_global of 1 below 2^31, whose answer may come later: additions by one lane of a warp
// are taken for additions by all of it, and waited for.
__device__ __forceinline__ int claim_global(int* counter) {
    int value;
    asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], 0x7fffffff;"
                 : "=r"(value)
                 : "l"(counter)
                 : "memory");
    return value;
}
__device__ __forceinline__ void count_global(int* counter) {
    asm volatile("red.relaxed.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
}
__device__ __forceinline__ int load_relaxed_global(const int* pointer) {
    int value;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(pointer) : "memory");
    return value;
}
// Of 16 bytes at once, which the compiler otherwise divides at times.
__device__ __forceinline__ void store_global_whole(void* to, const uint4& value) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(value.x), "r"(value.y),
                 "r"(value.z), "r"(value.w)
                 : "memory");
}

}  // namespace arch
}  // namespace kittens::inline on_gpu
