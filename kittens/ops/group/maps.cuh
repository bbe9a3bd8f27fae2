// Element-wise operations. The engine is `map<Functor>(d, operands...)`, once per kind of object;
// the verbs name functors. Register objects: every warp maps its own. Shared objects: the threads
// of the group share the work, and the caller synchronises afterwards.
#pragma once

#include "../elements.cuh"
#include "../verbs.h"
#include "identity.cuh"

namespace kittens::inline KITTENS_BACKEND {
namespace detail {

// An operand as a function from a place in the object to the packed register, element or run there.
template <scalar T, class S>
__device__ __forceinline__ auto tile_operand(const S& source) {
    if constexpr (any_register_tile<S>) {
        return [&](int i, int j, int k) { return source.tiles[i][j].data[k]; };
    } else {
        return [p = repeat<T>(to_element<T>(source))](int, int, int) { return p; };
    }
}
template <scalar T, bool naive, class S>
__device__ __forceinline__ auto vector_operand(const S& source) {
    if constexpr (any_register_vector<S>) {
        return [&](int o, int i) { return source.data[o][i]; };
    } else if constexpr (naive) {
        return [v = to_element<T>(source)](int, int) { return v; };
    } else {
        return [p = repeat<T>(to_element<T>(source))](int, int) { return p; };
    }
}
template <scalar T, int n, class S>
__device__ __forceinline__ auto shared_operand(const S& source) {
    if constexpr (any_shared<S>) {
        return [&](auto... at) { return load_run<n>(source, at...); };
    } else {
        return [v = to_element<T>(source)](auto...) { return repeat_run<T, n>(v); };
    }
}
template <class S>
__host__ __device__ constexpr int run_limit() {
    if constexpr (any_shared<S>)
        return longest_run<S>();
    else
        return 16;
}
template <class... S>
__host__ __device__ constexpr int shortest_run() {
    int run = 16;
    ((run = run < run_limit<S>() ? run : run_limit<S>()), ...);
    return run;
}

// Broadcasts: the functor of the value in the vector alone.
struct take_second {
    static __device__ __forceinline__ float apply(float, float b) { return b; }
    template <packed_16bit P>
    static __device__ __forceinline__ P packed(const P&, const P& b) {
        return b;
    }
};

// Vectors that have a value per row (per column) of a tile.
template <any_tile Tile, any_vector V>
__host__ __device__ constexpr void check_value_per_row() {
    if constexpr (any_register_tile<Tile>) {
        static_assert(any_register_vector<V>, "a register tile goes with a register vector");
        static_assert(
            V::length == Tile::rows && same_layout<V, typename Tile::col_vec>(),
            "an operation on rows takes a vector with one value per row, in the layout of "
            "the tile type's col_vec");
    } else {
        static_assert(any_shared_vector<V>, "a shared tile goes with a shared vector");
        static_assert(V::length == Tile::rows,
                      "an operation on rows takes a vector with one value per row");
    }
}
template <any_tile Tile, any_vector V>
__host__ __device__ constexpr void check_value_per_column() {
    if constexpr (any_register_tile<Tile>) {
        static_assert(any_register_vector<V>, "a register tile goes with a register vector");
        static_assert(V::length == Tile::cols && same_layout<V, typename Tile::row_vec>(),
                      "an operation on columns takes a vector with one value per column, in the "
                      "layout of the tile type's row_vec");
    } else {
        static_assert(any_shared_vector<V>, "a shared tile goes with a shared vector");
        static_assert(V::length == Tile::cols,
                      "an operation on columns takes a vector with one value per column");
    }
}

}  // namespace detail

template <int WARPS>
struct map_ops {
    // d = Op(operands...), element by element; operands are objects like d, or numbers.
    template <class Op, any_register_tile D, class... S>
    static __device__ __forceinline__ void map(D& d, const S&... operands) {
        (detail::check_operand<D, S>(), ...);
        using T = typename D::T;
        const auto compute = [&](const auto&... at) {
#pragma unroll
            for (int i = 0; i < D::height; ++i) {
#pragma unroll
                for (int j = 0; j < D::width; ++j) {
#pragma unroll
                    for (int k = 0; k < D::packed_per_base; ++k) {
                        d.tiles[i][j].data[k] = detail::apply_packed<Op, T>(at(i, j, k)...);
                    }
                }
            }
        };
        compute(detail::tile_operand<T>(operands)...);
    }
    template <class Op, any_register_vector D, class... S>
    static __device__ __forceinline__ void map(D& d, const S&... operands) {
        (detail::check_operand<D, S>(), ...);
        using T = typename D::T;
        const auto compute = [&](const auto&... at) {
#pragma unroll
            for (int o = 0; o < D::outer_dim; ++o) {
#pragma unroll
                for (int i = 0; i < D::inner_dim; ++i) {
                    if constexpr (D::is_naive) {
                        d.data[o][i] = detail::apply_element<Op, T>(at(o, i)...);
                    } else {
                        d.data[o][i] = detail::apply_packed<Op, T>(at(o, i)...);
                    }
                }
            }
        };
        compute(detail::vector_operand<T, D::is_naive>(operands)...);
    }
    template <class Op, any_shared D, class... S>
    static __device__ __forceinline__ void map(D& d, const S&... operands) {
        (detail::check_operand<D, S>(), ...);
        using T = typename D::T;
        constexpr int n = detail::shortest_run<D, S...>();
        const auto compute = [&](const auto&... at) {
            visit_runs<D, n>([&](auto... place) {
                detail::store_run(d, place..., detail::apply_run<Op, T, n>(at(place...)...));
            });
        };
        compute(detail::shared_operand<T, n>(operands)...);
    }

