// Typed loads and stores of shared memory (32-bit addresses), of another block's shared memory, and
// of global memory.
#pragma once

#include <atomic>

#include "global_order.h"

namespace kittens::inline on_cpu {
namespace arch {

template <class To, class From>
inline To bit_cast(const From& from) {
    static_assert(sizeof(To) == sizeof(From), "bit_cast needs types of equal size");
    To to;
    std::memcpy(static_cast<void*>(&to), &from, sizeof(To));
    return to;
}

namespace detail {
template <class T>
inline void check_global_alignment(const T* pointer, const char* what) {
    if (reinterpret_cast<uintptr_t>(pointer) % sizeof(T) != 0) {
        emulated::fail(std::string(what) + " of global address " +
                       emulated::hex(reinterpret_cast<uintptr_t>(pointer)) +
                       ", which is not a multiple of " + std::to_string(sizeof(T)) + " bytes");
    }
}
}  // namespace detail

template <class T>
inline T load_shared(uint32_t address) {
    return emulated::read_shared<T>(address, "load_shared");
}
template <class T>
inline void store_shared(uint32_t address, const T& value) {
    emulated::write_shared(address, value, "store_shared");
}
template <class T>
inline T load_cluster_shared(uint32_t address) {
    return emulated::read_shared<T>(address, "load_cluster_shared");
}
template <class T>
inline void store_cluster_shared(uint32_t address, const T& value) {
    emulated::write_shared(address, value, "store_cluster_shared");
}

template <class T>
inline T load_global(const T* pointer) {
    detail::check_global_alignment(pointer, "load_global");
    emulated::access_global(pointer, sizeof(T), emulated::GlobalAccess::read, "load_global");
    T value;
    std::memcpy(static_cast<void*>(&value), pointer, sizeof(T));
    return value;
}
template <class T>
inline void store_global(T* pointer, const T& value) {
    detail::check_global_alignment(pointer, "store_global");
    emulated::access_global(pointer, sizeof(T), emulated::GlobalAccess::write, "store_global",
                            &value);
    std::memcpy(static_cast<void*>(pointer), &value, sizeof(T));
}
inline void reduce_add_global(float* pointer, const float4& value) {
    detail::check_global_alignment(reinterpret_cast<const float4*>(pointer), "reduce_add_global");
    emulated::access_global(pointer, sizeof(float4), emulated::GlobalAccess::add,
                            "reduce_add_global");
    const float values[4] = {value.x, value.y, value.z, value.w};
    for (int i = 0; i < 4; ++i) {
        std::atomic_ref<float>(pointer[i]).fetch_add(values[i], std::memory_order_relaxed);
    }
}
inline int fetch_add_global(int* pointer, int value) {
    emulated::access_global(pointer, sizeof(int), emulated::GlobalAccess::flag, "fetch_add_global");
    if (auto* order = emulated::machine->grid->order) {
        order->acquire_relaxed(pointer);
        order->release(pointer, true, false);
    }
    return std::atomic_ref<int>(*pointer).fetch_add(value);
}
inline void reduce_max_global(uint32_t* pointer, uint32_t value) {
    emulated::access_global(pointer, sizeof(uint32_t), emulated::GlobalAccess::add,
                            "reduce_max_global");
    const std::atomic_ref<uint32_t> there(*pointer);
    uint32_t seen = there.load();
    while (seen < value && !there.compare_exchange_weak(seen, value)) {
    }
}
namespace detail {
// What polls such a flag lets the others go on, however often it asks.
template <class T>
inline T load_flag(const T* pointer, bool relaxed, const char* what) {
    check_global_alignment(pointer, what);
    emulated::access_global(pointer, sizeof(T), emulated::GlobalAccess::flag_read, what);
    emulated::yield_turn();
    if (emulated::GlobalOrder* order = emulated::machine->grid->order) {
        return order->acquire(pointer, relaxed);
    }
    return __atomic_load_n(pointer, __ATOMIC_ACQUIRE);
}
template <class T>
inline void store_flag(T* pointer, T value, const char* what) {
    check_global_alignment(pointer, what);
    emulated::access_global(pointer, sizeof(T), emulated::GlobalAccess::flag, what);
    if (auto* order = emulated::machine->grid->order) order->release(pointer, false, true);
    __atomic_store_n(pointer, value, __ATOMIC_RELEASE);
}
}  // namespace detail
inline int load_acquire_global(const int* pointer) {
    return detail::load_flag(pointer, false, "load_acquire_global");
}
inline void store_release_global(int* pointer, int value) {
    detail::store_flag(pointer, value, "store_release_global");
}
template <class T>
inline T load_global_readonly(const T* pointer) {
    return load_global(pointer);
}

inline uint64_t load_acquire_global(const uint64_t* pointer) {
    return detail::load_flag(pointer, false, "load_acquire_global");
}
inline void store_release_global(uint64_t* pointer, uint64_t value) {
    detail::store_flag(pointer, value, "store_release_global");
}
inline int claim_global(int* counter) { return fetch_add_global(counter, 1); }
inline void count_global(int* counter) { fetch_add_global(counter, 1); }
inline int load_relaxed_global(const int* pointer) {
    return detail::load_flag(pointer, true, "load_relaxed_global");
}
inline void store_global_whole(void* to, const uint4& value) {
    store_global(static_cast<uint4*>(to), value);
}

}  // namespace arch
}  // namespace kittens::inline on_cpu
