// TMA transfers of tiles: the kernels and the cases for one tile type along one axis. A load is
// read back element by element, a store is written element by element, so that each direction is
// tested alone.
#pragma once

#include "device.cuh"

namespace unit {

enum class Hint { none, evict_first, evict_last, prefetch };
enum class Store { plain, evict_first, add, min, max };

template <class ST, int axis>
using tma_global = global<typename ST::T, tma::descriptor<ST, axis>>;

template <class ST, int axis>
__global__ void tma_load_kernel(const __grid_constant__ tma_global<ST, axis> source,
                                const __grid_constant__ global<typename ST::T> seen,
                                const coord<ST> at, const Hint hint) {
    shared_allocator<> al(shared_memory());
    ST& tile = al.allocate<ST>();
    semaphore& arrived = al.allocate<semaphore>();
    poison_shared(tile);
    if (threadIdx.x == 0) {
        init_semaphore(arrived, 0, 1);
        arch::mbarrier_init_fence();
        if (hint == Hint::prefetch) {
            tma::prefetch_map<ST, axis>(source);
            tma::prefetch<ST, axis>(source, at);
        }
        tma::expect(arrived, tile);
        if (hint == Hint::evict_first) {
            tma::load_async<axis, tma::CachePolicy::evict_first>(tile, source, at, arrived);
        } else if (hint == Hint::evict_last) {
            tma::load_async<axis, tma::CachePolicy::evict_last>(tile, source, at, arrived);
        } else {
            tma::load_async<axis>(tile, source, at, arrived);
        }
    }
    arch::sync_block();
    wait(arrived, 0);
    write(seen, tile);
}

template <class ST, int axis>
__global__ void tma_store_kernel(const __grid_constant__ tma_global<ST, axis> destination,
                                 const __grid_constant__ global<typename ST::T> values,
                                 const coord<ST> at, const Store how) {
    using T = typename ST::T;
    shared_allocator<> al(shared_memory());
    ST& tile = al.allocate<ST>();
    read(tile, values);
    arch::sync_block();
    if (threadIdx.x != 0) return;
    if (how == Store::plain) tma::store_async<axis>(destination, tile, at);
    if (how == Store::evict_first) {
        tma::store_async<axis, tma::CachePolicy::evict_first>(destination, tile, at);
    }
    if constexpr (!float_8bit<T>) {
        if (how == Store::add) tma::store_add_async<axis>(destination, tile, at);
    }
    if constexpr (float_16bit<T>) {
        if (how == Store::min) tma::store_min_async<axis>(destination, tile, at);
        if (how == Store::max) tma::store_max_async<axis>(destination, tile, at);
    }
    tma::store_async_wait();
}

// f(index in the tile, in bounds, index in the view) for every element of the tile at `e`.
template <class F>
void for_each_in_tile(int rows, int cols, int axis, const View& view, element_coord e, F f) {
    for (int i = 0; i < rows; ++i) {
        for (int j = 0; j < cols; ++j) {
            const int b = e.b + (axis == 0 ? i : 0), d = e.d + (axis == 1 ? i : 0),
                      r = e.r + (axis == 2 ? i : 0), c = e.c + j;
            f(static_cast<size_t>(i) * cols + j, view.contains(b, d, r, c), view.index(b, d, r, c));
        }
    }
}

template <class ST>
std::string tile_name() {
    return text("%s %dx%d %s", name_of<typename ST::T>(), ST::rows, ST::cols,
                ST::swizzle_bytes ? text("swizzle%d", ST::swizzle_bytes).c_str() : "plain");
}

template <class ST, int axis>
void tma_load_case(const std::string& name, const View& view, coord<ST> at, Hint hint) {
    using T = typename ST::T;
    run("load " + tile_name<ST>() + text(" axis%d ", axis) + name, [&](Case& c) {
        const Values values = c.uniform(type_of<T>, view, -8, 8);
        T* source = c.input<T>("source", values);
        T* seen = c.output<T>("tile", size_t(ST::num_elements));
        Values expected(ST::num_elements, 0.0);
        for_each_in_tile(ST::rows, ST::cols, axis, view, at.template position<axis>(),
                         [&](size_t i, bool inside, size_t k) {
                             if (inside) expected[i] = values[k];
                         });
        c.expect(expected, bit_exact, ST::cols);
        c.launch([&] {
            kittens::launch(tma_load_kernel<ST, axis>, 1, 128, 1, sizeof(ST) + 4096, nullptr,
                            make_global<tma_global<ST, axis>>(source, view),
                            matrix(seen, ST::rows, ST::cols), at, hint);
        });
    });
}

template <class ST, int axis>
void tma_store_case(const std::string& name, const View& view, coord<ST> at, Store how) {
    using T = typename ST::T;
    run("store " + tile_name<ST>() + text(" axis%d ", axis) + name, [&](Case& c) {
        const Type type = type_of<T>;
        const Values values = c.uniform(type, ST::num_elements, -8, 8);
        const bool reduces = how == Store::add || how == Store::min || how == Store::max;
        Values initial(view.extent(), poison);
        if (reduces) initial = c.uniform(type, view, -8, 8);
        T* tile = c.input<T>("tile", values);
        T* destination = c.output<T>("destination", initial);
        Values expected = initial;
        View written = view;  // up to the next multiple of 16 bytes
        constexpr int chunk = 16 / int(sizeof(T));
        written.c = (view.c + chunk - 1) / chunk * chunk;
        for_each_in_tile(ST::rows, ST::cols, axis, written, at.template position<axis>(),
                         [&](size_t i, bool inside, size_t k) {
                             if (!inside) return;
                             const double old = initial[k], x = values[i];
                             expected[k] = how == Store::add   ? rounded(type, old + x)
                                           : how == Store::min ? std::min(old, x)
                                           : how == Store::max ? std::max(old, x)
                                                               : x;
                         });
        c.expect(expected, bit_exact, static_cast<int>(view.row_stride));
        c.launch([&] {
            kittens::launch(tma_store_kernel<ST, axis>, 1, 128, 1, sizeof(ST) + 4096, nullptr,
                            make_global<tma_global<ST, axis>>(destination, view),
                            matrix(tile, ST::rows, ST::cols), at, how);
        });
    });
}

// All cases of one tile type. The tensor's last tile is ragged in both directions. The hardware
// wants column coordinates that are multiples of 16 bytes, clips stores (not loads) in chunks of
// that size, and takes negative coordinates in loads only.
template <class ST, int axis>
void tma_tile_cases() {
    using T = typename ST::T;
    constexpr int chunk = 16 / int(sizeof(T));
    constexpr int rows = ST::rows, cols = ST::cols;
    const int tail_rows = rows > 3 ? rows / 2 - 1 : 1;
    const int tail_cols =
        (cols / chunk + 1) / 2 * chunk;  // of stores; loads end 3 elements earlier
    // The dimension along `axis` holds one and a part tiles.
    const int along = rows + tail_rows, across = cols + tail_cols;
    const auto view_of = [&](int columns) {
        return View::padded(axis == 0 ? along : 2, axis == 1 ? along : 3, axis == 2 ? along : 2,
                            columns, across + chunk - columns, axis == 2 ? 3 : 0);
    };
    const View stored = view_of(across), loaded = view_of(across - 3);
    const auto shifted = [&](int i, int j) {
        return coord<ST>(elements(axis == 0 ? i : 1, axis == 1 ? i : 1, axis == 2 ? i : 1, j));
    };
    const coord<ST> corner(1, axis == 2 ? 2 : 1, 1, 1);
    const std::pair<const char*, coord<ST>> places[] = {
        {"first", coord<ST>(axis == 0 ? 0 : 1, axis == 1 ? 0 : 2, axis == 2 ? 0 : 1, 0)},
        {"corner", corner},
        {"in elements", shifted(tail_rows, chunk)},
        {"outside", shifted(along, across)},
        {"above the start", shifted(-2, 0)},
        {"left of the start", shifted(1, -chunk)}};
    int index = 0;
    for (const auto& [name, at] : places) {
        tma_load_case<ST, axis>(name, loaded, at, Hint::none);
        if (index++ < 4) tma_store_case<ST, axis>(name, stored, at, Store::plain);
    }
    tma_load_case<ST, axis>("corner evict_first", loaded, corner, Hint::evict_first);
    tma_load_case<ST, axis>("corner evict_last", loaded, corner, Hint::evict_last);
    tma_load_case<ST, axis>("corner prefetch", loaded, corner, Hint::prefetch);
    if constexpr (axis == 2) {
        tma_store_case<ST, 2>("clipped in chunks", loaded, coord<ST>(0, 1, 1, 1), Store::plain);
    }
    tma_store_case<ST, axis>("corner evict_first", stored, corner, Store::evict_first);
    if constexpr (!float_8bit<T>) tma_store_case<ST, axis>("add", stored, corner, Store::add);
    if constexpr (float_16bit<T>) {
        tma_store_case<ST, axis>("min", stored, corner, Store::min);
        tma_store_case<ST, axis>("max", stored, corner, Store::max);
    }
}

}  // namespace unit
