// mma.sync at warp scope: all four forms, operand types and shapes.
#include "mma_reference.cuh"

namespace unit {
namespace {

template <class _TD, class _TA, class _TB, int _M, int _N, int _K, bool _transpose_a,
          bool _transpose_b>
struct warp_product {
    using TD = _TD;
    using TA = _TA;
    using TB = _TB;
    static constexpr int M = _M, N = _N, K = _K;
    static constexpr bool transpose_a = _transpose_a, transpose_b = _transpose_b;
    using A = rt<TA, transpose_a ? K : M, transpose_a ? M : K,
                 std::conditional_t<transpose_a, col_l, row_l>>;
    using B = rt<TB, transpose_b ? N : K, transpose_b ? K : N,
                 std::conditional_t<transpose_b, row_l, col_l>>;
    using D = rt<TD, M, N>;
};

template <class P>
__global__ void warp_product_kernel(const __grid_constant__ global<typename P::TA> a_data,
                                    const __grid_constant__ global<typename P::TB> b_data,
                                    const __grid_constant__ global<typename P::TD> c_data,
                                    const __grid_constant__ global<typename P::TD> d_data) {
    typename P::A a;
    typename P::B b;
    typename P::D c, d;
    read(a, a_data);
    read(b, b_data);
    read(c, c_data);
    if constexpr (P::transpose_a && P::transpose_b)
        mma_AtBt(d, a, b, c);
    else if constexpr (P::transpose_a)
        mma_AtB(d, a, b, c);
    else if constexpr (P::transpose_b)
        warp::mma_ABt(d, a, b, c);
    else
        warp::mma_AB(d, a, b, c);
    write(d_data, d);
}

template <class P>
void product_case(bool integers) {
    using TD = typename P::TD;
    using TA = typename P::TA;
    using TB = typename P::TB;
    run(text("%s<-%s,%s %s %dx%dx%d%s", name_of<TD>(), name_of<TA>(), name_of<TB>(),
             form_name(P::transpose_a, P::transpose_b).c_str(), P::M, P::N, P::K,
             integers ? " integers" : ""),
        [&](Case& test) {
            const ProductShape shape{P::M, P::N, P::K, P::transpose_a, P::transpose_b};
            const size_t na = size_t(P::M) * P::K, nb = size_t(P::N) * P::K,
                         nd = size_t(P::M) * P::N;
            const int bound = std::same_as<TD, half> ? 2 : 4;
            const Values a =
                integers ? test.integers(na, -bound, bound) : test.uniform(type_of<TA>, na);
            const Values b =
                integers ? test.integers(nb, -bound, bound) : test.uniform(type_of<TB>, nb);
            const Values c =
                integers ? test.integers(nd, -64, 64) : test.uniform(type_of<TD>, nd, -4, 4);
            TA* a_data = test.input<TA>("a", a);
            TB* b_data = test.input<TB>("b", b);
            TD* c_data = test.input<TD>("c", c);
            TD* d_data = test.output<TD>("d", nd);
            double magnitude = 0;
            const Values expected = reference_product(shape, a, b, c, &magnitude);
            test.expect(expected,
                        integers ? bit_exact
                                 : within(type_of<TD>, 1, magnitude * product_error<TA, TD>(P::K)),
                        P::N);
            test.launch([&] {
                kittens::launch(warp_product_kernel<P>, 1, 32, 1, 0, nullptr,
                                matrix(a_data, P::A::rows, P::A::cols),
                                matrix(b_data, P::B::rows, P::B::cols), matrix(c_data, P::M, P::N),
                                matrix(d_data, P::M, P::N));
            });
        });
}

template <class TD, class TA, class TB, int M, int N, int K>
void forms() {
    for_values<0, 1>([](auto transpose_a) {
        for_values<0, 1>([](auto transpose_b) {
            using P = warp_product<TD, TA, TB, M, N, K, bool(decltype(transpose_a)::value),
                                   bool(decltype(transpose_b)::value)>;
            product_case<P>(true);
            product_case<P>(false);
        });
    });
}
template <class TD, class TA, class TB>
void shapes() {
    // The smallest K is one instruction: 16 elements, 32 of the 8-bit types.
    constexpr int k = 32 / int(sizeof(TA)), m = float_8bit<TA> ? 32 : 16;
    forms<TD, TA, TB, m, m, k>();
    forms<TD, TA, TB, m, 64, 2 * k>();
    forms<TD, TA, TB, 32, 32, k>();
    if constexpr (intensity >= 2) {
        forms<TD, TA, TB, 64, m, 3 * k>();
        forms<TD, TA, TB, 32, 96, k>();
    }
    if constexpr (intensity >= 3) {
        forms<TD, TA, TB, 64, 64, k>();
        forms<TD, TA, TB, 32, 128, 4 * k>();
        forms<TD, TA, TB, 64, 32, 8 * k>();
        forms<TD, TA, TB, 96, 32, k>();
    }
}

void products() {
    shapes<float, bf16, bf16>();
    shapes<float, half, half>();
    shapes<half, half, half>();
    shapes<float, fp8e4m3, fp8e4m3>();
    if constexpr (intensity >= 2) {
        shapes<float, fp8e5m2, fp8e5m2>();
        forms<float, fp8e4m3, fp8e5m2, 32, 64, 64>();
        forms<float, fp8e5m2, fp8e4m3, 32, 64, 64>();
    }
}
const Section section("mma/warp", products);

}  // namespace
}  // namespace unit
