// Shared tiles and vectors from and to global memory, by all threads of a group: in words of 16
// bytes where the addresses are aligned, else of 8 or 4 bytes, else element by element.
#pragma once

#include "global_window.cuh"

namespace kittens::inline KITTENS_BACKEND {
namespace detail {

// Shared objects as tiles: a vector is a row.
template <any_shared_tile ST>
__device__ __forceinline__ uint32_t place(const ST& tile, int row, int col) {
    return tile.address_of(row, col);
}
template <any_shared_vector SV>
__device__ __forceinline__ uint32_t place(const SV& vector, int, int col) {
    return vector.address_of(col);
}
template <any_shared Object>
struct extent {
    static constexpr int rows = 1, cols = Object::length;
};
template <any_shared_tile ST>
struct extent<ST> {
    static constexpr int rows = ST::rows, cols = ST::cols;
};

template <any_shared Object, class GL>
__host__ __device__ constexpr void check_shared_type() {
    static_assert(std::same_as<typename Object::T, typename GL::T>,
                  "a shared object is loaded from, and stored to, a global layout of its own type");
}

// Calls visit<n>() with the longest run for which the window is aligned.
template <any_shared Object, class Window, class Visit>
__device__ __forceinline__ void with_widest_run(const Window& window, Visit visit) {
    using T = typename Object::T;
    constexpr int longest = longest_run<Object>() * int(sizeof(T));
    const auto try_width = [&]<int bytes>() {
        if constexpr (bytes > longest || bytes < int(sizeof(T))) {
            return false;
        } else {
            if (!window.aligned(bytes)) return false;
            visit.template operator()<bytes / int(sizeof(T))>();
            return true;
        }
    };
    if (try_width.template operator()<16>()) return;
    if (try_width.template operator()<8>()) return;
    if (try_width.template operator()<4>()) return;
    visit.template operator()<1>();
}

template <any_shared Object, class GL, int axis>
__device__ __forceinline__ void load_shared_object(const Object& destination,
                                                   const global_window<GL, axis>& window,
                                                   int thread, int threads) {
    using T = typename Object::T;
    check_shared_type<Object, GL>();
    with_widest_run<Object>(window, [&]<int n>() {
        constexpr int per_row = extent<Object>::cols / n, total = extent<Object>::rows * per_row;
        // Several loads in flight per thread before the first store waits for them.
        constexpr int batch = 4;
        for (int start = thread; start < total; start += batch * threads) {
            elements<T, n> runs[batch];
#pragma unroll
            for (int b = 0; b < batch; ++b) {
                const int i = start + b * threads, row = i / per_row, col = i % per_row * n;
                if (i >= total) continue;
                if (window.has_run(row, col, n))
                    runs[b] = window.template load_whole<n>(row, col);
                else
                    runs[b] = window.template load_checked<n>(row, col);
            }
#pragma unroll
            for (int b = 0; b < batch; ++b) {
                const int i = start + b * threads, row = i / per_row, col = i % per_row * n;
                if (i < total) arch::store_shared(place(destination, row, col), runs[b]);
            }
        }
    });
}

template <any_shared Object, class GL, int axis>
__device__ __forceinline__ void store_shared_object(const global_window<GL, axis>& window,
                                                    const Object& source, int thread, int threads) {
    using T = typename Object::T;
    check_shared_type<Object, GL>();
    with_widest_run<Object>(window, [&]<int n>() {
        constexpr int per_row = extent<Object>::cols / n, total = extent<Object>::rows * per_row;
#pragma unroll 4
        for (int i = thread; i < total; i += threads) {
            const int row = i / per_row, col = i % per_row * n;
            const auto run = arch::load_shared<elements<T, n>>(place(source, row, col));
            if (window.has_run(row, col, n))
                window.store_whole(row, col, run);
            else
                window.store_checked(row, col, run);
        }
    });
}

// cp.async where it can copy (4, 8 or 16 aligned bytes); a run that leaves the window at its end is
// completed with zeros by the instruction itself.
template <any_shared Object, class GL, int axis>
__device__ __forceinline__ void load_shared_object_async(const Object& destination,
                                                         const global_window<GL, axis>& window,
                                                         int thread, int threads) {
    using T = typename Object::T;
    check_shared_type<Object, GL>();
    with_widest_run<Object>(window, [&]<int n>() {
        constexpr int per_row = extent<Object>::cols / n, total = extent<Object>::rows * per_row;
        constexpr int bytes = n * int(sizeof(T));
#pragma unroll 4
        for (int i = thread; i < total; i += threads) {
            const int row = i / per_row, col = i % per_row * n;
            const uint32_t to = place(destination, row, col);
            if constexpr (bytes >= 4) {
                const int left = window.end_col - col;
                const bool begins_inside =
                    window.has_row(row) && col >= window.first_col && left > 0;
                if (begins_inside || !window.has_row(row) || col + n <= window.first_col ||
                    left <= 0) {
                    const int valid = begins_inside ? (left < n ? left : n) : 0;
                    const T* from = begins_inside ? window.at(row, col) : window.corner;
                    arch::cp_async_partial<bytes>(to, from, valid * int(sizeof(T)));
                } else {
                    arch::store_shared(to, window.template load_checked<n>(row, col));
                }
            } else {
                arch::store_shared(to, window.template load_checked<n>(row, col));
            }
        }
    });
}

}  // namespace detail
}  // namespace kittens::inline KITTENS_BACKEND
