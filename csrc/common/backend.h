// What the body of an op is written with: a template over the type of its tensors, so that there is
// one for torch's tensors on a GPU and for the emulator's arrays. Here is what such bodies share:
// checks with messages that name op, argument, expected and actual; plain 4-D views, which a
// family's parameter structs and tensor maps are made from; allocation; copies of what a kernel
// cannot read. Host C++ without torch.
//
// A type of tensors has torch's member functions (dim, size, stride, sizes, strides, numel,
// data_ptr, element_size, is_contiguous, is_cuda, get_device_index, scalar_type), torch's functions
// zero_, fill_, copy_ and transpose in its namespace, and a Backend, in tensor.h and emulated.h.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "csrc/common/check.h"
#include "csrc/common/device.h"
#include "csrc/common/dtype.h"
#include "csrc/common/view.h"

namespace thunderkittens {

// "torch.bfloat16", as Python prints PyTorch's dtypes.
inline std::string torch_name(DType dtype) {
    switch (dtype) {
        case DType::bf16: return "torch.bfloat16";
        case DType::fp16: return "torch.float16";
        case DType::fp32: return "torch.float32";
        case DType::int32: return "torch.int32";
        case DType::e4m3: return "torch.float8_e4m3fn";
        case DType::e5m2: return "torch.float8_e5m2";
    }
    return "?";
}

// Of a type of tensors, what a body cannot ask of the tensors themselves:
//   ScalarType, scalar_type(dtype), dtype_of(type), dtype_text(type)   types of elements, and their
//                               names; BYTE, E8M0 and E2M1X2 are those that are no DType
//   empty_strided(sizes, strides, type, like)     an uninitialised tensor on the device of `like`
//   view_as(type, x)            the same bytes as elements of another type of the same size
//   is_int64(x, count)          whether it is so many integers of 64 bits, which the emulator takes
//                               as pairs of 32; one by default
//   is_int8(x)                  whether its elements are integers of 8 bits; of the emulator's
//                               arrays a flag of the call says so
//   negate(x), add(x, number)   in place; add() of int32
// and, of an object that stands for one call,
//   guard(x)                    makes the device of x the current one, in a scope
//   device(x)                   its properties
//   sms_of_pass(x)              how many SMs the grid of a pass over all of x is for: on the
//                               emulator, which runs blocks one after the other, one
//   drawn(number)               a number that is new in each call; a replay of the call, which a
//                               CUDA graph is, has the same again
//   chosen(op, choice)          the choice, with the fields that are forced: by the caller of the
//                               emulator, on a GPU by what measures the choice (forced.h)
//   launch(op, choice, x)       begins the launch of the kernel chosen, on x's device's stream;
//                               its may_read() and may_write() name the memory that kernels may
//                               access, which the emulator checks and a GPU does not ask for.
//                               may_read_early(): before the end of the kernel before it, too
//   launch(kernel, x)           likewise where there is nothing to choose
//   launch_part(op, choice, x)  likewise of what runs beside the kernel that was chosen
// x may be a stream already.
template <class Tensor>
struct Backend;

// ---- checks ----

template <class Tensor>
std::string shape_text(const Tensor& tensor) {
    return tuple_text(tensor.sizes());
}

template <class Tensor>
std::string dtype_text_of(const Tensor& tensor) {
    return Backend<Tensor>::dtype_text(tensor.scalar_type());
}

template <class Tensor>
void check_cuda(const char* op, const char* argument, const Tensor& tensor) {
    TK_CHECK(tensor.is_cuda(), op, ": ", argument, " must be a CUDA tensor");
}

template <class Tensor>
void check_same_device(const char* op, const char* argument, const Tensor& tensor,
                       const char* first_argument, const Tensor& first) {
    check_cuda(op, argument, tensor);
    TK_CHECK(tensor.get_device_index() == first.get_device_index(), op, ": ", argument,
             " is on cuda:", tensor.get_device_index(), ", ", first_argument,
             " on cuda:", first.get_device_index());
}

template <class Tensor>
void check_dims(const char* op, const char* argument, const Tensor& tensor,
                std::initializer_list<int64_t> allowed) {
    std::string expected;
    for (const int64_t dims : allowed) {
        if (tensor.dim() == dims) return;
        expected += concat(expected.empty() ? "" : " or ", dims);
    }
    throw std::runtime_error(concat(op, ": ", argument, " must have ", expected,
                                    " dimensions, got shape ", shape_text(tensor)));
}

// The tensor's dtype, which must be one of `allowed`.
template <class Tensor>
DType check_dtype(const char* op, const char* argument, const Tensor& tensor,
                  std::initializer_list<DType> allowed) {
    const auto dtype = Backend<Tensor>::dtype_of(tensor.scalar_type());
    std::string expected;
    for (const DType choice : allowed) {
        if (dtype == choice) return choice;
        expected += (expected.empty() ? "" : " or ") + torch_name(choice);
    }
    throw std::runtime_error(
        concat(op, ": ", argument, " must be ", expected, ", got ", dtype_text_of(tensor)));
}

template <class Tensor>
void check_same_dtype(const char* op, const char* argument, const Tensor& tensor,
                      const char* first_argument, const Tensor& first) {
    TK_CHECK(tensor.scalar_type() == first.scalar_type(), op, ": ", argument, " is ",
             dtype_text_of(tensor), ", ", first_argument, " is ", dtype_text_of(first));
}

// Empty, or the reason why no kernel runs a problem there.
inline void check_supported(const char* op, const std::string& reason) {
    TK_CHECK(reason.empty(), op, ": ", reason);
}

// ---- views ----

template <class Tensor>
View as_4d(const Tensor& tensor) {
    const auto& sizes = tensor.sizes();
    const auto& strides = tensor.strides();
    TK_CHECK(tensor.dim() <= 4, "thunderkittens: at most 4 dimensions, got shape ",
             tuple_text(sizes));
    const auto dims = static_cast<std::size_t>(tensor.dim());
    return make_view(tensor.data_ptr(), std::span(sizes.data(), dims),
                     std::span(strides.data(), dims));
}

// The tensor's memory as elements of a type.
template <class T, class Tensor>
T* data_as(const Tensor& tensor) {
    return static_cast<T*>(tensor.data_ptr());
}
template <class T, class Tensor>
T* data_as(const std::optional<Tensor>& tensor) {
    return tensor ? data_as<T>(*tensor) : nullptr;
}

// ---- allocation ----

// An uninitialised contiguous tensor on the device of `like`; cheaper for the host than
// torch::stable::empty. `type` is a DType, or one of the tensors' own types.
template <class Tensor, class Type>
Tensor empty(std::span<const int64_t> sizes, Type type, const Tensor& like) {
    std::array<int64_t, 8> strides{};
    TK_CHECK(sizes.size() <= strides.size(), "thunderkittens: too many dimensions: ", sizes.size());
    int64_t packed = 1;
    for (std::size_t i = sizes.size(); i-- > 0;) {
        strides[i] = packed;
        packed *= std::max<int64_t>(sizes[i], 1);
    }
    return Backend<Tensor>::empty_strided(sizes, std::span(strides).first(sizes.size()), type,
                                          like);
}

template <class Tensor, class Type>
Tensor empty(std::initializer_list<int64_t> sizes, Type type, const Tensor& like) {
    return empty(std::span(sizes.begin(), sizes.size()), type, like);
}

// Matrices beside others: `sizes` without the first, the size of a batch, where there is none.
template <class Tensor, class Type>
Tensor empty_batch(bool batched, std::initializer_list<int64_t> sizes, Type type,
                   const Tensor& like) {
    return empty(std::span(sizes.begin(), sizes.size()).subspan(batched ? 0 : 1), type, like);
}

// An uninitialised tensor of the shape, dtype and strides of `x`, in the order of its strides where
// these leave gaps or overlap: torch.empty_like.
template <class Tensor>
Tensor empty_as(const Tensor& x) {
    std::array<int64_t, 8> strides{};
    const auto dims = static_cast<std::size_t>(x.dim());
    TK_CHECK(dims <= strides.size(), "thunderkittens: too many dimensions: ", dims);
    const auto sizes = std::span(x.sizes().data(), dims);
    const auto dense = std::span(strides).first(dims);
    find_dense_strides(sizes, std::span(x.strides().data(), dims), dense);
    return Backend<Tensor>::empty_strided(sizes, dense, x.scalar_type(), x);
}

// The tensor itself, filled with zeros.
template <class Tensor>
Tensor zeroed(Tensor x) {
    zero_(x);
    return x;
}

// The tensor itself where it is contiguous, else a copy. (torch::stable::contiguous and its like
// allocate within the stable ABI: an exception does not come out of there.)
template <class Tensor>
Tensor packed(const Tensor& x) {
    if (x.is_contiguous()) return x;
    Tensor copy = empty(std::span(x.sizes().data(), x.sizes().size()), x.scalar_type(), x);
    copy_(copy, x);
    return copy;
}
template <class Tensor>
std::optional<Tensor> packed(const std::optional<Tensor>& x) {
    return x ? std::optional(packed(*x)) : std::nullopt;
}

// A copy that a tensor map can describe: row major, each row padded to a multiple of 16 bytes. The
// padding is not initialised and is outside the returned tensor's shape.
template <class Tensor>
Tensor copy_for_tensor_map(const Tensor& tensor) {
    const int64_t dims = tensor.dim();
    TK_CHECK(dims >= 1 && dims <= 4, "thunderkittens: 1 to 4 dimensions, got ", dims);
    std::array<int64_t, 4> sizes{}, strides{};
    for (int64_t i = 0; i < dims; ++i) sizes[i] = tensor.size(i);
    const int64_t per_16_bytes = 16 / static_cast<int64_t>(tensor.element_size());
    int64_t pitch = 1;
    for (int64_t i = dims - 1; i >= 0; --i) {
        strides[i] = pitch;
        pitch *= std::max<int64_t>(sizes[i], 1);
        if (i == dims - 1) pitch = (pitch + per_16_bytes - 1) / per_16_bytes * per_16_bytes;
    }
    const auto count = static_cast<std::size_t>(dims);
    Tensor copy = Backend<Tensor>::empty_strided(std::span(sizes).first(count),
                                                 std::span(strides).first(count),
                                                 tensor.scalar_type(), tensor);
    copy_(copy, tensor);
    return copy;
}

// The tensor itself where a tensor map can describe it, else a copy. With `either_order`, a matrix
// whose columns are adjacent instead of its rows counts too (its view is then to be transposed()).
template <class Tensor>
Tensor for_tensor_map(const Tensor& tensor, bool either_order = false) {
    const int bytes = static_cast<int>(tensor.element_size());
    const View view = as_4d(tensor);
    if (fits_tensor_map(view, bytes)) return tensor;
    if (either_order && fits_tensor_map(transposed(view), bytes)) return tensor;
    return copy_for_tensor_map(tensor);
}

// The tensor itself where it is contiguous and begins at a multiple of 16 bytes, which kernels read
// at a time and bulk copies begin at, else a copy.
template <class Tensor>
Tensor aligned_and_contiguous(const Tensor& tensor) {
    const bool aligned = reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 == 0;
    if (aligned || !tensor.is_contiguous()) return packed(tensor);
    Tensor copy = empty_as(tensor);
    copy_(copy, tensor);
    return copy;
}

}  // namespace thunderkittens
