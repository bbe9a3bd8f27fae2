// Writes new keys and values into a cache, whose pages the device looks up: a thread has 16 bytes of
// a row. Keys may be rotated on the way.
#pragma once

#include "csrc/attention/decode/append.h"
#include "csrc/attention/decode/rotary.cuh"
#include "csrc/attention/layouts.cuh"

namespace thunderkittens::attention::decode {

constexpr int APPEND_THREADS = 256;

template <class T>
struct AppendGlobals {
    StridedRows<T> k, v;
    T *k_cache, *v_cache;
    Cache k_strides, v_strides;
    Pages pages;
    RotaryTable<T> rotary;
    const int64_t* slot_mapping;
    const int *k_lengths, *cu_new, *rotary_positions;
    int64_t slots;  // of the cache
    int tokens, row_count, batch, most_keys, heads, head_dim, value_dim;
};

// A token's place in the cache, and its position for rotary.
struct Place {
    int64_t page;
    int offset, position;
    bool exists;
};

template <class T>
__device__ __forceinline__ Place place_of(const AppendGlobals<T>& g, int token) {
    const int size = static_cast<int>(g.pages.page_size);
    Place place{};
    if (g.slot_mapping != nullptr) {
        const int64_t slot = arch::load_global_readonly(g.slot_mapping + token);
        place.exists = slot >= 0 && slot < g.slots;
        place.page = slot / size;
        place.offset = static_cast<int>(slot - place.page * size);
    } else {
        int b = 0, in_sequence = 0;
        if (g.cu_new == nullptr) {
            b = token / g.row_count;
            in_sequence = token - b * g.row_count;
        } else {
            int high = g.batch;  // the sequence is in [b, high)
            while (high - b > 1) {
                const int middle = (b + high) / 2;
                (arch::load_global_readonly(g.cu_new + middle) <= token ? b : high) = middle;
            }
            in_sequence = token - arch::load_global_readonly(g.cu_new + b);
        }
        const bool inside =
            g.cu_new == nullptr || token < arch::load_global_readonly(g.cu_new + g.batch);
        place.position = arch::load_global_readonly(g.k_lengths + b) + in_sequence;
        place.exists = inside && place.position >= 0 && place.position < g.most_keys;
        int row = b;
        if (g.pages.rows != nullptr) row = arch::load_global_readonly(g.pages.rows + b);
        place.page = row;
        place.offset = place.position;
        if (g.pages.table != nullptr && place.exists) {
            const int index = place.position / size;
            place.page =
                arch::load_global_readonly(g.pages.table + row * g.pages.table_stride + index);
            place.offset = place.position - index * size;
        }
        place.exists = place.exists && place.page >= 0 && place.page * size < g.slots;
    }
    if (g.rotary_positions != nullptr) {
        place.position = arch::load_global_readonly(g.rotary_positions + token);
    }
    return place;
}

template <class T>
__global__ __launch_bounds__(APPEND_THREADS) void append_kernel(
    const __grid_constant__ AppendGlobals<T> g) {
    constexpr int per_load = 16 / int(sizeof(T));
    arch::wait_for_dependencies();
    arch::launch_dependents();
    const int k_loads = g.head_dim / per_load, v_loads = g.value_dim / per_load;
    const int row_loads = g.heads * (k_loads + v_loads);
    const int64_t count = int64_t{g.tokens} * row_loads;
    for (int64_t i = int64_t{blockIdx.x} * APPEND_THREADS + threadIdx.x; i < count;
         i += int64_t{gridDim.x} * APPEND_THREADS) {
        const int token = static_cast<int>(i / row_loads);
        int load = static_cast<int>(i - int64_t{token} * row_loads);
        const Place place = place_of(g, token);
        if (!place.exists) continue;
        const int b = token / g.row_count, row = token - b * g.row_count;
        if (load < g.heads * k_loads) {
            const int head = load / k_loads, column = load % k_loads * per_load;
            const uint4 value = g.rotary.load(g.k.at(b, head, row, 0), column, place.position);
            T* const to = g.k_cache + (place.page * g.k_strides.page_stride +
                                       place.offset * g.k_strides.token_stride +
                                       head * g.k_strides.head_stride + column);
            arch::store_global(reinterpret_cast<uint4*>(to), value);
        } else {
            load -= g.heads * k_loads;
            const int head = load / v_loads, column = load % v_loads * per_load;
            const T* const from = g.v.at(b, head, row, column);
            T* const to = g.v_cache + (place.page * g.v_strides.page_stride +
                                       place.offset * g.v_strides.token_stride +
                                       head * g.v_strides.head_stride + column);
            arch::store_global(reinterpret_cast<uint4*>(to),
                               arch::load_global(reinterpret_cast<const uint4*>(from)));
        }
    }
}

template <DType dtype>
void launch_append(const AppendParams& params, Stream stream) {
    using T = std::conditional_t<dtype == DType::bf16, bf16, half>;
    const AppendProblem& p = params.problem;
    const bool packed = params.row_count == p.tokens;
    const AppendGlobals<T> globals{
        .k = StridedRows<T>(params.k, packed),
        .v = StridedRows<T>(params.v, packed),
        .k_cache = static_cast<T*>(const_cast<void*>(params.k_cache.data)),
        .v_cache = static_cast<T*>(const_cast<void*>(params.v_cache.data)),
        .k_strides = params.k_cache,
        .v_strides = params.v_cache,
        .pages = params.pages,
        .rotary = RotaryTable<T>(params.rotary),
        .slot_mapping = params.slot_mapping,
        .k_lengths = params.k_lengths,
        .cu_new = params.cu_new,
        .rotary_positions = params.rotary_positions,
        .slots = params.pages_count * params.pages.page_size,
        .tokens = static_cast<int>(p.tokens),
        .row_count = static_cast<int>(std::max<int64_t>(params.row_count, 1)),
        .batch = static_cast<int>(params.batch),
        .most_keys = static_cast<int>(params.most_keys),
        .heads = static_cast<int>(p.kv_heads),
        .head_dim = static_cast<int>(p.head_dim),
        .value_dim = static_cast<int>(p.value_dim)};
    const int64_t loads = p.tokens * p.kv_heads * (p.head_dim + p.value_dim) / 8;
    const int64_t blocks = std::clamp<int64_t>(ceil_div(loads, APPEND_THREADS), 1, 1 << 16);
    kittens::launch({.dependent = true}, append_kernel<T>, dim3(unsigned(blocks)),
                    dim3(APPEND_THREADS), dim3(1), 0, stream, globals);
}

}  // namespace thunderkittens::attention::decode
