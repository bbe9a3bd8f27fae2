// Writes new keys and values into a cache, whose pages the device looks up: a thread has 16 bytes
// of a row, or where the cache has 8 bits or 4, a warp a whole one. Keys may be rotated on the way.
#pragma once

#include <cuda_fp8.h>

#include "csrc/attention/common/layouts.cuh"
#include "csrc/attention/common/tile_scheduler.cuh"
#include "csrc/attention/decode/append.h"
#include "csrc/attention/decode/rotary.cuh"
#include "csrc/gemm/quantize/nvfp4_values_sm90.cuh"

namespace thunderkittens::attention::decode {

constexpr int APPEND_THREADS = 256;

template <class T>
struct AppendGlobals {
    StridedRows<T> k, v;
    T *k_cache, *v_cache;
    Cache k_strides, v_strides;
    Pages pages;
    RotaryTable<T> rotary;
    CacheFormat format;
    Scales k_scale, v_scale;
    const int64_t* slot_mapping;
    const int *k_lengths, *cu_new, *rotary_begins, *rotary_positions;
    int64_t slots;  // of the cache
    int tokens, row_count, batch, most_keys, heads, head_dim, value_dim;
    Divisor by_row_count, by_page_size, by_token_loads;
    int token_loads, block_tokens;  // 16 bytes each of a token; tokens of a block
};

// A token's place in the cache, and its position for rotary.
struct Place {
    int64_t page;
    int offset, position, sequence;
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
            b = g.by_row_count.quotient(token);
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
        place.sequence = b;
        place.position = arch::load_global_readonly(g.k_lengths + b) + in_sequence;
        place.exists = inside && place.position >= 0 && place.position < g.most_keys;
        int row = b;
        if (g.pages.rows != nullptr) row = arch::load_global_readonly(g.pages.rows + b);
        place.page = row;
        place.offset = place.position;
        if (g.pages.table != nullptr && place.exists) {
            const int index = g.by_page_size.quotient(place.position);
            place.page =
                arch::load_global_readonly(g.pages.table + row * g.pages.table_stride + index);
            place.offset = place.position - index * size;
        }
        place.exists = place.exists && place.page >= 0 && place.page * size < g.slots;
        if (g.rotary_begins != nullptr) {
            place.position = arch::load_global_readonly(g.rotary_begins + b) + in_sequence;
        }
    }
    if (g.rotary_positions != nullptr) {
        place.position = arch::load_global_readonly(g.rotary_positions + token);
    }
    return place;
}

// A line of the page table for each lane, of the first that a token's sequence has: they are asked
// for while it is not yet known in which of them the token's page is. Null where memory has to be
// read to know the sequence's row.
template <class T>
__device__ __forceinline__ const int* table_line(const AppendGlobals<T>& g, int token) {
    constexpr int pages = 128 / int(sizeof(int));
    const int64_t first = laneid() * pages;
    if (g.slot_mapping != nullptr || g.cu_new != nullptr || g.pages.rows != nullptr ||
        g.pages.table == nullptr || first * g.pages.page_size >= g.most_keys)
        return nullptr;
    return g.pages.table + (g.by_row_count.quotient(token) * g.pages.table_stride + first);
}

