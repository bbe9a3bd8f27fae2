// Reductions of tiles to vectors and of vectors to numbers, at any scope, with and without a source
// to accumulate onto.
#pragma once

#include <cmath>

#include "maps.cuh"

namespace unit {

enum class Reduce { max, min, sum, prod };
inline const char* reduce_names[] = {"max", "min", "sum", "prod"};
inline double reduce_start(Reduce how) {
    return how == Reduce::max    ? -HUGE_VAL
           : how == Reduce::min  ? HUGE_VAL
           : how == Reduce::prod ? 1
                                 : 0;
}
inline double reduce_step(Reduce how, double x, double y) {
    return how == Reduce::max   ? std::fmax(x, y)
           : how == Reduce::min ? std::fmin(x, y)
           : how == Reduce::sum ? x + y
                                : x * y;
}
// Rounding in float of `count` steps over values of at most 8 in magnitude, or (products) in 0.5 ..
// 1.5.
inline Tolerance reduce_tolerance(Reduce how, Type type, int count) {
    if (how == Reduce::max || how == Reduce::min) return bit_exact;
    Tolerance t = within(type);
    if (how == Reduce::sum)
        t.absolute += count * count * 8 * 0x1p-24;
    else
        t.relative += count * 0x1p-23;
    return t;
}

template <int WARPS, bool over_rows, class O, class V>
__global__ void tile_reduction_kernel(const __grid_constant__ global<typename O::T> a_data,
                                      const __grid_constant__ global<typename V::T> source_data,
                                      const __grid_constant__ global<typename V::T> d_data,
                                      const Reduce how, const bool accumulate) {
    using G = group<WARPS>;
    shared_allocator<> al(shared_memory());
    holder<O> tile(al);
    holder<V> source_holder(al), d_holder(al);
    auto& a = tile.object;
    auto& source = source_holder.object;
    auto& d = d_holder.object;
    read_band(a, a_data);
    read_band(source, source_data);
    arch::sync_block();
    const auto reduce = [&](const auto&... from) {
        if constexpr (over_rows) {
            if (how == Reduce::max) G::row_max(d, a, from...);
            if (how == Reduce::min) G::row_min(d, a, from...);
            if (how == Reduce::sum) G::row_sum(d, a, from...);
            if (how == Reduce::prod) G::row_prod(d, a, from...);
        } else {
            if (how == Reduce::max) G::col_max(d, a, from...);
            if (how == Reduce::min) G::col_min(d, a, from...);
            if (how == Reduce::sum) G::col_sum(d, a, from...);
            if (how == Reduce::prod) G::col_prod(d, a, from...);
        }
    };
    if (accumulate)
        reduce(source);
    else
        reduce();
    arch::sync_block();
    write_band(d_data, d);
}

template <int WARPS, bool over_rows, class O, class V>
void tile_reduction_cases() {
    using T = typename O::T;
    using TV = typename V::T;
    constexpr int rows = O::rows * bands<O, WARPS>, cols = O::cols;
    constexpr int results = over_rows ? rows : cols, count = over_rows ? cols : rows;
    for (int variant = 0; variant < 8; ++variant) {
        const auto how = static_cast<Reduce>(variant / 2);
        const bool accumulate = variant % 2;
        run(text("%s_%s%s %s %s into %s", over_rows ? "row" : "col", reduce_names[variant / 2],
                 accumulate ? " from source" : "", scope_name(WARPS).c_str(),
                 object_name<O>().c_str(), name_of<TV>()),
            [&](Case& c) {
                const bool product = how == Reduce::prod;
                const Values a =
                    c.uniform(type_of<T>, rows * cols, product ? 0.5 : -8, product ? 1.5 : 8);
                const Values source =
                    c.uniform(type_of<TV>, results, product ? 0.5 : -8, product ? 1.5 : 8);
                T* a_data = c.input<T>("a", a);
                TV* source_data = c.input<TV>("source", source);
                TV* d_data = c.output<TV>("d", size_t(results));
                Values expected(results);
                for (int i = 0; i < results; ++i) {
                    double value = accumulate ? source[i] : reduce_start(how);
                    for (int j = 0; j < count; ++j) {
                        value = reduce_step(how, value, a[over_rows ? i * cols + j : j * cols + i]);
                    }
                    expected[i] = value;
                }
                c.expect(expected, reduce_tolerance(how, type_of<TV>, count));
                c.launch([&] {
                    kittens::launch(tile_reduction_kernel<WARPS, over_rows, O, V>, 1, 32 * WARPS, 1,
                                    shared_bytes_of<O, V, V>(), nullptr, matrix(a_data, rows, cols),
                                    matrix(source_data, 1, results), matrix(d_data, 1, results),
                                    how, accumulate);
                });
            });
    }
}

// A vector to a number, which every lane of every warp must receive.
template <int WARPS, class V, class T>
__global__ void vector_reduction_kernel(const __grid_constant__ global<typename V::T> v_data,
                                        const __grid_constant__ global<T> source_data,
                                        const __grid_constant__ global<T> d_data, const Reduce how,
                                        const bool accumulate) {
    using G = group<WARPS>;
    shared_allocator<> al(shared_memory());
    holder<V> holder(al);
    auto& v = holder.object;
    read(v, v_data);
    arch::sync_block();
    const T source = arch::load_global(source_data.at(elements(0, 0)));
    T d;
    const auto reduce = [&](const auto&... from) {
        if (how == Reduce::max) G::max(d, v, from...);
        if (how == Reduce::min) G::min(d, v, from...);
        if (how == Reduce::sum) G::sum(d, v, from...);
        if (how == Reduce::prod) G::prod(d, v, from...);
    };
    if (accumulate)
        reduce(source);
    else
        reduce();
    arch::store_global(d_data.at(elements(0, int(threadIdx.x))), d);
}

template <int WARPS, class V, class T>
void vector_reduction_cases() {
    for (int variant = 0; variant < 8; ++variant) {
        const auto how = static_cast<Reduce>(variant / 2);
        const bool accumulate = variant % 2;
        run(text("%s%s %s %s into %s", reduce_names[variant / 2], accumulate ? " from source" : "",
                 scope_name(WARPS).c_str(), object_name<V>().c_str(), name_of<T>()),
            [&](Case& c) {
                using TV = typename V::T;
                const bool product = how == Reduce::prod;
                const Values v =
                    c.uniform(type_of<TV>, V::length, product ? 0.5 : -8, product ? 1.5 : 8);
                const Values source =
                    c.uniform(type_of<T>, 1, product ? 0.5 : -8, product ? 1.5 : 8);
                TV* v_data = c.input<TV>("v", v);
                T* source_data = c.input<T>("source", source);
                T* d_data = c.output<T>("d", size_t(32 * WARPS));
                double value = accumulate ? source[0] : reduce_start(how);
                for (double x : v) value = reduce_step(how, value, x);
                c.expect(Values(32 * WARPS, value), reduce_tolerance(how, type_of<T>, V::length));
                c.launch([&] {
                    kittens::launch(vector_reduction_kernel<WARPS, V, T>, 1, 32 * WARPS, 1,
                                    shared_bytes_of<V>(), nullptr, matrix(v_data, 1, V::length),
                                    matrix(source_data, 1, 1), matrix(d_data, 1, 32 * WARPS), how,
                                    accumulate);
                });
            });
    }
}

}  // namespace unit
