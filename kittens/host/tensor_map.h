// Encodes tensor maps of four dimensions: of tensors, and of segments of a tensor's rows.
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

// Segments of consecutive rows of a tensor (heads, rows, columns), as tma::load_async and
// store_async of a ragged layout reach them. A tensor map clips at its own bounds, and at one end
// of a window that moves: this one has the rows twice, as a dimension of rows + 1 places that end
// where the segment ends, and as one for the place of that end. Their sum counts from rows + 1 rows
// before the data. So rows beyond the segment's end are outside, with one map for segments of all
// lengths.
struct RaggedTensorMapSpec {
    const void* data;
    CUtensorMapDataType type;
    int element_bytes;
    int cols, rows, heads;
    int64_t row_stride, head_stride;  // elements
    int box_cols, box_rows;
    int swizzle_bytes;
};

inline CUtensorMap encode_ragged_tensor_map(const RaggedTensorMapSpec& s) {
    if (s.rows > 1 << 30) {
        throw std::invalid_argument("kittens: a ragged layout of " + std::to_string(s.rows) +
                                    " rows; it holds at most 2^30");
    }
    const int window = s.rows + 1;
    TensorMapSpec spec{};
    spec.data = reinterpret_cast<const void*>(
        reinterpret_cast<uintptr_t>(s.data) -
        static_cast<uintptr_t>(window * s.row_stride * s.element_bytes));
    spec.type = s.type;
    spec.element_bytes = s.element_bytes;
    const int dims[4] = {s.cols, window, window + 1, s.heads};
    const int box[4] = {s.box_cols, s.box_rows, 1, 1};
    for (int i = 0; i < 4; ++i) spec.dims[i] = uint64_t(dims[i]), spec.box[i] = uint32_t(box[i]);
    spec.strides[0] = spec.strides[1] = s.row_stride;
    spec.strides[2] = s.head_stride;
    spec.swizzle_bytes = s.swizzle_bytes;
    return encode_tensor_map(spec);
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
