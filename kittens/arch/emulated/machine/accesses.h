// Loads and stores of threads: of shared memory, the block's own or another's of its cluster, of
// global memory, atomic operations and flags there.
#pragma once

#include <atomic>

#include "global_order.h"

namespace kittens::inline on_cpu {
namespace emulated {

void read_shared(uint32_t address, void* to, uint32_t bytes, const char* what) {
    const Place p = place_of(address);
    check_shared(p, bytes, bytes, what);
    note_read(p, bytes, what);
    std::memcpy(to, p.block->shared + p.address, bytes);
}
void write_shared(uint32_t address, const void* from, uint32_t bytes, const char* what) {
    const Place p = place_of(address);
    check_shared(p, bytes, bytes, what);
    note_write(p, bytes, what);
    std::memcpy(p.block->shared + p.address, from, bytes);
}

inline void check_global_alignment(const void* pointer, size_t bytes, const char* what) {
    if (reinterpret_cast<uintptr_t>(pointer) % bytes != 0) {
        fail(std::string(what) + " of global address " + hex(reinterpret_cast<uintptr_t>(pointer)) +
             ", which is not a multiple of " + std::to_string(bytes) + " bytes");
    }
}
void read_global(const void* pointer, void* to, uint32_t bytes) {
    const char* what = "load_global";
    check_global_alignment(pointer, bytes, what);
    access_global(pointer, bytes, GlobalAccess::read, what);
    std::memcpy(to, pointer, bytes);
}
void write_global(void* pointer, const void* from, uint32_t bytes) {
    const char* what = "store_global";
    check_global_alignment(pointer, bytes, what);
    access_global(pointer, bytes, GlobalAccess::write, what, from);
    std::memcpy(pointer, from, bytes);
}

// ---- atomic operations ----

void add_to_global(float* pointer, const float (&values)[4]) {
    const char* what = "reduce_add_global";
    check_global_alignment(pointer, sizeof(values), what);
    access_global(pointer, sizeof(values), GlobalAccess::add, what);
    for (int i = 0; i < 4; ++i) {
        std::atomic_ref<float>(pointer[i]).fetch_add(values[i], std::memory_order_relaxed);
    }
}
int fetch_add_global(int* pointer, int value) {
    access_global(pointer, sizeof(int), GlobalAccess::flag, "fetch_add_global");
    if (GlobalOrder* order = machine->grid->order) {
        order->acquire_relaxed(pointer);
        order->release(pointer, true, false);
    }
    return std::atomic_ref<int>(*pointer).fetch_add(value);
}
void raise_global(uint32_t* pointer, uint32_t value) {
    access_global(pointer, sizeof(uint32_t), GlobalAccess::add, "reduce_max_global");
    const std::atomic_ref<uint32_t> there(*pointer);
    uint32_t seen = there.load();
    while (seen < value && !there.compare_exchange_weak(seen, value)) {
    }
}

// ---- flags ----

// What polls such a flag lets the others go on, however often it asks.
template <class T>
inline T load_any_flag(const T* pointer, bool relaxed, const char* what) {
    check_global_alignment(pointer, sizeof(T), what);
    access_global(pointer, sizeof(T), GlobalAccess::flag_read, what);
    yield_turn();
    if (GlobalOrder* order = machine->grid->order) return order->acquire(pointer, relaxed);
    return __atomic_load_n(pointer, __ATOMIC_ACQUIRE);
}
template <class T>
inline void store_any_flag(T* pointer, T value, const char* what) {
    check_global_alignment(pointer, sizeof(T), what);
    access_global(pointer, sizeof(T), GlobalAccess::flag, what);
    if (GlobalOrder* order = machine->grid->order) order->release(pointer, false, true);
    __atomic_store_n(pointer, value, __ATOMIC_RELEASE);
}
int load_flag(const int* pointer, bool relaxed, const char* what) {
    return load_any_flag(pointer, relaxed, what);
}
uint64_t load_flag(const uint64_t* pointer, bool relaxed, const char* what) {
    return load_any_flag(pointer, relaxed, what);
}
void store_flag(int* pointer, int value, const char* what) { store_any_flag(pointer, value, what); }
void store_flag(uint64_t* pointer, uint64_t value, const char* what) {
    store_any_flag(pointer, value, what);
}

}  // namespace emulated
}  // namespace kittens::inline on_cpu
