// Register tiles from and to shared tiles, for every scope: ldmatrix, stmatrix and plain accesses.
// The other side of each transfer is read or written element by element.
#pragma once

#include "device.cuh"

namespace unit {

template <int WARPS, class RT, class ST>
__global__ void shared_to_register_kernel(const __grid_constant__ global<typename ST::T> from,
                                          const __grid_constant__ global<typename RT::T> to) {
    shared_allocator<> al(shared_memory());
    ST& tile = al.allocate<ST>();
    read(tile, from);
    arch::sync_block();
    RT registers;
    group<WARPS>::load(registers, tile);
    write(to, registers, group<WARPS>::warpid() * RT::rows);
}
template <int WARPS, class RT, class ST>
__global__ void register_to_shared_kernel(const __grid_constant__ global<typename RT::T> from,
                                          const __grid_constant__ global<typename ST::T> to) {
    shared_allocator<> al(shared_memory());
    ST& tile = al.allocate<ST>();
    RT registers;
    read(registers, from, group<WARPS>::warpid() * RT::rows);
    group<WARPS>::store(tile, registers);
    arch::sync_block();
    write(to, tile);
}

template <int WARPS, class RT, class ST>
void shared_register_cases() {
    using R = typename RT::T;
    using S = typename ST::T;
    const std::string name =
        text("%d warps %s %dx%d %s, shared %s swizzle%d", WARPS, name_of<R>(), RT::rows, RT::cols,
             name_of<typename RT::layout>(), name_of<S>(), ST::swizzle_bytes);
    const auto transfer = [&](const char* direction, bool loads) {
        run(direction + (" " + name), [&](Case& c) {
            const Type from_type = loads ? type_of<S> : type_of<R>;
            const Type to_type = loads ? type_of<R> : type_of<S>;
            const Values values = c.uniform(from_type, ST::num_elements, -8, 8);
            void* from = c.input("from", from_type, values);
            void* to = c.output("to", to_type, size_t(ST::num_elements));
            c.expect(rounded(to_type, values), bit_exact, ST::cols);
            c.launch([&] {
                if (loads) {
                    kittens::launch(shared_to_register_kernel<WARPS, RT, ST>, 1, 32 * WARPS, 1,
                                    sizeof(ST) + 1024, nullptr,
                                    matrix(static_cast<S*>(from), ST::rows, ST::cols),
                                    matrix(static_cast<R*>(to), ST::rows, ST::cols));
                } else {
                    kittens::launch(register_to_shared_kernel<WARPS, RT, ST>, 1, 32 * WARPS, 1,
                                    sizeof(ST) + 1024, nullptr,
                                    matrix(static_cast<R*>(from), ST::rows, ST::cols),
                                    matrix(static_cast<S*>(to), ST::rows, ST::cols));
                }
            });
        });
    };
    transfer("load", true);
    transfer("store", false);
}

template <class R, class S, int rows, int cols, class L, bool swizzle = true, int bytes = 0>
void shared_register_scopes() {
    using RT = rt<R, rows, cols, L>;
    for_values<1, 2, 4, 8>([](auto warps) {
        using ST = st<S, rows * warps, cols, swizzle, bytes>;
        if constexpr (sizeof(ST) <= 160 * 1024) shared_register_cases<warps, RT, ST>();
    });
}

}  // namespace unit
