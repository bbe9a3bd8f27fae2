// copy() between element types, layouts and objects; swapped layouts; transposes; views.
#pragma once

#include "device.cuh"

namespace unit {

enum class Convert { copy, swap_layout, transpose };

// D = f(S), for two objects of the same kind.
template <int WARPS, Convert how, class D, class S>
__global__ void conversion_kernel(const __grid_constant__ global<typename S::T> s_data,
                                  const __grid_constant__ global<typename D::T> d_data) {
    using G = group<WARPS>;
    shared_allocator<> al(shared_memory());
    holder<S> s(al);
    holder<D> d(al);
    read_band(s.object, s_data);
    arch::sync_block();
    if constexpr (how == Convert::copy)
        G::copy(d.object, s.object);
    else if constexpr (how == Convert::swap_layout)
        G::swap_layout(d.object, s.object);
    else
        G::transpose_sep(d.object, s.object);
    arch::sync_block();
    write_band(d_data, d.object);
}

template <int WARPS, Convert how, class D, class S>
void conversion_case() {
    using TS = typename S::T;
    using TD = typename D::T;
    constexpr int count = count_of<S> * bands<S, WARPS>;
    const char* names[] = {"copy", "swap_layout", "transpose_sep"};
    run(text("%s %s %s to %s", names[int(how)], scope_name(WARPS).c_str(), object_name<S>().c_str(),
             object_name<D>().c_str()),
        [&](Case& c) {
            // Beyond the range of the 8-bit types, and values that they round to zero.
            const bool wide = how == Convert::copy && any_tile<S>;
            Values s = c.uniform(type_of<TS>, count, wide ? -600 : -8, wide ? 600 : 8);
            for (int i = 0; i < count; i += 3) s[i] = rounded(type_of<TS>, s[i] * 0x1p-12);
            TS* s_data = c.input<TS>("s", s);
            TD* d_data = c.output<TD>("d", size_t(count));
            Values expected = s;
            if (how == Convert::transpose) {
                constexpr int rows = rows_of<S>(), cols = cols_of<S>();
                for (int i = 0; i < count; ++i) expected[i % cols * rows + i / cols] = s[i];
            }
            c.expect(rounded(type_of<TD>, expected), bit_exact, cols_of<D>());
            c.launch([&] {
                kittens::launch(conversion_kernel<WARPS, how, D, S>, 1, 32 * WARPS, 1,
                                shared_bytes_of<D, S>(), nullptr, bands_of<S, WARPS>(s_data),
                                bands_of<D, WARPS>(d_data));
            });
        });
}

}  // namespace unit