// What needs no memory comes before the kernel waits for others, and before a branch, or ptxas
// would put it behind the wait. What is written is loaded before the look-up, whose loads wait for
// each other.
template <class T>
__device__ __forceinline__ void append(const AppendGlobals<T>& g) {
    constexpr int per_load = 16 / int(sizeof(T));
    const int thread = static_cast<int>(threadIdx.x);
    const int in_block = g.by_token_loads.quotient(thread);
    const int64_t index = int64_t{blockIdx.x} * g.block_tokens + in_block;
    int load = static_cast<int>(blockIdx.y) * APPEND_THREADS + thread - in_block * g.token_loads;
    const bool mine = in_block < g.block_tokens && index < g.tokens && load < g.token_loads;
    const int token = mine ? static_cast<int>(index) : 0;
    const int b = g.by_row_count.quotient(token), row = token - b * g.row_count;
    const int k_loads = g.head_dim / per_load, v_loads = g.value_dim / per_load;
    const bool is_key = load < g.heads * k_loads;
    if (!is_key) load -= g.heads * k_loads;
    const int row_loads = is_key ? k_loads : v_loads;
    const int head = load / row_loads, column = (load - head * row_loads) * per_load;
    const T* const source = (is_key ? g.k : g.v).at(b, head, row, 0);
    const Cache& strides = is_key ? g.k_strides : g.v_strides;
    T* const cache = (is_key ? g.k_cache : g.v_cache) + (head * strides.head_stride + column);
    const int* const line = table_line(g, token);
    if (!mine) return;
    arch::wait_for_dependencies();
    arch::launch_dependents();
    if (line != nullptr) arch::prefetch_global(line);
    uint4 value = arch::load_global(reinterpret_cast<const uint4*>(source + column));
    const Place place = place_of(g, token);
    if (!place.exists) return;
    if (is_key) value = g.rotary.rotated(value, source, column, place.position);
    arch::store_global(reinterpret_cast<uint4*>(cache + (place.page * strides.page_stride +
                                                         place.offset * strides.token_stride)),
                       value);
}

__device__ __forceinline__ float largest_code(CacheFormat format) {
    return format == CacheFormat::e4m3 ? 448.0f : format == CacheFormat::e5m2 ? 57344.0f : 127.0f;
}

// What is beyond the largest code becomes that.
__device__ __forceinline__ uint32_t code_pair(CacheFormat format, float2 x) {
    if (format != CacheFormat::int8) {
        return __nv_cvt_float2_to_fp8x2(x, __NV_SATFINITE,
                                        format == CacheFormat::e4m3 ? __NV_E4M3 : __NV_E5M2);
    }
    const auto code = [](float v) {
        return static_cast<uint32_t>(static_cast<int>(rintf(fminf(fmaxf(v, -128.0f), 127.0f)))) &
               0xffu;
    };
    return code(x.x) | code(x.y) << 8;
}

// Lanes have eight elements each of a row.
template <class T>
__device__ __forceinline__ void append_codes(const AppendGlobals<T>& g) {
    constexpr int per_lane = 8, warps = APPEND_THREADS / WARP_THREADS;
    arch::wait_for_dependencies();
    arch::launch_dependents();
    const int64_t rows = int64_t{g.tokens} * g.heads * 2;
    for (int64_t i = int64_t{blockIdx.x} * warps + warpid(); i < rows;
         i += int64_t{gridDim.x} * warps) {
        const bool value = i % 2 == 1;
        const int head = static_cast<int>(i / 2 % g.heads);
        const int token = static_cast<int>(i / 2 / g.heads);
        const int b = g.by_row_count.quotient(token), row = token - b * g.row_count;
        const int columns = value ? g.value_dim : g.head_dim, column = laneid() * per_lane;
        const bool mine = column < columns;
        const T* const source = (value ? g.v : g.k).at(b, head, row, 0);
        uint4 chunk = make_uint4(0, 0, 0, 0);
        if (mine) chunk = arch::load_global(reinterpret_cast<const uint4*>(source + column));
        const Place place = place_of(g, token);
        if (!place.exists) continue;
        if (mine && !value) chunk = g.rotary.rotated(chunk, source, column, place.position);
        const auto x = arch::bit_cast<typename RotaryTable<T>::Vector>(chunk);
        float2 pairs[per_lane / 2];
        float largest = 0.0f;
#pragma unroll
        for (int j = 0; j < per_lane / 2; ++j) {
            pairs[j] = unpack_pair<T>(x.pairs[j]);
            largest = fmaxf(largest, fmaxf(fabsf(pairs[j].x), fabsf(pairs[j].y)));
        }
        const Scales& scales = value ? g.v_scale : g.k_scale;
        float scale = 1.0f;
        if (scales.tokens) {
#pragma unroll
            for (int d = WARP_THREADS / 2; d > 0; d /= 2) {
                largest = fmaxf(largest, arch::shuffle_xor(largest, d));
            }
            scale = largest / largest_code(g.format);
            if (laneid() == 0) {
                arch::store_global(const_cast<float*>(scales.data) +
                                       place.page * scales.strides[0] +
                                       place.offset * scales.strides[1] + head * scales.strides[2],
                                   scale);
            }
        } else if (scales.data != nullptr) {
            scale = arch::load_global_readonly(scales.data + place.sequence * scales.strides[0] +
                                               head * scales.strides[1]);
        }
        if (!mine) continue;
        uint32_t words[2] = {};
#pragma unroll
        for (int j = 0; j < per_lane / 2; ++j) {
            const float2 pair =
                scale == 0.0f ? float2{0.0f, 0.0f} : float2{pairs[j].x / scale, pairs[j].y / scale};
            words[j / 2] |= code_pair(g.format, pair) << 16 * (j % 2);
        }
        const Cache& to = value ? g.v_strides : g.k_strides;
        auto* const data = reinterpret_cast<uint8_t*>(value ? g.v_cache : g.k_cache);
        arch::store_global(reinterpret_cast<uint2*>(data + (place.page * to.page_stride +
                                                            place.offset * to.token_stride +
                                                            head * to.head_stride + column)),
                           make_uint2(words[0], words[1]));
    }
}