    // d[r][c] = Op(a[r][c], v[r]), and v[c].
    template <class Op, any_tile D, any_tile A, any_vector V>
    static __device__ __forceinline__ void map_row(D& d, const A& a, const V& v) {
        detail::check_operand<D, A>();
        detail::check_value_per_row<D, V>();
        if constexpr (any_register_tile<D>) {
            map_with_vector<Op>(d, a, v);
        } else {
            using T = typename D::T;
            check_vector_type<D, V>();
            constexpr int n = detail::shortest_run<D, A>();
            visit_runs<D, n>([&](int row, int col) {
                const auto values = detail::repeat_run<T, n>(v.get(row));
                if constexpr (std::same_as<Op, detail::take_second>) {
                    detail::store_run(d, row, col, values);
                } else {
                    detail::store_run(
                        d, row, col,
                        detail::apply_run<Op, T, n>(detail::load_run<n>(a, row, col), values));
                }
            });
        }
    }
    template <class Op, any_tile D, any_tile A, any_vector V>
    static __device__ __forceinline__ void map_col(D& d, const A& a, const V& v) {
        detail::check_operand<D, A>();
        detail::check_value_per_column<D, V>();
        if constexpr (any_register_tile<D>) {
            map_with_vector<Op>(d, a, v);
        } else {
            using T = typename D::T;
            check_vector_type<D, V>();
            constexpr int n = detail::shortest_run<D, A, V>();
            visit_runs<D, n>([&](int row, int col) {
                const auto values = detail::load_run<n>(v, col);
                if constexpr (std::same_as<Op, detail::take_second>) {
                    detail::store_run(d, row, col, values);
                } else {
                    detail::store_run(
                        d, row, col,
                        detail::apply_run<Op, T, n>(detail::load_run<n>(a, row, col), values));
                }
            });
        }
    }

