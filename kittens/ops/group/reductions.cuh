// Reductions of tiles to vectors and of vectors to numbers. They compute in float and round once,
// at the end; an optional source is accumulated onto. The vector may have another element type than
// the tile.
#pragma once

#include "../elements.cuh"
#include "../verbs.h"
#include "identity.cuh"
#include "maps.cuh"

namespace kittens::inline KITTENS_BACKEND {
namespace detail {

template <class Op, int lowest, int highest>
__device__ __forceinline__ float reduce_lanes(float value) {
#pragma unroll
    for (int mask = lowest; mask <= highest; mask *= 2) {
        value = Op::apply(value, arch::shuffle_xor(value, mask));
    }
    return value;
}

// Along lines of registers: one value per line, in ortho layout. The two floats of a pair are kept
// apart until the end, for shorter chains of dependent operations.
template <class Op, any_register_vector V, any_register_tile RT, class Source>
__device__ __forceinline__ void reduce_lines(V& v, const RT& tile, Source source) {
    using T = typename RT::T;
#pragma unroll
    for (int line = 0; line < line_bases<RT>; ++line) {
        float2 partial[2];
#pragma unroll
        for (int across = 0; across < across_bases<RT>; ++across) {
#pragma unroll
            for (int k = 0; k < RT::packed_per_base; ++k) {
                const float2 pair = unpack_pair<T>(base_at(tile, line, across).data[k]);
                float2& sum = partial[k % 2];
                if (across == 0 && k < 2)
                    sum = pair;
                else
                    sum = {Op::apply(sum.x, pair.x), Op::apply(sum.y, pair.y)};
            }
        }
        float result[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            result[half] = reduce_lanes<Op, 1, 2>(Op::apply(partial[half].x, partial[half].y));
        }
        v.data[line][0] = source(line, 0, float2{result[0], result[1]});
    }
}
// Across lines: one value per column of registers, in align layout.
template <class Op, any_register_vector V, any_register_tile RT, class Source>
__device__ __forceinline__ void reduce_across(V& v, const RT& tile, Source source) {
    using T = typename RT::T;
#pragma unroll
    for (int across = 0; across < across_bases<RT>; ++across) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float2 result;
#pragma unroll
            for (int line = 0; line < line_bases<RT>; ++line) {
#pragma unroll
                for (int k = 2 * half; k < 2 * half + 2; ++k) {
                    const float2 pair = unpack_pair<T>(base_at(tile, line, across).data[k]);
                    if (line == 0 && k == 2 * half)
                        result = pair;
                    else
                        result = {Op::apply(result.x, pair.x), Op::apply(result.y, pair.y)};
                }
            }
            result = {reduce_lanes<Op, 4, 16>(result.x), reduce_lanes<Op, 4, 16>(result.y)};
            v.data[across][half] = source(across, half, result);
        }
    }
}

template <class Op, any_register_vector V, any_register_tile RT>
__device__ __forceinline__ void reduce_register_tile(V& v, const RT& tile, const V* accumulator) {
    static_assert(packed<typename RT::T>::count == 2 && packed<typename V::T>::count == 2,
                  "8-bit register tiles are not reduced; copy() to float, bf16 or half first");
    const auto finish = [&](int outer, int inner, float2 result) {
        if (accumulator) {
            const float2 before = unpack_pair<typename V::T>(accumulator->data[outer][inner]);
            result = {Op::apply(before.x, result.x), Op::apply(before.y, result.y)};
        }
        return pack_pair<typename V::T>(result.x, result.y);
    };
    if constexpr (std::same_as<typename V::layout, ortho_l>)
        reduce_lines<Op>(v, tile, finish);
    else
        reduce_across<Op>(v, tile, finish);
}

// Over a register vector or a shared one, the same result in every lane.
template <class Op, any_vector V>
__device__ __forceinline__ float reduce_vector(const V& v) {
    float result = Op::identity;
    if constexpr (any_register_vector<V>) {
        for_each_element(v, [&](int index, const auto& element) {
            if (!V::is_naive || V::length % WARP_THREADS == 0 || index < V::length) {
                result = Op::apply(result, convert<float>(element));
            }
        });
        // The other layouts hold every element several times.
        if constexpr (std::same_as<typename V::layout, align_l>) {
            return reduce_lanes<Op, 1, 2>(result);
        } else if constexpr (std::same_as<typename V::layout, ortho_l>) {
            return reduce_lanes<Op, 4, 16>(result);
        }
    } else {
        constexpr int n = longest_run<V>();
        for_each_run<n, V>(kittens::laneid(), WARP_THREADS, [&](int index) {
            const auto run = load_run<n>(v, index);
#pragma unroll
            for (int e = 0; e < n; ++e) result = Op::apply(result, convert<float>(run.v[e]));
        });
    }
    return reduce_lanes<Op, 1, 16>(result);
}

}  // namespace detail

