// Tensors as rows: dimensions but the last, merged where every operand allows it, and copies of
// what kernels cannot read so. Host C++ without torch.
#pragma once

#include <array>
#include <utility>
#include <vector>

#include "csrc/common/backend.h"
#include "csrc/norm/norm.h"

namespace thunderkittens::norm {

// Operands of one shape, whose last dimension has `groups` rows beside each other. It holds the
// copies that it has made.
template <class Tensor>
struct RowOperands {
    Rows rows;
    bool aligned = true;  // every row begins at a multiple of 16 bytes, and has whole units

    RowOperands(const Tensor& first, int64_t groups,
                std::initializer_list<std::pair<const std::optional<Tensor>*, Operand*>> others,
                Operand* operand)
        : width_(first.size(-1) / std::max<int64_t>(groups, 1)) {
        tensors_.emplace_back(first, operand);
        for (const auto& [tensor, place] : others) {
            if (*tensor) tensors_.emplace_back(**tensor, place);
        }
        aligned = width_ % UNIT == 0;
        for (auto& [tensor, place] : tensors_) {
            const bool adjacent = width_ * groups <= 1 || tensor.stride(tensor.dim() - 1) == 1;
            if (!adjacent) tensor = packed(tensor);
        }
        if (!merge(groups)) {
            for (auto& [tensor, place] : tensors_) tensor = packed(tensor);
            TK_CHECK(merge(groups), "thunderkittens: packed rows have too many dimensions");
        }
        for (auto& [tensor, place] : tensors_) {
            const auto bytes = static_cast<int64_t>(tensor.element_size());
            place->data = tensor.data_ptr();
            aligned &= reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 == 0;
            for (int i = 0; i < rows.dims; ++i) aligned &= place->stride[i] * bytes % 16 == 0;
        }
    }
    const Tensor& operator[](std::size_t i) const { return tensors_[i].first; }
    const auto& all() const { return tensors_; }

  private:
    int64_t width_;
    std::vector<std::pair<Tensor, Operand*>> tensors_;

    // False where more than three dimensions are left.
    bool merge(int64_t groups) {
        const Tensor& first = tensors_[0].first;
        rows = {.count = 1, .dims = 0, .size = {1, 1}};
        int64_t last = 1;  // size of the outermost dimension so far
        const auto add = [&](int64_t size, auto stride_of) {
            rows.count *= size;
            if (size == 1) return true;
            bool merges = rows.dims > 0;
            for (auto& [tensor, place] : tensors_) {
                merges = merges && stride_of(tensor) == place->stride[rows.dims - 1] * last;
            }
            if (merges) {
                last *= size;
            } else {
                if (rows.dims == 3) return false;
                for (auto& [tensor, place] : tensors_) {
                    place->stride[rows.dims] = stride_of(tensor);
                }
                ++rows.dims;
                last = size;
            }
            if (rows.dims < 3) rows.size[rows.dims - 1] = last;
            return true;
        };
        bool fits = add(groups, [&](const Tensor&) { return width_; });
        for (int64_t d = first.dim() - 2; d >= 0 && fits; --d) {
            fits = add(first.size(d), [&](const Tensor& x) { return x.stride(d); });
        }
        rows.dims = std::max(rows.dims, 1);
        return fits;
    }
};

}  // namespace thunderkittens::norm
