// Encodes tensor maps: of tensors of four dimensions, and of segments of a tensor's rows.
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
    uint64_t dims[5];    // elements, innermost first
    int64_t strides[4];  // elements, of dimensions 1 to 4
    uint32_t box[5];     // elements, innermost first
    int swizzle_bytes;   // 0, 32, 64 or 128
    int rank = 4;
};

inline std::string describe(const TensorMapSpec& s) {
    std::string text = "data " + std::to_string(reinterpret_cast<uintptr_t>(s.data));
    const auto list = [&](const char* name, const auto* values, int count) {
        text += std::string(", ") + name + " (";
        for (int i = 0; i < count; ++i) text += std::to_string(values[i]) + " ";
        text.back() = ')';
    };
    list("dims", s.dims, s.rank);
    list("strides", s.strides, s.rank - 1);
    list("box", s.box, s.rank);
    return text + ", element bytes " + std::to_string(s.element_bytes) + ", swizzle " +
           std::to_string(s.swizzle_bytes);
}

inline CUtensorMap encode_tensor_map(const TensorMapSpec& s) {
    cuuint64_t dims[5], stride_bytes[4];
    for (int i = 0; i < s.rank; ++i) dims[i] = s.dims[i] > 0 ? s.dims[i] : 1;
    // Where rows do not begin at lines of 128 bytes, promotion reads lines of which less is wanted.
    // A product of 4096 x 4096 x 4104 takes 0.86 of the time without it.
    bool in_lines = reinterpret_cast<uintptr_t>(s.data) % 128 == 0;
    for (int i = 0; i < s.rank - 1; ++i) {
        // The stride of a dimension of size 1 is never used, but must be legal.
        const bool unused = s.dims[i + 1] <= 1;
        stride_bytes[i] = unused ? 16 : static_cast<cuuint64_t>(s.strides[i] * s.element_bytes);
        in_lines = in_lines && (unused || stride_bytes[i] % 128 == 0);
    }
    const CUtensorMapSwizzle swizzle = s.swizzle_bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                       : s.swizzle_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                       : s.swizzle_bytes == 32 ? CU_TENSOR_MAP_SWIZZLE_32B
                                                               : CU_TENSOR_MAP_SWIZZLE_NONE;
    const auto promotion =
        in_lines ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B : CU_TENSOR_MAP_L2_PROMOTION_NONE;
    const cuuint32_t element_strides[5] = {1, 1, 1, 1, 1};
    CUtensorMap map;
    const auto encode = [&] {
        return arch::encode_tiled()(&map, s.type, static_cast<cuuint32_t>(s.rank),
                                    const_cast<void*>(s.data), dims, stride_bytes, s.box,
                                    element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                                    promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    };
    CUresult result = encode();
    if (result == CUDA_ERROR_INVALID_CONTEXT || result == CUDA_ERROR_NOT_INITIALIZED) {
        // The thread's first use of CUDA. Only this path pays for it.
        arch::make_context_current();
        result = encode();
    }
    if (result != CUDA_SUCCESS) {
        throw std::runtime_error("kittens: cuTensorMapEncodeTiled refused (error " +
                                 std::to_string(static_cast<int>(result)) + ") " + describe(s));
    }
    return map;
}

// Segments of consecutive rows of a tensor (heads, rows, columns), as tma::load_async and
// store_async of a ragged layout reach them. A tensor map clips at its own bounds, not where a
// segment ends. So this one has the rows twice: as a window of W = 2^30 rows of which the segment
// takes the last ones, so that what lies beyond its end is outside of the tensor, and as a
// dimension for the place of that end, with the same stride. Their sum counts from W rows before
// the data; a third dimension takes those W rows off again, modulo 2^64, the addresses' range: W of
// its strides of 2^64 / W bytes less one row are minus W rows.
constexpr int RAGGED_WINDOW = 1 << 30;

struct RaggedTensorMapSpec {
    const void* data;
    CUtensorMapDataType type;
    int element_bytes;
    int cols, rows, heads;
    int64_t row_stride, head_stride;  // elements
    int box_cols, box_rows;
    int swizzle_bytes;
};

// Dimensions, innermost first: column, row in the window, end of the segment, wrap (always W),
// head.
inline CUtensorMap encode_ragged_tensor_map(const RaggedTensorMapSpec& s) {
    constexpr int64_t wrap_bytes = int64_t(1) << 34;  // 2^64 / W
    // The stride of a single row is never used, but must be legal.
    const int64_t row = s.rows > 1 ? s.row_stride : 16 / s.element_bytes;
    if (s.rows > RAGGED_WINDOW || row <= 0 || row * s.element_bytes >= wrap_bytes) {
        throw std::invalid_argument(
            "kittens: a ragged layout of " + std::to_string(s.rows) + " rows, row stride " +
            std::to_string(row * s.element_bytes) +
            " bytes; it has at most 2^30 rows, and a stride of more than 0 and less than 2^34");
    }
    TensorMapSpec spec{};
    spec.rank = 5;
    spec.data = s.data;
    spec.type = s.type;
    spec.element_bytes = s.element_bytes;
    const int dims[5] = {s.cols, RAGGED_WINDOW, RAGGED_WINDOW + 1, RAGGED_WINDOW + 1, s.heads};
    const int box[5] = {s.box_cols, s.box_rows, 1, 1, 1};
    for (int i = 0; i < 5; ++i) spec.dims[i] = uint64_t(dims[i]), spec.box[i] = uint32_t(box[i]);
    spec.strides[0] = spec.strides[1] = row;
    spec.strides[2] = wrap_bytes / s.element_bytes - row;
    spec.strides[3] = s.head_stride;
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
