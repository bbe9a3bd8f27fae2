// Strided views of at most four dimensions, and what a tensor map can describe. Host C++ only;
// tensor.h makes them of torch's tensors, emulated.h of NumPy's arrays.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <utility>

namespace thunderkittens {

// Aligned to the right: missing leading dimensions have size 1. Strides are in elements. The stride
// of a dimension of size 1 means nothing and may be any number, so it is replaced by that of a
// packed layout, which a tensor map accepts.
struct View {
    const void* data = nullptr;
    std::array<int64_t, 4> size{1, 1, 1, 1};
    std::array<int64_t, 4> stride{0, 0, 0, 0};
};

inline View make_view(const void* data, std::span<const int64_t> sizes,
                      std::span<const int64_t> strides) {
    View view{.data = data};
    const auto dims = static_cast<int64_t>(sizes.size());
    int64_t packed = 1;
    for (int64_t i = 3; i >= 0; --i) {
        const int64_t source = i - (4 - dims);
        view.size[i] = source >= 0 ? sizes[source] : 1;
        view.stride[i] = view.size[i] > 1 ? strides[source] : packed;
        packed = view.stride[i] * (view.size[i] > 1 ? view.size[i] : 1);
    }
    return view;
}

// Swaps the last two dimensions: the same memory, read in the other major order.
inline View transposed(View view) {
    std::swap(view.size[2], view.size[3]);
    std::swap(view.stride[2], view.stride[3]);
    return view;
}

// Whether a tensor map can describe the view: elements adjacent in the last dimension, base and the
// other strides multiples of 16 bytes (CUDA driver API, cuTensorMapEncodeTiled), no negative
// stride. Expanded dimensions (stride 0) are fine.
inline bool fits_tensor_map(const View& view, int element_bytes) {
    if (reinterpret_cast<uintptr_t>(view.data) % 16 != 0) return false;
    if (view.size[3] > 1 && view.stride[3] != 1) return false;
    for (int i = 0; i < 3; ++i) {
        const int64_t bytes = view.stride[i] * element_bytes;
        if (view.size[i] > 1 && (bytes < 0 || bytes % 16 != 0 || bytes >= (int64_t{1} << 40)))
            return false;
    }
    return true;
}

// Whether the elements fill memory without gaps and overlaps, in whatever order.
inline bool is_dense(std::span<const int64_t> sizes, std::span<const int64_t> strides) {
    std::size_t left = 0;  // dimensions with more than one element
    for (const int64_t size : sizes) {
        if (size == 0) return true;
        left += size > 1;
    }
    for (int64_t packed = 1; left > 0; --left) {
        std::size_t i = 0;
        while (i < sizes.size() && (sizes[i] <= 1 || strides[i] != packed)) ++i;
        if (i == sizes.size()) return false;
        packed *= sizes[i];
    }
    return true;
}

// The strides that torch.empty_like takes: those of a dense tensor, else packed in their order.
// Where that says nothing, of stride 0 and of equal strides and sizes, dimensions stay where they
// are; of equal strides the larger dimension is the outer one.
inline void find_dense_strides(std::span<const int64_t> sizes, std::span<const int64_t> strides,
                               std::span<int64_t> dense) {
    if (is_dense(sizes, strides)) {
        std::copy(strides.begin(), strides.end(), dense.begin());
        return;
    }
    const auto dims = static_cast<int>(sizes.size());
    std::array<int, 8> order{};  // of the dimensions, innermost first
    for (int i = 0; i < dims; ++i) order[i] = dims - 1 - i;
    const auto compare = [&](int x, int y) {
        if (strides[x] == 0 || strides[y] == 0) return 0;
        if (strides[x] != strides[y]) return strides[x] < strides[y] ? -1 : 1;
        return sizes[x] > sizes[y] ? 1 : 0;
    };
    for (int i = 1; i < dims; ++i) {
        int moved = i;
        for (int other = i - 1; other >= 0; --other) {
            const int result = compare(order[other], order[moved]);
            if (result < 0) break;
            if (result > 0) std::swap(order[other], order[moved]), moved = other;
        }
    }
    int64_t packed = 1;
    for (int i = 0; i < dims; ++i) {
        dense[order[i]] = packed;
        packed *= std::max<int64_t>(sizes[order[i]], 1);
    }
}

}  // namespace thunderkittens