// NVFP4, of which a lane has half a block: the arithmetic is that of nvfp4_quantize, with a scale
// of the whole that is given.
template <class T>
__device__ __forceinline__ void append_nvfp4(const AppendGlobals<T>& g,
                                             const BlockScales& block_scales) {
    namespace values = block_scaled::sm90;
    constexpr int per_lane = 8, warps = APPEND_THREADS / WARP_THREADS;
    arch::wait_for_dependencies();
    arch::launch_dependents();
    const int64_t rows = int64_t{g.tokens} * g.heads * 2;
    for (int64_t i = int64_t{blockIdx.x} * warps + warpid(); i < rows;
         i += int64_t{gridDim.x} * warps) {
        const bool value = i % 2 == 1;
        const int head = static_cast<int>(i / 2 % g.heads);
        const int token = static_cast<int>(i / 2 / g.heads);
        const int b = g.by_row_count.quotient(token), row = token - b * g.row_count;
        const int columns = value ? g.value_dim : g.head_dim, column = laneid() * per_lane;
        const bool mine = column < columns;
        const T* const source = (value ? g.v : g.k).at(b, head, row, 0);
        uint4 words = make_uint4(0, 0, 0, 0);
        if (mine) words = arch::load_global(reinterpret_cast<const uint4*>(source + column));
        const Place place = place_of(g, token);
        if (!place.exists) continue;
        if (mine && !value) words = g.rotary.rotated(words, source, column, place.position);
        const auto chunk = arch::bit_cast<values::Chunk<T>>(words);
        uint32_t largest = values::largest_of(chunk);
        largest = ::max(largest, arch::shuffle_xor(largest, 1));
        const Scales& scales = value ? g.v_scale : g.k_scale;
        float scale = 1.0f;
        if (scales.data != nullptr) {
            scale = arch::load_global_readonly(scales.data + place.sequence * scales.strides[0] +
                                               head * scales.strides[1]);
        }
        if (!mine) continue;
        const values::Encode encode = values::encode_of_scale(scale);
        const uint32_t block = values::block_scale(values::magnitude_value<T>(largest, 0),
                                                   encode.factor * (1.0f / 6.0f));
        const float factor =
            ::min(1 / (values::e4m3_value(block) * encode.inverse), values::LARGEST_FLOAT);
        uint32_t codes = values::nearest_codes<true>(chunk, factor);
        if (block == 0x7f) codes = 0x77777777u;  // NaN, as its scale
        const auto row_of = [&](const Cache& to, const void* data) {
            return static_cast<uint8_t*>(const_cast<void*>(data)) +
                   (place.page * to.page_stride + place.offset * to.token_stride +
                    head * to.head_stride);
        };
        const Cache& to = value ? block_scales.v : block_scales.k;
        uint8_t* const data =
            value ? row_of(g.v_strides, g.v_cache) : row_of(g.k_strides, g.k_cache);
        arch::store_global(reinterpret_cast<uint32_t*>(data + column / 2), codes);
        if (laneid() % 2 == 0) {
            arch::store_global(row_of(to, to.data) + column / NV_BLOCK,
                               static_cast<uint8_t>(block));
        }
    }
}

