// Tensor maps of the emulated TMA: the driver's function and its rules (CUDA driver API,
// "cuTensorMapEncodeTiled"), writing a description of our own into the 128 bytes of a CUtensorMap.
#pragma once

#include "../calls.h"

namespace kittens::inline on_cpu {
namespace emulated {

struct TensorMap {
    static constexpr uint32_t MARK = 0x70a9e4a9;

    uint32_t mark;
    uint8_t type, element_bytes, swizzle_bytes, rank;
    uint64_t data;
    uint64_t dims[5];          // elements, innermost first; 1 beyond the rank
    uint64_t stride_bytes[4];  // of dimensions 1 to 4
    uint16_t box[5];           // elements
};
static_assert(sizeof(TensorMap) <= sizeof(CUtensorMap));

inline int bytes_of(CUtensorMapDataType type) {
    switch (type) {
        case CU_TENSOR_MAP_DATA_TYPE_UINT8: return 1;
        case CU_TENSOR_MAP_DATA_TYPE_UINT16:
        case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
        case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16: return 2;
        case CU_TENSOR_MAP_DATA_TYPE_UINT32:
        case CU_TENSOR_MAP_DATA_TYPE_INT32:
        case CU_TENSOR_MAP_DATA_TYPE_FLOAT32: return 4;
        default: return 0;
    }
}

CUresult encode_tensor_map(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* data,
                           const cuuint64_t* dims, const cuuint64_t* stride_bytes,
                           const cuuint32_t* box, const cuuint32_t* element_strides,
                           CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                           CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
    TensorMap m{};
    const int bytes = bytes_of(type);
    const int width = swizzle == CU_TENSOR_MAP_SWIZZLE_NONE  ? 0
                      : swizzle == CU_TENSOR_MAP_SWIZZLE_32B ? 32
                      : swizzle == CU_TENSOR_MAP_SWIZZLE_64B ? 64
                                                             : 128;
    const auto address = reinterpret_cast<uintptr_t>(data);
    bool legal = map != nullptr && bytes > 0 && (rank == 4 || rank == 5) && address != 0 &&
                 address % 16 == 0 && interleave == CU_TENSOR_MAP_INTERLEAVE_NONE &&
                 fill == CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE &&
                 (swizzle == CU_TENSOR_MAP_SWIZZLE_NONE || swizzle == CU_TENSOR_MAP_SWIZZLE_32B ||
                  swizzle == CU_TENSOR_MAP_SWIZZLE_64B || swizzle == CU_TENSOR_MAP_SWIZZLE_128B);
    for (cuuint32_t i = 0; legal && i < rank; ++i) {
        legal = dims[i] > 0 && dims[i] <= (uint64_t(1) << 32) && box[i] > 0 && box[i] <= 256 &&
                element_strides[i] == 1;
        if (i + 1 < rank)
            legal = legal && stride_bytes[i] % 16 == 0 && stride_bytes[i] < uint64_t(1) << 40;
    }
    legal = legal && (box[0] * static_cast<unsigned>(bytes)) % 16 == 0 &&
            (width == 0 || box[0] * static_cast<unsigned>(bytes) <= static_cast<unsigned>(width));
    if (!legal) return CUDA_ERROR_INVALID_VALUE;
    m.mark = TensorMap::MARK;
    m.type = static_cast<uint8_t>(type);
    m.element_bytes = static_cast<uint8_t>(bytes);
    m.swizzle_bytes = static_cast<uint8_t>(width);
    m.rank = static_cast<uint8_t>(rank);
    m.data = address;
    for (cuuint32_t i = 0; i < 5; ++i) {
        m.dims[i] = i < rank ? dims[i] : 1;
        m.box[i] = i < rank ? static_cast<uint16_t>(box[i]) : uint16_t(1);
        if (i > 0 && i < rank) m.stride_bytes[i - 1] = stride_bytes[i - 1];
    }
    std::memset(map, 0, sizeof(*map));
    std::memcpy(map, &m, sizeof(m));
    return CUDA_SUCCESS;
}

// The same permutation of address bits as the hardware's: 16-byte chunks, XOR with the row of 128
// bytes.
constexpr uint32_t swizzled(uint32_t address, int swizzle_bytes) {
    const uint32_t mask = swizzle_bytes == 128  ? 0x70u
                          : swizzle_bytes == 64 ? 0x30u
                          : swizzle_bytes == 32 ? 0x10u
                                                : 0u;
    return address ^ ((address >> 3) & mask);
}

}  // namespace emulated
}  // namespace kittens::inline on_cpu
