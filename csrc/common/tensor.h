// Torch for the op files: the one shared header with torch's (stable) headers. It makes torch's
// tensors a back end of the ops' bodies (backend.h): names of dtypes, allocation, the caller's
// device and stream. It uses only what LibTorch's stable ABI 2.11 has. A kernel never includes it.
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
#include <utility>

#include "csrc/common/backend.h"
#include "csrc/common/check.h"
#include "csrc/common/device.h"
#include "csrc/common/dtype.h"
#include "csrc/common/forced.h"
#include "csrc/common/launch_log.h"
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
    if (const std::optional<DType> dtype = dtype_of(type)) return torch_name(*dtype);
    if (type == ScalarType::Double) return "torch.float64";
    return concat("torch.", torch::headeronly::toString(type));
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

// The same bytes as elements of another type of the same size.
inline Tensor view_as(ScalarType dtype, const Tensor& tensor) {
    std::array<StableIValue, 2> stack{torch::stable::detail::from(tensor),
                                      torch::stable::detail::from(dtype)};
    TORCH_ERROR_CODE_CHECK(
        torch_call_dispatcher("aten::view", "dtype", stack.data(), TORCH_ABI_VERSION));
    return torch::stable::detail::to<Tensor>(stack[0]);
}

// ---- stream ----

inline Stream current_stream(const Tensor& tensor) {
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
    return static_cast<Stream>(stream);
}

// ---- the back end ----

template <>
struct Backend<Tensor> {
    using ScalarType = thunderkittens::ScalarType;
    static constexpr ScalarType BYTE = ScalarType::Byte;
    static constexpr ScalarType E8M0 = ScalarType::Float8_e8m0fnu;
    static constexpr ScalarType E2M1X2 = ScalarType::Float4_e2m1fn_x2;

    static ScalarType scalar_type(DType dtype) { return scalar_type_of(dtype); }
    static std::optional<DType> dtype_of(ScalarType type) { return thunderkittens::dtype_of(type); }
    static std::string dtype_text(ScalarType type) { return thunderkittens::dtype_text(type); }

    static Tensor empty_strided(std::span<const int64_t> sizes, std::span<const int64_t> strides,
                                ScalarType type, const Tensor& like) {
        return thunderkittens::empty_strided(sizes, strides, type, like);
    }
    static Tensor empty_strided(std::span<const int64_t> sizes, std::span<const int64_t> strides,
                                DType dtype, const Tensor& like) {
        return thunderkittens::empty_strided(sizes, strides, scalar_type_of(dtype), like);
    }
    static Tensor view_as(ScalarType type, const Tensor& x) {
        return thunderkittens::view_as(type, x);
    }
    static bool is_int64(const Tensor& x, int64_t count = 1) {
        return x.scalar_type() == ScalarType::Long && x.numel() == count;
    }
    static bool is_int8(const Tensor& x) { return x.scalar_type() == ScalarType::Char; }
    static void negate(Tensor& x) {
        std::array<StableIValue, 1> stack{torch::stable::detail::from(x)};
        TORCH_ERROR_CODE_CHECK(
            torch_call_dispatcher("aten::neg_", "", stack.data(), TORCH_ABI_VERSION));
        x = torch::stable::detail::to<Tensor>(stack[0]);
    }
    // As a sum over two rows: the stable ABI has no addition of integers.
    static void add(Tensor& x, int64_t number) {
        Tensor terms = empty({2, x.size(0)}, ScalarType::Int, x);
        Tensor before = torch::stable::select(terms, 0, 0);
        Tensor added = torch::stable::select(terms, 0, 1);
        torch::stable::copy_(before, x);
        torch::stable::fill_(added, static_cast<double>(number));
        const std::array<int64_t, 1> rows{0};
        const torch::headeronly::IntHeaderOnlyArrayRef dims(rows.data(), rows.size());
        Tensor sums = empty({x.size(0)}, ScalarType::Int, x);
        torch::stable::sum_out(sums, terms, dims, false, ScalarType::Int);
        torch::stable::copy_(x, sums);
    }

    static DeviceGuard guard(const Tensor& x) { return DeviceGuard(x.get_device_index()); }
    static const DeviceProperties& device(const Tensor& x) {
        return device_properties(x.get_device_index());
    }
    static int sms_of_pass(const Tensor& x) { return device(x).sm_count; }
    static uint64_t drawn(uint64_t number) { return number; }
    static Stream stream(const Tensor& x) { return current_stream(x); }
    static Stream stream(Stream stream) { return stream; }
    template <class Choice>
    static Choice chosen(const char* op, Choice choice) {
        force(op, choice);
        return choice;
    }
    struct Launch {
        Stream stream;

        template <class T>
        void may_read(const char*, const T&) const {}
        template <class T>
        void may_read_early(const char*, const T&) const {}
        template <class T>
        void may_write(const char*, const T&) const {}
    };
    template <class Choice, class On>
    static Launch launch(const char* op, const Choice& choice, const On& on) {
        note_choice(op, choice);
        return {stream(on)};
    }
    template <class Choice, class On>
    static Launch launch_part(const char*, const Choice&, const On& on) {
        return {stream(on)};
    }
    template <class On>
    static Launch launch(const char* kernel, const On& on) {
        note_kernel(kernel);
        return {stream(on)};
    }
};
// It has no state: the devices of a call are those of its tensors.
inline const Backend<Tensor> gpu{};

// The body of an op for the dispatcher, which knows of no back end: OnGpu<&op_body<Tensor>>::call.
template <auto body>
struct OnGpu;
template <class Result, class... Arguments, Result (*body)(const Backend<Tensor>&, Arguments...)>
struct OnGpu<body> {
    static Result call(Arguments... arguments) {
        return body(gpu, std::forward<Arguments>(arguments)...);
    }
};

}  // namespace thunderkittens
