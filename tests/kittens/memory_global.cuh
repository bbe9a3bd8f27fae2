// Ordinary and cp.async transfers between global memory and any object, at any scope. The object's
// other side is read or written element by element. Layouts have aligned and odd strides, places
// are whole, ragged, shifted by odd numbers of elements, negative and outside.
#pragma once

#include "device.cuh"

namespace unit {

enum class Transfer { load, store, load_async, load_async_semaphore };
inline const char* transfer_names[] = {"load", "store", "load_async", "load_async semaphore"};

template <int WARPS, class O>
using position_of = typename group<WARPS>::template at_of<O>;

template <int WARPS, int axis, class O, class TG>
__global__ void transfer_kernel(const __grid_constant__ global<TG> layout,
                                const __grid_constant__ global<typename O::T> plain,
                                const position_of<WARPS, O> at, const Transfer how) {
    using G = group<WARPS>;
    shared_allocator<> al(shared_memory());
    holder<O> holder(al);
    semaphore& arrived = al.allocate<semaphore>();
    auto& object = holder.object;
    if (how == Transfer::store) {
        read_band(object, plain);
        arch::sync_block();
        if constexpr (WARPS == 1 && axis == 2)
            store(layout, object, at);
        else
            G::template store<axis>(layout, object, at);
        return;
    }
    if constexpr (any_shared<O>) {
        poison_shared(object);
        if (threadIdx.x == 0) init_semaphore(arrived, 32 * WARPS);
        arch::sync_block();
        if (how == Transfer::load_async) {
            if constexpr (WARPS == 1) {
                load_async<axis>(object, layout, at);
                load_async_wait();
            } else {
                G::template load_async<axis>(object, layout, at);
                G::load_async_wait(1);
            }
        }
        if (how == Transfer::load_async_semaphore) {
            G::template load_async<axis>(object, layout, at, arrived);
            wait(arrived, 0);
        }
    }
    if (how == Transfer::load) {
        if constexpr (WARPS == 1 && axis == 2)
            load(object, layout, at);
        else
            G::template load<axis>(object, layout, at);
    }
    arch::sync_block();
    write_band(plain, object);
}

template <int WARPS, int axis, class O, class TG>
void transfer_case(const std::string& name, const View& view, position_of<WARPS, O> at,
                   Transfer how) {
    using T = typename O::T;
    constexpr int rows = rows_of<O>() * (any_tile<O> ? bands<O, WARPS> : 1);
    constexpr int cols = cols_of<O>() * (any_tile<O> ? 1 : bands<O, WARPS>);
    run(text("%s %s %s, %s axis%d %s", transfer_names[int(how)], scope_name(WARPS).c_str(),
             object_name<O>().c_str(), name_of<TG>(), axis, name.c_str()),
        [&](Case& c) {
            const bool stores = how == Transfer::store;
            const Values plain = c.uniform(type_of<T>, rows * cols, -8, 8);
            const Values layout =
                stores ? Values(view.extent(), poison) : c.uniform(type_of<TG>, view, -8, 8);
            T* plain_data =
                stores ? c.input<T>("object", plain) : c.output<T>("object", plain.size());
            TG* layout_data =
                stores ? c.output<TG>("layout", layout) : c.input<TG>("layout", layout);
            Values expected = stores ? layout : Values(plain.size(), 0.0);
            const element_coord e = at.template position<axis>();
            for (int i = 0; i < rows; ++i) {
                for (int j = 0; j < cols; ++j) {
                    const int b = e.b + (axis == 0 ? i : 0), d = e.d + (axis == 1 ? i : 0),
                              r = e.r + (axis == 2 ? i : 0);
                    if (!view.contains(b, d, r, e.c + j)) continue;
                    const size_t k = view.index(b, d, r, e.c + j);
                    if (stores)
                        expected[k] = rounded(type_of<TG>, plain[i * cols + j]);
                    else
                        expected[i * cols + j] = rounded(type_of<T>, layout[k]);
                }
            }
            c.expect(expected, bit_exact, stores ? int(view.row_stride) : cols);
            c.launch([&] {
                kittens::launch(transfer_kernel<WARPS, axis, O, TG>, 1, 32 * WARPS, 1,
                                shared_bytes_of<O>() + 1024, nullptr,
                                make_global<global<TG>>(layout_data, view),
                                bands_of<O, WARPS>(plain_data), at, how);
            });
        });
}

template <int WARPS, int axis, class O, class TG = typename O::T>
void transfer_cases() {
    using P = position_of<WARPS, O>;
    constexpr int chunk = 16 / int(sizeof(TG));
    constexpr int rows = rows_of<O>() * (any_tile<O> ? bands<O, WARPS> : 1);
    constexpr int cols = cols_of<O>() * (any_tile<O> ? 1 : bands<O, WARPS>);
    const int along = rows + rows / 2 + (rows == 1 ? 2 : 0), across = cols + cols / 2 + 3;
    const int last = rows == 1 ? 2 : 1;  // of the rows, in units of the object
    const auto shifted = [&](int i, int j) {
        return P(elements(axis == 0 ? i : 1, axis == 1 ? i : 1, axis == 2 ? i : 1, j));
    };
    const std::pair<const char*, P> places[] = {
        {"first", P(axis == 0 ? 0 : 1, axis == 1 ? 0 : 2, axis == 2 ? 0 : 1, 0)},
        {"corner", P(axis == 0 ? last : 1, axis == 1 ? last : 2, axis == 2 ? last : 1, 1)},
        {"shifted", shifted(rows / 4, 3)},
        {"before the start", shifted(-2 % rows, -5)},
        {"outside", shifted(along, 0)}};
    for (const bool aligned : {true, false}) {
        const int pad = aligned ? (chunk - across % chunk) % chunk + chunk : 2 - across % 2 + 1;
        const View view = View::padded(axis == 0 ? along : 2, axis == 1 ? along : 3,
                                       axis == 2 ? along : 2, across, pad, axis == 2 ? 2 : 0);
        for (const auto& [place, at] : places) {
            const std::string name = text("%s %s", place, aligned ? "aligned" : "odd");
            transfer_case<WARPS, axis, O, TG>(name, view, at, Transfer::load);
            transfer_case<WARPS, axis, O, TG>(name, view, at, Transfer::store);
            if constexpr (any_shared<O>) {
                transfer_case<WARPS, axis, O, TG>(name, view, at, Transfer::load_async);
                transfer_case<WARPS, axis, O, TG>(name, view, at, Transfer::load_async_semaphore);
            }
        }
    }
}

}  // namespace unit
