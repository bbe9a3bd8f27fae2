// Encodes tensor maps of four dimensions.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "../arch/arch.cuh"

namespace kittens::inline KITTENS_BACKEND {
namespace host {

struct TensorMapSpec {
    const void* data;
    CUtensorMapDataType type;
    int element_bytes;
    uint64_t dims[4];    // elements, innermost first
    int64_t strides[3];  // elements, of dimensions 1 to 3
    uint32_t box[4];     // elements, innermost first
    int swizzle_bytes;   // 0, 32, 64 or 128
};

inline std::string describe(const TensorMapSpec& s) {
    std::string text = "data " + std::to_string(reinterpret_cast<uintptr_t>(s.data));
    const auto list = [&](const char* name, const auto& values) {
        text += std::string(", ") + name + " (";
        for (auto v : values) text += std::to_string(v) + " ";
        text.back() = ')';
    };
    list("dims", s.dims);
    list("strides", s.strides);
    list("box", s.box);
    return text + ", element bytes " + std::to_string(s.element_bytes) + ", swizzle " +
           std::to_string(s.swizzle_bytes);
}

inline CUtensorMap encode_tensor_map(const TensorMapSpec& s) {
    cuuint64_t dims[4], stride_bytes[3];
    for (int i = 0; i < 4; ++i) dims[i] = s.dims[i] > 0 ? s.dims[i] : 1;
    for (int i = 0; i < 3; ++i) {
        // The stride of a dimension of size 1 is never used, but must be legal.
        const bool unused = s.dims[i + 1] <= 1;
        stride_bytes[i] = unused ? 16 : static_cast<cuuint64_t>(s.strides[i] * s.element_bytes);
    }
    const CUtensorMapSwizzle swizzle = s.swizzle_bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                       : s.swizzle_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                       : s.swizzle_bytes == 32 ? CU_TENSOR_MAP_SWIZZLE_32B
                                                               : CU_TENSOR_MAP_SWIZZLE_NONE;
    const cuuint32_t element_strides[4] = {1, 1, 1, 1};
    CUtensorMap map;
    const CUresult result =
        arch::encode_tiled()(&map, s.type, 4, const_cast<void*>(s.data), dims, stride_bytes, s.box,
                             element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS) {
        throw std::runtime_error("kittens: cuTensorMapEncodeTiled refused (error " +
                                 std::to_string(static_cast<int>(result)) + ") " + describe(s));
    }
    return map;
}

// True when TMA can address this: base and strides multiples of 16 bytes.
inline bool tma_addressable(const void* data, const int64_t (&strides)[3], const int64_t (&dims)[3],
                            int element_bytes) {
    if (reinterpret_cast<uintptr_t>(data) % 16 != 0) return false;
    for (int i = 0; i < 3; ++i) {
        if (dims[i] > 1 && (strides[i] < 0 || (strides[i] * element_bytes) % 16 != 0)) return false;
    }
    return true;
}

}  // namespace host
}  // namespace kittens::inline KITTENS_BACKEND
