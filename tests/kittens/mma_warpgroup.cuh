// Warpgroup products: one kernel per operand types, N, K, transposes and source of A; the cases
// vary the values and whether D is overwritten.
#pragma once

#include "mma_reference.cuh"

namespace unit {

template <class _TD, class _TA, class _TB, int _N, int _K, bool _transpose_a, bool _transpose_b,
          bool _from_registers, int _a_swizzle = 0, int _b_swizzle = 0>
struct warpgroup_product {
    using TD = _TD;
    using TA = _TA;
    using TB = _TB;
    static constexpr int N = _N, K = _K;
    static constexpr bool transpose_a = _transpose_a, transpose_b = _transpose_b;
    static constexpr bool from_registers = _from_registers;
    static constexpr int a_rows = transpose_a ? K : 64, a_cols = transpose_a ? 64 : K;
    static constexpr int b_rows = transpose_b ? N : K, b_cols = transpose_b ? K : N;
    using SA = st<TA, a_rows, a_cols, true, _a_swizzle>;
    using SB = st<TB, b_rows, b_cols, true, _b_swizzle>;
};

template <class P>
__global__ void __launch_bounds__(128)
    warpgroup_product_kernel(const __grid_constant__ global<typename P::TA> a,
                             const __grid_constant__ global<typename P::TB> b,
                             const __grid_constant__ global<typename P::TD> d,
                             const bool accumulate) {
    shared_allocator<> al(shared_memory());
    typename P::SB& sb = al.allocate<typename P::SB>();
    read(sb, b);
    rt<typename P::TD, 16, P::N> product;
    read(product, d, 16 * warpid());
    if constexpr (P::from_registers) {
        arch::fence_async_shared();
        arch::sync_block();
        rt<typename P::TA, 16, P::K> ra;
        read(ra, a, 16 * warpid());
        warpgroup::product<P::transpose_a, P::transpose_b>(product, ra, sb, accumulate);
        warpgroup::mma_async_wait(product);
    } else {
        typename P::SA& sa = al.allocate<typename P::SA>();
        read(sa, a);
        arch::fence_async_shared();
        arch::sync_block();
        warpgroup::product<P::transpose_a, P::transpose_b>(product, sa, sb, accumulate);
        warpgroup::mma_async_wait(product);
    }
    write(d, product, 16 * warpid());
}

template <class P>
void warpgroup_product_case(bool integers, bool accumulate) {
    using TD = typename P::TD;
    using TA = typename P::TA;
    using TB = typename P::TB;
    const std::string name =
        text("%s<-%s,%s %s%s 64x%dx%d swizzle%d,%d%s%s", name_of<TD>(), name_of<TA>(),
             name_of<TB>(), form_name(P::transpose_a, P::transpose_b).c_str(),
             P::from_registers ? " registers" : "", P::N, P::K, P::SA::swizzle_bytes,
             P::SB::swizzle_bytes, integers ? " integers" : "", accumulate ? " accumulate" : "");
    run(name, [&](Case& c) {
        const ProductShape shape{64, P::N, P::K, P::transpose_a, P::transpose_b};
        const size_t na = size_t(64) * P::K, nb = size_t(P::N) * P::K, nd = size_t(64) * P::N;
        const int bound = std::same_as<TD, half> ? 2 : 4;
        const Values a = integers ? c.integers(na, -bound, bound) : c.uniform(type_of<TA>, na);
        const Values b = integers ? c.integers(nb, -bound, bound) : c.uniform(type_of<TB>, nb);
        Values d(nd, poison);
        if (accumulate) d = integers ? c.integers(nd, -64, 64) : c.uniform(type_of<TD>, nd, -4, 4);
        TA* a_data = c.input<TA>("a", a);
        TB* b_data = c.input<TB>("b", b);
        TD* d_data = c.output<TD>("d", d);
        double magnitude = 0;
        const Values expected =
            reference_product(shape, a, b, accumulate ? d : Values(nd, 0.0), &magnitude);
        c.expect(
            expected,
            integers ? bit_exact : within(type_of<TD>, 1, magnitude * product_error<TA, TD>(P::K)),
            P::N);
        c.launch([&] {
            kittens::launch(warpgroup_product_kernel<P>, 1, 128, 1,
                            sizeof(typename P::SA) + sizeof(typename P::SB) + 2048, nullptr,
                            matrix(a_data, P::a_rows, P::a_cols),
                            matrix(b_data, P::b_rows, P::b_cols), matrix(d_data, 64, P::N),
                            accumulate);
        });
    });
}

template <class P>
void warpgroup_product_cases() {
    warpgroup_product_case<P>(true, false);
    warpgroup_product_case<P>(true, true);
    warpgroup_product_case<P>(false, true);
    if constexpr (intensity >= 2) warpgroup_product_case<P>(false, false);
}

// Every form that the types allow, A from shared memory and from registers.
template <class TD, class TA, class TB, int N, int K>
void warpgroup_forms() {
    warpgroup_product_cases<warpgroup_product<TD, TA, TB, N, K, false, true, false>>();
    warpgroup_product_cases<warpgroup_product<TD, TA, TB, N, K, false, true, true>>();
    if constexpr (sizeof(TA) == 2) {
        warpgroup_product_cases<warpgroup_product<TD, TA, TB, N, K, false, false, false>>();
        warpgroup_product_cases<warpgroup_product<TD, TA, TB, N, K, true, false, false>>();
        warpgroup_product_cases<warpgroup_product<TD, TA, TB, N, K, true, true, false>>();
        warpgroup_product_cases<warpgroup_product<TD, TA, TB, N, K, false, false, true>>();
    }
}

}  // namespace unit
