// Whether memory that an op writes to in place is surely that of nothing else: what addresses alone
// tell. Where they do not, Python finds out (ops/_memory.py). Host C++ without torch.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <type_traits>
#include <utility>

#include "csrc/common/check.h"

namespace thunderkittens {

// Whether each element surely has memory of its own: in the order of the strides, dimensions begin
// behind those before them. Of more than four, nothing is said.
template <class Tensor>
bool surely_apart(const Tensor& x) {
    std::array<std::pair<int64_t, int64_t>, 4> dims{};  // stride and size
    if (x.dim() > 4) return false;
    for (int64_t i = 0; i < x.dim(); ++i) {
        if (x.size(i) == 0) return true;
        if (x.size(i) > 1) dims[static_cast<std::size_t>(i)] = {x.stride(i), x.size(i)};
    }
    std::sort(dims.begin(), dims.end());
    int64_t extent = 1;
    for (const auto& [stride, size] : dims) {
        if (size <= 1) continue;
        if (stride < extent) return false;
        extent += (size - 1) * stride;
    }
    return true;
}

// The address of a tensor's first byte, and that behind its last; of one without elements, none.
template <class Tensor>
std::pair<uintptr_t, uintptr_t> span_of(const Tensor& x) {
    int64_t last = 0;
    for (int64_t i = 0; i < x.dim(); ++i) {
        if (x.size(i) == 0) return {0, 0};
        last += (x.size(i) - 1) * x.stride(i);
    }
    const auto begin = reinterpret_cast<uintptr_t>(x.data_ptr());
    return {begin, begin + static_cast<uintptr_t>((last + 1) * int64_t(x.element_size()))};
}

// A tensor, or none.
template <class Tensor>
struct IfGiven {
    const Tensor* tensor;
    IfGiven(const Tensor& x) : tensor(&x) {}
    IfGiven(const std::optional<Tensor>& x) : tensor(x ? &*x : nullptr) {}
};

// Throws unless `written` surely shares no memory with itself, nor with one of `others`. Python
// knows the error by its words.
template <class Tensor>
void require_surely_apart(const char* op, const Tensor& written,
                          std::initializer_list<IfGiven<std::type_identity_t<Tensor>>> others) {
    const auto [begin, end] = span_of(written);
    bool apart = surely_apart(written);
    for (const auto& other : others) {
        if (other.tensor == nullptr) continue;
        const auto [first, last] = span_of(*other.tensor);
        apart = apart && (last <= begin || end <= first);
    }
    TK_CHECK(apart, op, ": the state may share memory with itself or with an operand");
}

}  // namespace thunderkittens
