// Operands of 16 bits as gemm and grouped_gemm give them to TMA. Host C++ without torch.
#pragma once

#include <utility>

#include "csrc/common/backend.h"
#include "csrc/gemm/common/align_rows.h"

namespace thunderkittens::gemm {

// An operand as TMA reads it: rows of adjacent elements. `swapped` when those rows are the matrix's
// columns.
template <class Tensor>
struct Operand {
    Tensor tensor;  // keeps a copy alive
    View view;
    bool swapped = false;
    bool needs_copy = false;  // TMA cannot read it
    AlignRows copy = {};      // how it is made, if it is

    int64_t stride() const { return view.stride[2]; }
    int64_t batch_stride() const { return view.size[1] > 1 ? view.stride[1] : 0; }
    // Bytes, at most 128, that its rows begin at multiples of; where it needs a copy, those of the
    // copy.
    int64_t alignment(int element_bytes = 2) const {
        const auto all = needs_copy
                             ? static_cast<uint64_t>(aligned_pitch(view.size[3] * element_bytes))
                             : reinterpret_cast<uint64_t>(view.data) |
                                   static_cast<uint64_t>(view.stride[2] * element_bytes) |
                                   static_cast<uint64_t>(batch_stride() * element_bytes);
        return static_cast<int64_t>((all | 128) & -(all | 128));
    }
};

// Whether rows lie in memory as such, of adjacent elements, before one another.
inline bool has_rows(const View& view) {
    return (view.size[3] <= 1 || view.stride[3] == 1) && view.stride[2] >= 0 && view.stride[1] >= 0;
}

// The copy of rows that TMA cannot read, but for its address.
inline AlignRows copy_of_rows(const View& view, int64_t bytes) {
    return {.from = view.data,
            .batch = view.stride[1] == 0 ? 1 : view.size[1],
            .rows = view.size[2],
            .row_bytes = view.size[3] * bytes,
            .pitch = view.stride[2] * bytes,
            .batch_pitch = view.stride[1] * bytes,
            .to_pitch = aligned_pitch(view.size[3] * bytes)};
}

// An operand that has to be copied, in its order: the copy is allocated, and made by align().
template <class Tensor>
Operand<Tensor> copied_rows(const Tensor& tensor, const View& view, bool swapped) {
    const auto bytes = static_cast<int64_t>(tensor.element_size());
    AlignRows copy = copy_of_rows(view, bytes);
    Operand<Tensor> result{
        .tensor = empty({copy.batch * copy.rows * copy.to_pitch}, Backend<Tensor>::BYTE, tensor),
        .view = view,
        .swapped = swapped};
    result.view.data = copy.to = result.tensor.data_ptr();
    result.view.stride[3] = 1;
    result.view.stride[2] = copy.to_pitch / bytes;
    result.view.stride[1] = view.stride[1] == 0 ? 0 : view.size[2] * copy.to_pitch / bytes;
    result.copy = copy;
    return result;
}

// An operand where it lies, if its rows or its columns are adjacent elements; else a copy of it.
template <class Tensor>
Operand<Tensor> operand_in_place(const Tensor& tensor) {
    const auto bytes = static_cast<int>(tensor.element_size());
    const View view = as_4d(tensor), across = transposed(view);
    if (fits_tensor_map(view, bytes)) return {tensor, view, false};
    if (fits_tensor_map(across, bytes)) return {tensor, across, true};
    if (has_rows(view) || has_rows(across)) {
        const bool swapped = !has_rows(view);
        const View& rows = swapped ? across : view;
        if (can_align(copy_of_rows(rows, bytes))) return {tensor, rows, swapped, true};
    }
    Tensor copy = copy_for_tensor_map(tensor);
    const View readable = as_4d(copy);
    return {std::move(copy), readable, false};
}

// The same as TMA reads it: where it needs a copy, that is allocated, and made by align().
template <class Tensor>
Operand<Tensor> readable(const Operand<Tensor>& x) {
    return x.needs_copy ? copied_rows(x.tensor, x.view, x.swapped) : x;
}
template <class Tensor>
Operand<Tensor> operand(const Tensor& tensor) {
    return readable(operand_in_place(tensor));
}

// Makes the copies of two operands.
template <class Tensor>
void align(const Backend<Tensor>& on, const Operand<Tensor>& a, const Tensor& a_source,
           const Operand<Tensor>& b, const Tensor& b_source) {
    if (a.copy.rows == 0 && b.copy.rows == 0) return;
    const bool native = runs_native(on.device(a_source));
    auto launch = on.launch(native ? "align_rows" : "align_rows_portable", a_source);
    launch.may_read("a", a_source);
    launch.may_read("b", b_source);
    if (a.copy.rows > 0) launch.may_write("copy of a", a.tensor);
    if (b.copy.rows > 0) launch.may_write("copy of b", b.tensor);
    if (native) return launch_align_rows<MAX_ALIGNED>({a.copy, b.copy}, launch.stream);
    if constexpr (BUILDS_PORTABLE) {
        launch_portable_align_rows<MAX_ALIGNED>({a.copy, b.copy}, launch.stream);
    }
}

}  // namespace thunderkittens::gemm