template <class T>
__global__ __launch_bounds__(APPEND_THREADS) void append_kernel(
    const __grid_constant__ AppendGlobals<T> g) {
    append(g);
}
template <class T>
__global__ __launch_bounds__(APPEND_THREADS) void append_codes_kernel(
    const __grid_constant__ AppendGlobals<T> g) {
    append_codes(g);
}
template <class T>
__global__ __launch_bounds__(APPEND_THREADS) void append_nvfp4_kernel(
    const __grid_constant__ AppendGlobals<T> g, const __grid_constant__ BlockScales block_scales) {
    append_nvfp4(g, block_scales);
}

template <class T>
struct AppendKernels {
    void (*elements)(AppendGlobals<T>);
    void (*codes)(AppendGlobals<T>);
    void (*nvfp4)(AppendGlobals<T>, BlockScales);
    bool dependent;
};

template <class T>
void launch_append_by(const AppendKernels<T>& kernels, const AppendParams& params, Stream stream) {
    const AppendProblem& p = params.problem;
    const bool packed = params.row_count == p.tokens;
    const int row_count = static_cast<int>(std::max<int64_t>(params.row_count, 1));
    const auto token_loads = static_cast<int>(p.kv_heads * (p.head_dim + p.value_dim) / 8);
    const int block_tokens = std::max(APPEND_THREADS / token_loads, 1);
    const AppendGlobals<T> globals{
        .k = StridedRows<T>(params.k, packed),
        .v = StridedRows<T>(params.v, packed),
        .k_cache = static_cast<T*>(const_cast<void*>(params.k_cache.data)),
        .v_cache = static_cast<T*>(const_cast<void*>(params.v_cache.data)),
        .k_strides = params.k_cache,
        .v_strides = params.v_cache,
        .pages = params.pages,
        .rotary = RotaryTable<T>(params.rotary),
        .format = params.format,
        .k_scale = params.k_scale,
        .v_scale = params.v_scale,
        .slot_mapping = params.slot_mapping,
        .k_lengths = params.k_lengths,
        .cu_new = params.cu_new,
        .rotary_begins = params.rotary_begins,
        .rotary_positions = params.rotary_positions,
        .slots = params.pages_count * params.pages.page_size,
        .tokens = static_cast<int>(p.tokens),
        .row_count = row_count,
        .batch = static_cast<int>(params.batch),
        .most_keys = static_cast<int>(params.most_keys),
        .heads = static_cast<int>(p.kv_heads),
        .head_dim = static_cast<int>(p.head_dim),
        .value_dim = static_cast<int>(p.value_dim),
        .by_row_count = Divisor(row_count),
        .by_page_size = Divisor(static_cast<int>(params.pages.page_size)),
        .by_token_loads = Divisor(token_loads),
        .token_loads = token_loads,
        .block_tokens = block_tokens};
    const bool codes = params.format != CacheFormat::same;
    const int64_t blocks = codes
                               ? ceil_div(p.tokens * p.kv_heads * 2 * WARP_THREADS, APPEND_THREADS)
                               : ceil_div(p.tokens, block_tokens);
    // Warps that write codes take several rows where there are many.
    const dim3 grid(static_cast<unsigned>(codes ? std::min<int64_t>(blocks, 1 << 16) : blocks),
                    codes ? 1 : static_cast<unsigned>(ceil_div(token_loads, APPEND_THREADS)));
    if (params.format == CacheFormat::nvfp4) {
        kittens::launch({.dependent = kernels.dependent}, kernels.nvfp4, grid, dim3(APPEND_THREADS),
                        dim3(1), 0, stream, globals, params.block_scales);
    } else {
        kittens::launch({.dependent = kernels.dependent}, codes ? kernels.codes : kernels.elements,
                        grid, dim3(APPEND_THREADS), dim3(1), 0, stream, globals);
    }
}

template <DType dtype>
void launch_append(const AppendParams& params, Stream stream) {
    using T = std::conditional_t<dtype == DType::bf16, bf16, half>;
    launch_append_by<T>({append_kernel<T>, append_codes_kernel<T>, append_nvfp4_kernel<T>, true},
                        params, stream);
}

}  // namespace thunderkittens::attention::decode