    // Every element set to one value.
    template <any_register_tile D>
    static __device__ __forceinline__ void fill(D& d, const typename D::T& value) {
        const auto p = detail::repeat<typename D::T>(value);
#pragma unroll
        for (int i = 0; i < D::height; ++i) {
#pragma unroll
            for (int j = 0; j < D::width; ++j) {
#pragma unroll
                for (int k = 0; k < D::packed_per_base; ++k) d.tiles[i][j].data[k] = p;
            }
        }
    }
    template <any_register_vector D>
    static __device__ __forceinline__ void fill(D& d, const typename D::T& value) {
        detail::for_each_element(d, [&](int, auto& element) { element = value; });
    }
    template <any_shared D>
    static __device__ __forceinline__ void fill(D& d, const typename D::T& value) {
        constexpr int n = detail::longest_run<D>();
        const auto run = detail::repeat_run<typename D::T, n>(value);
        visit_runs<D, n>([&](auto... place) { detail::store_run(d, place..., run); });
    }

    // d = f(row, column, value), or f(index, value). In a group, the warps' register tiles are
    // bands of rows of one tile, their register vectors pieces of one vector.
    template <any_tile D, any_tile S, class F>
    static __device__ __forceinline__ void apply(D&& d, const S& s, F f) {
        using Tile = std::remove_cvref_t<D>;
        using T = typename Tile::T;
        detail::check_operand<Tile, S>();
        if constexpr (any_register_tile<D>) {
            using Base = typename Tile::base;
            const int lane = kittens::laneid();
            const int first_row = band() * Tile::rows;
#pragma unroll
            for (int i = 0; i < Tile::height; ++i) {
#pragma unroll
                for (int j = 0; j < Tile::width; ++j) {
#pragma unroll
                    for (int k = 0; k < Tile::packed_per_base; ++k) {
                        auto run = detail::split<T>(s.tiles[i][j].data[k]);
#pragma unroll
                        for (int e = 0; e < Base::packing; ++e) {
                            const auto p = Base::position(lane, k, e);
                            run.v[e] = detail::to_element<T>(f(first_row + i * Base::rows + p.row,
                                                               j * Base::cols + p.col, run.v[e]));
                        }
                        d.tiles[i][j].data[k] = detail::join<T>(run);
                    }
                }
            }
        } else {
            constexpr int n = detail::shortest_run<Tile, S>();
            visit_runs<Tile, n>([&](int row, int col) {
                auto run = detail::load_run<n>(s, row, col);
#pragma unroll
                for (int e = 0; e < n; ++e) {
                    run.v[e] = detail::to_element<T>(f(row, col + e, run.v[e]));
                }
                detail::store_run(d, row, col, run);
            });
        }
    }
    template <any_vector D, any_vector S, class F>
    static __device__ __forceinline__ void apply(D&& d, const S& s, F f) {
        using V = std::remove_cvref_t<D>;
        using T = typename V::T;
        detail::check_operand<V, S>();
        if constexpr (any_register_vector<D>) {
            const int first = band() * V::length;
            V result = s;
            detail::for_each_element(result, [&](int index, auto& element) {
                if (!V::is_naive || V::length % WARP_THREADS == 0 || index < V::length) {
                    element = detail::to_element<T>(f(first + index, element));
                }
            });
            d = result;
        } else {
            constexpr int n = detail::shortest_run<V, S>();
            visit_runs<V, n>([&](int index) {
                auto run = detail::load_run<n>(s, index);
#pragma unroll
                for (int e = 0; e < n; ++e) {
                    run.v[e] = detail::to_element<T>(f(index + e, run.v[e]));
                }
                detail::store_run(d, index, run);
            });
        }
    }

#define KITTENS_DEFINE(name)                             \
    template <any_object D>                              \
    static __device__ __forceinline__ void name(D&& d) { \
        using T = typename std::remove_cvref_t<D>::T;    \
        fill(d, convert<T>(functor::name::value));       \
    }
    KITTENS_CONSTANT_VERBS(KITTENS_DEFINE)
#undef KITTENS_DEFINE
#define KITTENS_DEFINE(name)                                         \
    template <any_object D, any_object S>                            \
    static __device__ __forceinline__ void name(D&& d, const S& s) { \
        map<functor::name>(d, s);                                    \
    }
    KITTENS_UNARY_VERBS(KITTENS_DEFINE)
#undef KITTENS_DEFINE
#define KITTENS_DEFINE(name)                                                           \
    template <any_object D, any_object A, class B>                                     \
    static __device__ __forceinline__ void name(D&& d, const A& a, const B& b) {       \
        map<functor::name>(d, a, b);                                                   \
    }                                                                                  \
    template <any_tile D, any_tile A, any_vector V>                                    \
    static __device__ __forceinline__ void name##_row(D&& d, const A& a, const V& v) { \
        map_row<functor::name>(d, a, v);                                               \
    }                                                                                  \
    template <any_tile D, any_tile A, any_vector V>                                    \
    static __device__ __forceinline__ void name##_col(D&& d, const A& a, const V& v) { \
        map_col<functor::name>(d, a, v);                                               \
    }
    KITTENS_BINARY_VERBS(KITTENS_DEFINE)
