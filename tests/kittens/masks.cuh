// Masks of tiles, on registers and in shared memory, at any scope.
#pragma once

#include "device.cuh"

namespace unit {

// X(name, call, kept): bounds m and n, fill value v, position (row, col).
#define UNIT_MASKS(X)                                                              \
    X("make_causal", make_causal(d, a, v), col <= row)                             \
    X("make_causal_t", make_causal_t(d, a, v), col >= row)                         \
    X("tril", tril(d, a, m, v), col - row <= m)                                    \
    X("triu", triu(d, a, m, v), col - row >= m)                                    \
    X("left_fill", left_fill(d, a, m, v), col >= m)                                \
    X("right_fill", right_fill(d, a, m, v), col < m)                               \
    X("upper_fill", upper_fill(d, a, m, v), row >= m)                              \
    X("lower_fill", lower_fill(d, a, m, v), row < m)                               \
    X("upper_right_fill", upper_right_fill(d, a, m, n, v), !(row < m && col >= n)) \
    X("apply", apply(d, a, position_value()), false)

// A value that depends on the position, exact in every type for tiles of up to 256 x 256.
struct position_value {
    template <class T>
    __device__ __forceinline__ float operator()(int row, int col, const T&) const {
        return float(row % 16 - col % 13);
    }
    static double host(int row, int col) { return row % 16 - col % 13; }
};

struct Mask {
    const char* name;
    bool (*keeps)(int row, int col, int m, int n);
};
#define UNIT_ROW(label, call, kept)                      \
    {label, [](int row, int col, int m, int n) -> bool { \
         (void)row, (void)col, (void)m, (void)n;         \
         return kept;                                    \
     }},
inline const std::vector<Mask> masks = {UNIT_MASKS(UNIT_ROW)};
#undef UNIT_ROW

template <int WARPS, class O>
__global__ void mask_kernel(const __grid_constant__ global<typename O::T> a_data,
                            const __grid_constant__ global<typename O::T> d_data, const int op,
                            const int m, const int n, const float v) {
    using G = group<WARPS>;
    shared_allocator<> al(shared_memory());
    holder<O> a_holder(al), d_holder(al);
    auto& a = a_holder.object;
    auto& d = d_holder.object;
    read_band(a, a_data);
    arch::sync_block();
    int number = 0;
#define UNIT_CALL(label, call, kept) \
    if (op == number++) G::call;
    UNIT_MASKS(UNIT_CALL)
#undef UNIT_CALL
    arch::sync_block();
    write_band(d_data, d);
}

template <int WARPS, class O>
void mask_cases() {
    using T = typename O::T;
    constexpr int rows = O::rows * bands<O, WARPS>, cols = O::cols;
    struct Bounds {
        int m, n;
        double value;
    };
    const Bounds bounds[] = {{0, 0, 0}, {5, 7, -2}, {rows - 1, cols - 3, -HUGE_VAL}, {-3, 1, 3}};
    const int variants = intensity >= 2 ? 4 : 2;
    for (int op = 0; op < int(masks.size()); ++op) {
        for (int variant = 0; variant < variants; ++variant) {
            const auto [m, n, value] = bounds[variant];
            run(text("%s(%d, %d, %g) %s %s", masks[op].name, m, n, value, scope_name(WARPS).c_str(),
                     object_name<O>().c_str()),
                [&](Case& c) {
                    const Values a = c.uniform(type_of<T>, rows * cols, -8, 8);
                    T* a_data = c.input<T>("a", a);
                    T* d_data = c.output<T>("d", size_t(rows * cols));
                    const bool applies = std::string(masks[op].name) == "apply";
                    Values expected(rows * cols);
                    for (int i = 0; i < rows * cols; ++i) {
                        const int row = i / cols, col = i % cols;
                        expected[i] = applies ? position_value::host(row, col)
                                      : masks[op].keeps(row, col, m, n)
                                          ? a[i]
                                          : rounded(type_of<T>, value);
                    }
                    c.expect(expected, bit_exact, cols);
                    c.launch([&] {
                        kittens::launch(mask_kernel<WARPS, O>, 1, 32 * WARPS, 1,
                                        shared_bytes_of<O, O>(), nullptr,
                                        matrix(a_data, rows, cols), matrix(d_data, rows, cols), op,
                                        m, n, float(value));
                    });
                });
        }
    }
}

}  // namespace unit
