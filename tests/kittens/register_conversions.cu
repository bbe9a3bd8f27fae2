// Conversions of register tiles: element types, layouts, transposes, bands.
#include "conversions.cuh"

namespace unit {
namespace {

template <int rows, int cols, class L>
void types() {
    for_types<float, bf16, half, fp8e4m3, fp8e5m2>([]<class D>(std::type_identity<D>) {
        for_types<float, bf16, half, fp8e4m3, fp8e5m2>([]<class S>(std::type_identity<S>) {
            conversion_case<1, Convert::copy, rt<D, rows, cols, L>, rt<S, rows, cols, L>>();
        });
    });
}
template <class T, int rows, int cols>
void layouts() {
    conversion_case<1, Convert::swap_layout, rt<T, rows, cols, col_l>, rt<T, rows, cols, row_l>>();
    conversion_case<1, Convert::swap_layout, rt<T, rows, cols, row_l>, rt<T, rows, cols, col_l>>();
    conversion_case<1, Convert::transpose, rt<T, cols, rows, row_l>, rt<T, rows, cols, row_l>>();
    conversion_case<1, Convert::transpose, rt<T, cols, rows, col_l>, rt<T, rows, cols, col_l>>();
    conversion_case<1, Convert::transpose, rt<T, cols, rows, col_l>, rt<T, rows, cols, row_l>>();
    conversion_case<1, Convert::transpose, rt<T, cols, rows, row_l>, rt<T, rows, cols, col_l>>();
}

// In place: the other layout's view, the transpose of a square tile, a band of rows.
enum class InPlace { swap_layout, transpose, band };

template <InPlace how, class RT>
__global__ void in_place_kernel(const __grid_constant__ global<typename RT::T> s_data,
                                const __grid_constant__ global<typename RT::T> d_data) {
    RT tile;
    read(tile, s_data);
    if constexpr (how == InPlace::swap_layout) {
        auto& other = swap_layout_inplace(tile);
        static_assert(!std::same_as<typename std::remove_cvref_t<decltype(other)>::layout,
                                    typename RT::layout>);
        write(d_data, other);
    } else if constexpr (how == InPlace::transpose) {
        transpose_inplace(tile);
        write(d_data, tile);
    } else {
        auto& band = subtile_inplace<16>(tile, 1);
        for_each_element(band,
                         [](int, int, typename RT::T& x) { x = convert<typename RT::T>(1.0f); });
        write(d_data, tile);
    }
}
template <InPlace how, class RT>
void in_place_case() {
    using T = typename RT::T;
    const char* names[] = {"swap_layout_inplace", "transpose_inplace", "subtile_inplace"};
    run(text("%s %s", names[int(how)], object_name<RT>().c_str()), [&](Case& c) {
        const Values s = c.uniform(type_of<T>, RT::num_elements, -8, 8);
        T* s_data = c.input<T>("s", s);
        T* d_data = c.output<T>("d", s.size());
        Values expected = s;
        for (int i = 0; i < RT::num_elements; ++i) {
            const int row = i / RT::cols, col = i % RT::cols;
            if (how == InPlace::transpose) expected[col * RT::cols + row] = s[i];
            if (how == InPlace::band && row / 16 == 1) expected[i] = 1;
        }
        c.expect(expected, bit_exact, RT::cols);
        c.launch([&] {
            kittens::launch(in_place_kernel<how, RT>, 1, 32, 1, 0, nullptr,
                            matrix(s_data, RT::rows, RT::cols), matrix(d_data, RT::rows, RT::cols));
        });
    });
}

// A stripe of columns that begins where a base tile does.
template <int first, class D, class S>
__global__ void take_columns_kernel(const __grid_constant__ global<typename S::T> s_data,
                                    const __grid_constant__ global<typename S::T> d_data) {
    S tile;
    D stripe;
    read(tile, s_data);
    take_columns(stripe, tile, first);
    write(d_data, stripe);
}
template <int first, class D, class S>
void take_columns_case() {
    using T = typename S::T;
    run(text("take_columns %s from %d", object_name<S>().c_str(), first), [&](Case& c) {
        const Values s = c.uniform(type_of<T>, S::num_elements, -8, 8);
        T* s_data = c.input<T>("s", s);
        T* d_data = c.output<T>("d", D::num_elements);
        Values expected;
        for (int i = 0; i < D::num_elements; ++i) {
            expected.push_back(s[i / D::cols * S::cols + first + i % D::cols]);
        }
        c.expect(expected, bit_exact, D::cols);
        c.launch([&] {
            kittens::launch(take_columns_kernel<first, D, S>, 1, 32, 1, 0, nullptr,
                            matrix(s_data, S::rows, S::cols), matrix(d_data, D::rows, D::cols));
        });
    });
}

void conversions() {
    types<32, 64, row_l>();
    types<64, 32, col_l>();
    layouts<float, 16, 32>();
    layouts<bf16, 48, 16>();
    layouts<half, 32, 32>();
    if constexpr (intensity >= 2) {
        types<32, 32, col_l>();
        layouts<bf16, 16, 64>();
        layouts<float, 32, 16>();
    }
    if constexpr (intensity >= 3) {
        types<64, 96, row_l>();
        layouts<half, 64, 48>();
        layouts<bf16, 64, 64>();
    }
    for_types<float, bf16, half>([]<class T>(std::type_identity<T>) {
        in_place_case<InPlace::swap_layout, rt<T, 32, 16, row_l>>();
        in_place_case<InPlace::swap_layout, rt<T, 16, 48, col_l>>();
        in_place_case<InPlace::transpose, rt<T, 32, 32, row_l>>();
        in_place_case<InPlace::transpose, rt<T, 48, 48, col_l>>();
        in_place_case<InPlace::band, rt<T, 48, 32, row_l>>();
        in_place_case<InPlace::band, rt<T, 32, 16, col_l>>();
        take_columns_case<16, rt<T, 16, 64, row_l>, rt<T, 16, 112, row_l>>();
        take_columns_case<32, rt<T, 32, 16, col_l>, rt<T, 32, 48, col_l>>();
    });
    take_columns_case<32, rt_fp8e4m3<32, 32>, rt_fp8e4m3<32, 96>>();
}
const Section section("register/conversions", conversions);

}  // namespace
}  // namespace unit
