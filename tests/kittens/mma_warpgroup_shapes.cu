// wgmma over K, over forced swizzles, on views of larger tiles, by the named verbs, and in flight.
#include "mma_warpgroup.cuh"

namespace unit {
namespace {

template <int a_swizzle, int b_swizzle>
void swizzles() {
    for_values<0, 1>([](auto transpose_a) {
        for_values<0, 1>([](auto transpose_b) {
            warpgroup_product_cases<warpgroup_product<
                float, bf16, bf16, 128, 64, bool(decltype(transpose_a)::value),
                bool(decltype(transpose_b)::value), false, a_swizzle, b_swizzle>>();
        });
    });
}

// Operands that are rectangles of tiles twice as large in each direction; the named verbs; two
// products in flight at once.
template <class T, int N, int K, bool transpose_a, bool transpose_b>
__global__ void __launch_bounds__(128)
    view_product_kernel(const __grid_constant__ global<T> a, const __grid_constant__ global<T> b,
                        const __grid_constant__ global<float> d, const int i, const int j) {
    constexpr int a_rows = transpose_a ? K : 64, a_cols = transpose_a ? 64 : K;
    constexpr int b_rows = transpose_b ? N : K, b_cols = transpose_b ? K : N;
    shared_allocator<> al(shared_memory());
    auto& sa = al.allocate<st<T, 2 * a_rows, 2 * a_cols>>();
    auto& sb = al.allocate<st<T, 2 * b_rows, 2 * b_cols>>();
    read(sa, a);
    read(sb, b);
    arch::fence_async_shared();
    arch::sync_block();
    const auto va = sa.template subtile<a_rows, a_cols>({i, j});
    const auto vb = sb.template subtile<b_rows, b_cols>({j, i});
    // The first product overwrites what is there, the second adds to it.
    rt_fl<16, N> first, second;
    read(first, d, 16 * warpid());
    read(second, d, 16 * warpid());
    if constexpr (transpose_a && transpose_b) {
        warpgroup::mm_AtBt(first, va, vb);
        warpgroup::mma_AtBt(second, va, vb);
    } else if constexpr (transpose_a) {
        warpgroup::mm_AtB(first, va, vb);
        warpgroup::mma_AtB(second, va, vb);
    } else if constexpr (transpose_b) {
        warpgroup::mm_ABt(first, va, vb);
        warpgroup::mma_ABt(second, va, vb);
    } else {
        warpgroup::mm_AB(first, va, vb);
        warpgroup::mma_AB(second, va, vb);
    }
    warpgroup::template mma_async_wait<1>(first);
    write(d, first, 16 * warpid());
    warpgroup::mma_async_wait(second);
    write(d, second, 64 + 16 * warpid());
}

template <class T, int N, int K, bool transpose_a, bool transpose_b>
void view_product_cases() {
    constexpr int a_rows = transpose_a ? K : 64, a_cols = transpose_a ? 64 : K;
    constexpr int b_rows = transpose_b ? N : K, b_cols = transpose_b ? K : N;
    for (int i = 0; i < 2; ++i) {
        for (int j = 0; j < 2; ++j) {
            run(text("views (%d, %d) %s %s 64x%dx%d", i, j, name_of<T>(),
                     form_name(transpose_a, transpose_b).c_str(), N, K),
                [&](Case& c) {
                    const Values a = c.integers(size_t(4) * a_rows * a_cols, -4, 4);
                    const Values b = c.integers(size_t(4) * b_rows * b_cols, -4, 4);
                    const size_t nd = size_t(64) * N;
                    // Rows 0 to 63 receive the first product and start as the second's sum.
                    Values d = c.integers(2 * nd, -64, 64);
                    T* a_data = c.input<T>("a", a);
                    T* b_data = c.input<T>("b", b);
                    float* d_data = c.output<float>("d", d);
                    const auto view = [](const Values& all, int rows, int cols, int r, int q) {
                        Values part;
                        for (int row = 0; row < rows; ++row) {
                            for (int col = 0; col < cols; ++col) {
                                part.push_back(
                                    all[size_t(r * rows + row) * 2 * cols + q * cols + col]);
                            }
                        }
                        return part;
                    };
                    const ProductShape shape{64, N, K, transpose_a, transpose_b};
                    const Values va = view(a, a_rows, a_cols, i, j),
                                 vb = view(b, b_rows, b_cols, j, i);
                    Values expected = reference_product(shape, va, vb, Values(nd, 0.0));
                    const Values second = reference_product(
                        shape, va, vb, Values(d.begin(), d.begin() + ptrdiff_t(nd)));
                    expected.insert(expected.end(), second.begin(), second.end());
                    c.expect(expected, bit_exact, N);
                    c.launch([&] {
                        kittens::launch(
                            view_product_kernel<T, N, K, transpose_a, transpose_b>, 1, 128, 1,
                            size_t(4) * (a_rows * a_cols + b_rows * b_cols) * sizeof(T) + 2048,
                            nullptr, matrix(a_data, 2 * a_rows, 2 * a_cols),
                            matrix(b_data, 2 * b_rows, 2 * b_cols), matrix(d_data, 128, N), i, j);
                    });
                });
        }
    }
}

void products() {
    for_values<16, 32, 48, 80, 128, 192, 256>(
        [](auto k) { warpgroup_forms<float, bf16, bf16, 64, k>(); });
    warpgroup_forms<float, half, half, 96, 256>();
    swizzles<64, 32>();
    swizzles<32, 64>();
    swizzles<32, 128>();
    swizzles<64, 64>();
    for_values<0, 1>([](auto transpose_a) {
        for_values<0, 1>([](auto transpose_b) {
            constexpr bool ta = decltype(transpose_a)::value, tb = decltype(transpose_b)::value;
            view_product_cases<bf16, 64, 64, ta, tb>();
            if constexpr (intensity >= 2) view_product_cases<half, 128, 32, ta, tb>();
        });
    });
    view_product_cases<fp8e4m3, 64, 128, false, true>();
    view_product_cases<bf16, 128, 16, false, true>();
}
const Section section("mma/warpgroup/shapes", products);

}  // namespace
}  // namespace unit
