// Element-wise operations on any object at any scope: one kernel per object and scope runs every
// operation of a list by number; the same list holds the formula in double, the range of the inputs
// and the error of the computation in float before the one rounding to the element type.
#pragma once

#include <cmath>

#include "device.cuh"

namespace unit {

// X(label, call, formula, error in units of 2^-23, low, high), of a, b, c (objects), r (value per
// row), q (value per column), s (scalar). `low` and `high` bound a; b lies in 0.5 .. 4.
#define UNIT_UNARY_MAPS(X)                                         \
    X("exp", exp(d, a), std::exp(a), 2, -4, 4)                     \
    X("exp2", exp2(d, a), std::exp2(a), 2, -6, 6)                  \
    X("log", log(d, a), std::log(a), 2, 0.1, 8)                    \
    X("log2", log2(d, a), std::log2(a), 2, 0.1, 8)                 \
    X("abs", abs(d, a), std::fabs(a), 0, -8, 8)                    \
    X("relu", relu(d, a), std::fmax(a, 0.0), 0, -8, 8)             \
    X("neg", neg(d, a), -a, 0, -8, 8)                              \
    X("sqrt", sqrt(d, a), std::sqrt(a), 1, 0, 8)                   \
    X("rsqrt", rsqrt(d, a), 1 / std::sqrt(a), 2, 0.1, 8)           \
    X("rcp", rcp(d, a), 1 / a, 1, 0.2, 8)                          \
    X("tanh", tanh(d, a), std::tanh(a), 3, -3, 3)                  \
    X("tanh_approx", tanh_approx(d, a), std::tanh(a), 8192, -3, 3) \
    X("sigmoid", sigmoid(d, a), 1 / (1 + std::exp(-a)), 5, -5, 5)  \
    X("zero", zero(d), 0.0, 0, -1, 1)                              \
    X("one", one(d), 1.0, 0, -1, 1)                                \
    X("pos_infty", pos_infty(d), HUGE_VAL, 0, -1, 1)               \
    X("neg_infty", neg_infty(d), -HUGE_VAL, 0, -1, 1)              \
    X("copy", copy(d, a), a, 0, -8, 8)                             \
    X("copy scalar", copy(d, s), s, 0, -8, 8)

#define UNIT_BINARY_MAPS(X)                                          \
    X("add", add(d, a, b), a + b, 1, -8, 8)                          \
    X("sub", sub(d, a, b), a - b, 1, -8, 8)                          \
    X("mul", mul(d, a, b), a* b, 1, -8, 8)                           \
    X("div", div(d, a, b), a / b, 1, -8, 8)                          \
    X("max", max(d, a, b), std::fmax(a, b), 0, -8, 8)                \
    X("min", min(d, a, b), std::fmin(a, b), 0, -8, 8)                \
    X("add scalar", add(d, a, s), a + s, 1, -8, 8)                   \
    X("sub scalar", sub(d, a, s), a - s, 1, -8, 8)                   \
    X("mul scalar", mul(d, a, s), a* s, 1, -8, 8)                    \
    X("div scalar", div(d, a, s), a / s, 1, -8, 8)                   \
    X("max scalar", max(d, a, s), std::fmax(a, s), 0, -8, 8)         \
    X("min scalar", min(d, a, s), std::fmin(a, s), 0, -8, 8)         \
    X("fma_AxBtC", fma_AxBtC(d, a, b, c), a* b + c, 1, -2, 2)        \
    X("fma_AxCtB", fma_AxCtB(d, a, b, c), a* c + b, 1, -2, 2)        \
    X("fma_AxBtC scalar", fma_AxBtC(d, a, s, c), a* s + c, 1, -2, 2) \
    X("copy second", copy(d, b), b, 0, -8, 8)

#define UNIT_TILE_MAPS(X)                                     \
    X("add_row", add_row(d, a, r), a + r, 1, -8, 8)           \
    X("sub_row", sub_row(d, a, r), a - r, 1, -8, 8)           \
    X("mul_row", mul_row(d, a, r), a* r, 1, -8, 8)            \
    X("div_row", div_row(d, a, r), a / r, 1, -8, 8)           \
    X("max_row", max_row(d, a, r), std::fmax(a, r), 0, -8, 8) \
    X("min_row", min_row(d, a, r), std::fmin(a, r), 0, -8, 8) \
    X("add_col", add_col(d, a, q), a + q, 1, -8, 8)           \
    X("sub_col", sub_col(d, a, q), a - q, 1, -8, 8)           \
    X("mul_col", mul_col(d, a, q), a* q, 1, -8, 8)            \
    X("div_col", div_col(d, a, q), a / q, 1, -8, 8)           \
    X("max_col", max_col(d, a, q), std::fmax(a, q), 0, -8, 8) \
    X("min_col", min_col(d, a, q), std::fmin(a, q), 0, -8, 8) \
    X("broadcast_row", broadcast_row(d, r), r, 0, -8, 8)      \
    X("broadcast_col", broadcast_col(d, q), q, 0, -8, 8)

struct MapOp {
    const char* name;
    double (*formula)(double a, double b, double c, double r, double q, double s);
    double error, low, high;
};
#define UNIT_ROW(label, call, expression, error, low, high)                     \
    {label,                                                                     \
     [](double a, double b, double c, double r, double q, double s) -> double { \
         (void)a, (void)b, (void)c, (void)r, (void)q, (void)s;                  \
         return expression;                                                     \
     },                                                                         \
     error, low, high},
inline const std::vector<MapOp> unary_maps = {UNIT_UNARY_MAPS(UNIT_ROW)};
inline const std::vector<MapOp> binary_maps = {UNIT_BINARY_MAPS(UNIT_ROW)};
inline const std::vector<MapOp> tile_maps = {UNIT_TILE_MAPS(UNIT_ROW)};
#undef UNIT_ROW

inline constexpr double map_scalar = -1.5;  // exact in every type

#define UNIT_CALL(label, call, ...) \
    if (op == number++) G::call;

enum class Family { unary, binary, tile };

template <class G, Family family, class D, class R, class Q>
__device__ __forceinline__ void run_map(int op, D& d, D& a, const D& b, const D& c, const R& r,
                                        const Q& q) {
    const auto s = convert<typename D::T>(float(map_scalar));
    int number = 0;
    if constexpr (family == Family::unary) {
        UNIT_UNARY_MAPS(UNIT_CALL)
    } else if constexpr (family == Family::binary) {
        UNIT_BINARY_MAPS(UNIT_CALL)
    } else {
        UNIT_TILE_MAPS(UNIT_CALL)
    }
}
#undef UNIT_CALL

// The vectors that go with a tile; vectors have none and take themselves.
template <any_object O>
struct vectors_of {
    using per_row = O;
    using per_col = O;
};
template <any_register_tile O>
struct vectors_of<O> {
    using per_row = typename O::col_vec;
    using per_col = typename O::row_vec;
};
template <any_shared_tile O>
struct vectors_of<O> {
    using per_row = sv<typename O::T, O::rows>;
    using per_col = sv<typename O::T, O::cols>;
};

template <int WARPS, Family family, class O>
__global__ void map_kernel(const __grid_constant__ global<typename O::T> a_data,
                           const __grid_constant__ global<typename O::T> b_data,
                           const __grid_constant__ global<typename O::T> c_data,
                           const __grid_constant__ global<typename O::T> r_data,
                           const __grid_constant__ global<typename O::T> q_data,
                           const __grid_constant__ global<typename O::T> d_data, const int op) {
    using G = group<WARPS>;
    using R = typename vectors_of<O>::per_row;
    using Q = typename vectors_of<O>::per_col;
    shared_allocator<> al(shared_memory());
    holder<O> a(al), b(al), c(al), d(al);
    holder<R> r(al);
    holder<Q> q(al);
    read_band(a.object, a_data);
    read_band(b.object, b_data);
    read_band(c.object, c_data);
    if constexpr (any_tile<O>) {
        read_band(r.object, r_data);
        // A group's register tiles have the same columns.
        if constexpr (any_register<O>)
            read(q.object, q_data);
        else
            read_band(q.object, q_data);
    }
    if constexpr (any_shared<O>) poison_shared(d.object);
    arch::sync_block();
    run_map<G, family>(op, d.object, a.object, b.object, c.object, r.object, q.object);
    arch::sync_block();
    write_band(d_data, d.object);
}

template <int WARPS, Family family, class O>
void map_cases() {
    using T = typename O::T;
    constexpr Type type = type_of<T>;
    constexpr int rows = rows_of<O>() * (any_tile<O> ? bands<O, WARPS> : 1);
    constexpr int cols = cols_of<O>() * (any_tile<O> ? 1 : bands<O, WARPS>);
    const auto& list = family == Family::unary    ? unary_maps
                       : family == Family::binary ? binary_maps
                                                  : tile_maps;
    for (int op = 0; op < int(list.size()); ++op) {
        const MapOp& map = list[op];
        run(text("%s %s %s", map.name, scope_name(WARPS).c_str(), object_name<O>().c_str()),
            [&](Case& test) {
                const Values a = test.uniform(type, rows * cols, map.low, map.high);
                const Values b = test.uniform(type, rows * cols, 0.5, 4);
                const Values c = test.uniform(type, rows * cols, -8, 8);
                const Values r = test.uniform(type, rows, 0.5, 4),
                             q = test.uniform(type, cols, 0.5, 4);
                T* data[5] = {test.input<T>("a", a), test.input<T>("b", b), test.input<T>("c", c),
                              test.input<T>("r", r), test.input<T>("q", q)};
                T* d = test.output<T>("d", size_t(rows * cols));
                Values expected(rows * cols);
                for (int i = 0; i < rows * cols; ++i) {
                    expected[i] =
                        map.formula(a[i], b[i], c[i], r[i / cols], q[i % cols], map_scalar);
                    if (std::isinf(expected[i])) expected[i] = rounded(type, expected[i]);
                }
                Tolerance tolerance = within(type);
                tolerance.relative += map.error * 0x1p-23;
                test.expect(expected, map.error == 0 ? bit_exact : tolerance, cols);
                test.launch([&] {
                    kittens::launch(map_kernel<WARPS, family, O>, 1, 32 * WARPS, 1,
                                    shared_bytes_of<O, O, O, O, typename vectors_of<O>::per_row,
                                                    typename vectors_of<O>::per_col>(),
                                    nullptr, matrix(data[0], rows, cols),
                                    matrix(data[1], rows, cols), matrix(data[2], rows, cols),
                                    matrix(data[3], 1, rows), matrix(data[4], 1, cols),
                                    matrix(d, rows, cols), op);
                });
            });
    }
}

}  // namespace unit
