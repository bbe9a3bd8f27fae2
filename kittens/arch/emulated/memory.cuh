// Typed loads and stores of shared memory (32-bit addresses), of another block's shared memory, and
// of global memory.
#pragma once

#include "calls.h"

namespace kittens::inline on_cpu {
namespace arch {

template <class To, class From>
inline To bit_cast(const From& from) {
    static_assert(sizeof(To) == sizeof(From), "bit_cast needs types of equal size");
    To to;
    std::memcpy(static_cast<void*>(&to), &from, sizeof(To));
    return to;
}

template <class T>
inline T load_shared(uint32_t address) {
    T value;
    emulated::read_shared(address, &value, sizeof(T), "load_shared");
    return value;
}
template <class T>
inline void store_shared(uint32_t address, const T& value) {
    emulated::write_shared(address, &value, sizeof(T), "store_shared");
}
template <class T>
inline T load_cluster_shared(uint32_t address) {
    T value;
    emulated::read_shared(address, &value, sizeof(T), "load_cluster_shared");
    return value;
}
template <class T>
inline void store_cluster_shared(uint32_t address, const T& value) {
    emulated::write_shared(address, &value, sizeof(T), "store_cluster_shared");
}

template <class T>
inline T load_global(const T* pointer) {
    T value;
    emulated::read_global(pointer, &value, sizeof(T));
    return value;
}
template <class T>
inline void store_global(T* pointer, const T& value) {
    emulated::write_global(pointer, &value, sizeof(T));
}
inline void reduce_add_global(float* pointer, const float4& value) {
    emulated::add_to_global(pointer, {value.x, value.y, value.z, value.w});
}
inline int fetch_add_global(int* pointer, int value) {
    return emulated::fetch_add_global(pointer, value);
}
inline void reduce_max_global(uint32_t* pointer, uint32_t value) {
    emulated::raise_global(pointer, value);
}
inline int load_acquire_global(const int* pointer) {
    return emulated::load_flag(pointer, false, "load_acquire_global");
}
inline void store_release_global(int* pointer, int value) {
    emulated::store_flag(pointer, value, "store_release_global");
}
template <class T>
inline T load_global_readonly(const T* pointer) {
    return load_global(pointer);
}
inline uint4 load_global_readonly_if(bool condition, const uint4* pointer) {
    return condition ? load_global(pointer) : uint4{};
}

inline uint64_t load_acquire_global(const uint64_t* pointer) {
    return emulated::load_flag(pointer, false, "load_acquire_global");
}
inline void store_release_global(uint64_t* pointer, uint64_t value) {
    emulated::store_flag(pointer, value, "store_release_global");
}
inline int claim_global(int* counter) { return fetch_add_global(counter, 1); }
inline void count_global(int* counter) { fetch_add_global(counter, 1); }
inline int load_relaxed_global(const int* pointer) {
    return emulated::load_flag(pointer, true, "load_relaxed_global");
}
inline void store_global_whole(void* to, const uint4& value) {
    store_global(static_cast<uint4*>(to), value);
}

}  // namespace arch
}  // namespace kittens::inline on_cpu
