// Torch for the op files: the one shared header with torch's (stable) headers. It checks tensors
// with messages that name op, argument, expected and actual; turns them into plain 4-D views that a
// family's parameter structs and tensor maps are made from; allocates outputs; finds the caller's
// stream. It uses only what LibTorch's stable ABI 2.11 has. A kernel never includes it.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <array>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>

#include "csrc/common/check.h"
#include "csrc/common/device.h"
#include "csrc/common/dtype.h"
#include "csrc/common/throwing.h"
#include "csrc/common/view.h"

namespace thunderkittens {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using torch::stable::accelerator::DeviceGuard;

// ---- dtypes ----

inline std::optional<DType> dtype_of(ScalarType type) {
    switch (type) {
        case ScalarType::BFloat16: return DType::bf16;
        case ScalarType::Half: return DType::fp16;
        case ScalarType::Float: return DType::fp32;
        case ScalarType::Int: return DType::int32;
        case ScalarType::Float8_e4m3fn: return DType::e4m3;
        case ScalarType::Float8_e5m2: return DType::e5m2;
        default: return std::nullopt;
    }
}

inline ScalarType scalar_type_of(DType dtype) {
    switch (dtype) {
        case DType::bf16: return ScalarType::BFloat16;
        case DType::fp16: return ScalarType::Half;
        case DType::fp32: return ScalarType::Float;
        case DType::int32: return ScalarType::Int;
        case DType::e4m3: return ScalarType::Float8_e4m3fn;
        case DType::e5m2: return ScalarType::Float8_e5m2;
    }
    throw std::runtime_error("thunderkittens: unknown dtype");
}

// "torch.bfloat16", as Python prints it.
inline std::string dtype_text(ScalarType type) {
    switch (type) {
        case ScalarType::BFloat16: return "torch.bfloat16";
        case ScalarType::Half: return "torch.float16";
        case ScalarType::Float: return "torch.float32";
        case ScalarType::Double: return "torch.float64";
        case ScalarType::Int: return "torch.int32";
        case ScalarType::Float8_e4m3fn: return "torch.float8_e4m3fn";
        case ScalarType::Float8_e5m2: return "torch.float8_e5m2";
        default: return concat("torch.", torch::headeronly::toString(type));
    }
}

// ---- checks ----

inline std::string shape_text(const Tensor& tensor) { return tuple_text(tensor.sizes()); }

inline void check_cuda(const char* op, const char* argument, const Tensor& tensor) {
    TK_CHECK(tensor.is_cuda(), op, ": ", argument, " must be a CUDA tensor");
}

inline void check_same_device(const char* op, const char* argument, const Tensor& tensor,
                              const char* first_argument, const Tensor& first) {
    check_cuda(op, argument, tensor);
    TK_CHECK(tensor.get_device_index() == first.get_device_index(), op, ": ", argument,
             " is on cuda:", tensor.get_device_index(), ", ", first_argument,
             " on cuda:", first.get_device_index());
}

inline void check_dims(const char* op, const char* argument, const Tensor& tensor,
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
inline DType check_dtype(const char* op, const char* argument, const Tensor& tensor,
                         std::initializer_list<DType> allowed) {
    const auto dtype = dtype_of(tensor.scalar_type());
    std::string expected;
    for (const DType choice : allowed) {
        if (dtype == choice) return choice;
        expected += (expected.empty() ? "" : " or ") + dtype_text(scalar_type_of(choice));
    }
    throw std::runtime_error(concat(op, ": ", argument, " must be ", expected, ", got ",
                                    dtype_text(tensor.scalar_type())));
}

inline void check_same_dtype(const char* op, const char* argument, const Tensor& tensor,
                             const char* first_argument, const Tensor& first) {
    TK_CHECK(tensor.scalar_type() == first.scalar_type(), op, ": ", argument, " is ",
             dtype_text(tensor.scalar_type()), ", ", first_argument, " is ",
             dtype_text(first.scalar_type()));
}

// ---- views ----

inline View as_4d(const Tensor& tensor) {
    const auto sizes = tensor.sizes();
    const auto strides = tensor.strides();
    TK_CHECK(tensor.dim() <= 4, "thunderkittens: at most 4 dimensions, got shape ",
             tuple_text(sizes));
    const auto dims = static_cast<std::size_t>(tensor.dim());
    return make_view(tensor.data_ptr(), std::span(sizes.data(), dims),
                     std::span(strides.data(), dims));
}

// ---- allocation ----

// From torch 2.13 on, functions of the stable ABI print nothing when they fail (pytorch#180135).
inline bool fails_quietly() {
    static const bool quiet = aoti_torch_abi_version() >= ((2ULL << 56) | (13ULL << 48));
    return quiet;
}

// An uninitialised tensor. Where memory is exhausted, PyTorch's own exception comes from `function`
// (throwing.h), if there is one. It is called first where the stable one does not fail `quietly`,
// which are versions of torch whose function is known; in later ones only after that has failed,
// when it uses what has been freed meanwhile.
inline Tensor allocate(std::span<const int64_t> sizes, std::span<const int64_t> strides,
                       ScalarType dtype, const Tensor& like, throwing::EmptyStrided function,
                       bool quietly) {
    int32_t device_type = 0;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
    const auto type = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
    const int32_t index = like.get_device_index();
    if (function == nullptr || quietly) {
        AtenTensorHandle handle = nullptr;
        if (aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(),
                                     strides.data(), type, device_type, index, &handle) == 0) {
            return Tensor(handle);
        }
        TK_CHECK(function != nullptr, "thunderkittens: cannot allocate a tensor of shape ",
                 tuple_text(sizes), ", ", dtype_text(dtype));
    }
    const throwing::Device device{static_cast<int8_t>(device_type), static_cast<int8_t>(index)};
    auto* tensor = new throwing::Returned(
        function({sizes.data(), sizes.size()}, {strides.data(), strides.size()},
                 throwing::ScalarType(type), std::nullopt, device, std::nullopt));
    return Tensor(reinterpret_cast<AtenTensorHandle>(tensor));
}

inline Tensor empty_strided(std::span<const int64_t> sizes, std::span<const int64_t> strides,
                            ScalarType dtype, const Tensor& like) {
    return allocate(sizes, strides, dtype, like, throwing::find_empty_strided(), fails_quietly());
}

// An uninitialised contiguous tensor on the device of `like`; cheaper for the host than
// torch::stable::empty.
inline Tensor empty(std::span<const int64_t> sizes, ScalarType dtype, const Tensor& like) {
    std::array<int64_t, 8> strides{};
    TK_CHECK(sizes.size() <= strides.size(), "thunderkittens: too many dimensions: ", sizes.size());
    int64_t packed = 1;
    for (std::size_t i = sizes.size(); i-- > 0;) {
        strides[i] = packed;
        packed *= std::max<int64_t>(sizes[i], 1);
    }
    return empty_strided(sizes, std::span(strides).first(sizes.size()), dtype, like);
}

inline Tensor empty(std::initializer_list<int64_t> sizes, ScalarType dtype, const Tensor& like) {
    return empty(std::span(sizes.begin(), sizes.size()), dtype, like);
}

// An uninitialised tensor of the shape, dtype and strides of `x`, in the order of its strides where
// these leave gaps or overlap: torch.empty_like.
inline Tensor empty_as(const Tensor& x) {
    std::array<int64_t, 8> strides{};
    const auto dims = static_cast<std::size_t>(x.dim());
    TK_CHECK(dims <= strides.size(), "thunderkittens: too many dimensions: ", dims);
    const auto sizes = std::span(x.sizes().data(), dims);
    const auto dense = std::span(strides).first(dims);
    find_dense_strides(sizes, std::span(x.strides().data(), dims), dense);
    return empty_strided(sizes, dense, x.scalar_type(), x);
}

// The tensor itself where it is contiguous, else a copy. (torch::stable::contiguous and its like
// allocate within the stable ABI: an exception does not come out of there.)
inline Tensor packed(const Tensor& x) {
    if (x.is_contiguous()) return x;
    Tensor copy = empty(std::span(x.sizes().data(), x.sizes().size()), x.scalar_type(), x);
    torch::stable::copy_(copy, x);
    return copy;
}

// The same bytes as elements of another type of the same size.
inline Tensor view_as(ScalarType dtype, const Tensor& tensor) {
    std::array<StableIValue, 2> stack{torch::stable::detail::from(tensor),
                                      torch::stable::detail::from(dtype)};
    TORCH_ERROR_CODE_CHECK(
        torch_call_dispatcher("aten::view", "dtype", stack.data(), TORCH_ABI_VERSION));
    return torch::stable::detail::to<Tensor>(stack[0]);
}

// A copy that a tensor map can describe: row major, each row padded to a multiple of 16 bytes. The
// padding is not initialised and is outside the returned tensor's shape.
inline Tensor copy_for_tensor_map(const Tensor& tensor) {
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
    Tensor copy = empty_strided(std::span(sizes).first(count), std::span(strides).first(count),
                                tensor.scalar_type(), tensor);
    torch::stable::copy_(copy, tensor);
    return copy;
}

// The tensor itself where a tensor map can describe it, else a copy. With `either_order`, a matrix
// whose columns are adjacent instead of its rows counts too (its view is then to be transposed()).
inline Tensor for_tensor_map(const Tensor& tensor, bool either_order = false) {
    const int bytes = static_cast<int>(tensor.element_size());
    const View view = as_4d(tensor);
    if (fits_tensor_map(view, bytes)) return tensor;
    if (either_order && fits_tensor_map(transposed(view), bytes)) return tensor;
    return copy_for_tensor_map(tensor);
}

// The tensor itself where it is contiguous and begins at a multiple of 16 bytes, which kernels read
// at a time and bulk copies begin at, else a copy.
inline Tensor aligned_and_contiguous(const Tensor& tensor) {
    const bool aligned = reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 == 0;
    if (aligned || !tensor.is_contiguous()) return packed(tensor);
    Tensor copy = empty_as(tensor);
    torch::stable::copy_(copy, tensor);
    return copy;
}

// ---- stream ----

inline Stream current_stream(const Tensor& tensor) {
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
    return static_cast<Stream>(stream);
}

}  // namespace thunderkittens