#undef KITTENS_DEFINE

    // a * b + c, and a * c + b, rounded once.
    template <any_object D, any_object A, class B, class C>
    static __device__ __forceinline__ void fma_AxBtC(D&& d, const A& a, const B& b, const C& c) {
        map<functor::fma>(d, a, b, c);
    }
    template <any_object D, any_object A, class B, class C>
    static __device__ __forceinline__ void fma_AxCtB(D&& d, const A& a, const B& b, const C& c) {
        map<functor::fma>(d, a, c, b);
    }
    // d[r][c] = v[r], and v[c].
    template <any_tile D, any_vector V>
    static __device__ __forceinline__ void broadcast_row(D&& d, const V& v) {
        map_row<detail::take_second>(d, d, v);
    }
    template <any_tile D, any_vector V>
    static __device__ __forceinline__ void broadcast_col(D&& d, const V& v) {
        map_col<detail::take_second>(d, d, v);
    }

  private:
    static __device__ __forceinline__ int band() {
        if constexpr (WARPS == 1)
            return 0;
        else
            return group_identity<WARPS>::warpid();
    }
    template <any_shared Object, int n, class Visit>
    static __device__ __forceinline__ void visit_runs(Visit visit) {
        detail::for_each_run<n, Object>(group_identity<WARPS>::laneid(),
                                        group_identity<WARPS>::GROUP_THREADS, visit);
    }
    template <any_tile D, any_vector V>
    static __host__ __device__ constexpr void check_vector_type() {
        static_assert(std::same_as<typename D::T, typename V::T>,
                      "the vector must have the tile's element type; copy() converts");
        static_assert(
            any_register_vector<V> == false || packed<typename D::T>::count == 2,
            "8-bit register tiles have no operations with vectors; copy() to float, bf16 or "
            "half first");
    }
    // The vector's layout says whether it has a value per line of registers or across them.
    template <class Op, any_register_tile D, any_register_tile A, any_register_vector V>
    static __device__ __forceinline__ void map_with_vector(D& d, const A& a, const V& v) {
        using T = typename D::T;
        check_vector_type<D, V>();
#pragma unroll
        for (int line = 0; line < detail::line_bases<D>; ++line) {
#pragma unroll
            for (int across = 0; across < detail::across_bases<D>; ++across) {
#pragma unroll
                for (int k = 0; k < D::packed_per_base; ++k) {
                    packed_type<T> operand;
                    if constexpr (std::same_as<typename V::layout, ortho_l>) {
                        operand = detail::repeat<T>(detail::component(v.data[line][0], k % 2));
                    } else {
                        operand = v.data[across][k / 2];
                    }
                    detail::base_at(d, line, across).data[k] = detail::apply_packed<Op, T>(
                        detail::base_at(a, line, across).data[k], operand);
                }
            }
        }
    }
};

}  // namespace kittens::inline KITTENS_BACKEND