template <int WARPS>
struct reduction_ops {
    // One value per row.
    template <class Op, any_vector V, any_tile Tile>
    static __device__ __forceinline__ void reduce_rows(V& v, const Tile& tile,
                                                       const V* accumulator = nullptr) {
        detail::check_value_per_row<Tile, V>();
        if constexpr (any_register_tile<Tile>) {
            detail::reduce_register_tile<Op>(v, tile, accumulator);
        } else {
            // A thread takes a row: the swizzle spreads the rows of one column over the banks.
            constexpr int n = detail::longest_run<Tile>();
            for (int row = thread(); row < Tile::rows; row += threads) {
                float result = accumulator ? convert<float>(accumulator->get(row)) : Op::identity;
                for (int col = 0; col < Tile::cols; col += n) {
                    const auto run = detail::load_run<n>(tile, row, col);
#pragma unroll
                    for (int e = 0; e < n; ++e)
                        result = Op::apply(result, convert<float>(run.v[e]));
                }
                v.set(row, convert<typename V::T>(result));
            }
        }
    }
    // One value per column.
    template <class Op, any_vector V, any_tile Tile>
    static __device__ __forceinline__ void reduce_columns(V& v, const Tile& tile,
                                                          const V* accumulator = nullptr) {
        detail::check_value_per_column<Tile, V>();
        if constexpr (any_register_tile<Tile>) {
            static_assert(
                WARPS == 1,
                "the columns of a group's register tile lie in several warps: reduce at warp "
                "scope, or store the tile to shared memory first");
            detail::reduce_register_tile<Op>(v, tile, accumulator);
        } else {
            for (int col = thread(); col < Tile::cols; col += threads) {
                float result = accumulator ? convert<float>(accumulator->get(col)) : Op::identity;
#pragma unroll 8
                for (int row = 0; row < Tile::rows; ++row) {
                    result = Op::apply(result, convert<float>(tile.get(row, col)));
                }
                v.set(col, convert<typename V::T>(result));
            }
        }
    }

#define KITTENS_DEFINE(name, op)                                                              \
    template <any_vector V, any_tile Tile>                                                    \
    static __device__ __forceinline__ void row_##name(V& v, const Tile& tile) {               \
        reduce_rows<functor::op>(v, tile);                                                    \
    }                                                                                         \
    template <any_vector V, any_tile Tile>                                                    \
    static __device__ __forceinline__ void row_##name(V& v, const Tile& tile, const V& src) { \
        reduce_rows<functor::op>(v, tile, &src);                                              \
    }                                                                                         \
    template <any_vector V, any_tile Tile>                                                    \
    static __device__ __forceinline__ void col_##name(V& v, const Tile& tile) {               \
        reduce_columns<functor::op>(v, tile);                                                 \
    }                                                                                         \
    template <any_vector V, any_tile Tile>                                                    \
    static __device__ __forceinline__ void col_##name(V& v, const Tile& tile, const V& src) { \
        reduce_columns<functor::op>(v, tile, &src);                                           \
    }                                                                                         \
    template <any_vector V>                                                                   \
    static __device__ __forceinline__ typename V::T name(const V& v) {                        \
        return convert<typename V::T>(detail::reduce_vector<functor::op>(v));                 \
    }                                                                                         \
    template <scalar T, any_vector V>                                                         \
    static __device__ __forceinline__ void name(T& result, const V& v) {                      \
        result = convert<T>(detail::reduce_vector<functor::op>(v));                           \
    }                                                                                         \
    template <scalar T, any_vector V>                                                         \
    static __device__ __forceinline__ void name(T& result, const V& v, const T& src) {        \
        const float total = detail::reduce_vector<functor::op>(v);                            \
        result = convert<T>(functor::op::apply(convert<float>(src), total));                  \
    }
    KITTENS_REDUCTIONS(KITTENS_DEFINE)
#undef KITTENS_DEFINE

  private:
    static constexpr int threads = group_identity<WARPS>::GROUP_THREADS;
    static __device__ __forceinline__ int thread() { return group_identity<WARPS>::laneid(); }
};

}  // namespace kittens::inline KITTENS_BACKEND
