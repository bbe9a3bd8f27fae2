// The element types of the ops, as plain C++: what a family's Problem and Config are written in, so
// that they need neither torch nor CUDA. tensor.h maps torch's scalar types to these.
#pragma once

#include <optional>
#include <string_view>

namespace thunderkittens {

enum class DType { bf16, fp16, fp32, int32, e4m3, e5m2 };

constexpr bool is_fp8(DType dtype) { return dtype == DType::e4m3 || dtype == DType::e5m2; }

constexpr int size_in_bytes(DType dtype) {
    return is_fp8(dtype) ? 1 : dtype == DType::fp32 || dtype == DType::int32 ? 4 : 2;
}

constexpr const char* name_of(DType dtype) {
    switch (dtype) {
        case DType::bf16: return "bf16";
        case DType::fp16: return "fp16";
        case DType::fp32: return "fp32";
        case DType::int32: return "int32";
        case DType::e4m3: return "e4m3";
        case DType::e5m2: return "e5m2";
    }
    return "?";
}

constexpr std::optional<DType> dtype_from_name(std::string_view name) {
    for (DType dtype :
         {DType::bf16, DType::fp16, DType::fp32, DType::int32, DType::e4m3, DType::e5m2}) {
        if (name == name_of(dtype)) return dtype;
    }
    return std::nullopt;
}

}  // namespace thunderkittens
