// Strided views of at most four dimensions, and what a tensor map can describe. Host C++ only;
// tensor.h makes them of torch's tensors, emulated.h of NumPy's arrays.
#pragma once

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

}  // namespace thunderkittens
