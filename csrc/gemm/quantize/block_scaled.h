// Quantising to the block-scaled formats MXFP8 and NVFP4, and back: what a call is (Problem), what
// a kernel is compiled for (Config), its arguments (Params), and the functions that choose. Host
// C++ only; the ops, the kernels in mxfp8_quantize_sm90.cuh and nvfp4_quantize_sm90.cuh, and the
// registry in choose_block_scaled.cpp meet here.
//
// MXFP8: 32 neighbours share a scale 2^(byte - 127). NVFP4: 16 neighbours share an e4m3 scale, a
// matrix one in fp32. A kernel's tile is 128 x 128 elements. Scales lie in the 128x4 layout: atoms
// of 128 rows by 4 scales, 512 bytes each, atom after atom along a row of them; or plain.
#pragma once

#include <cstdint>
#include <string>

#include "csrc/common/device.h"
#include "csrc/common/dtype.h"
#include "csrc/common/fields.h"

namespace thunderkittens::block_scaled {

constexpr int TILE = 128;
constexpr int THREADS = 256;

// x, or what a dequantiser makes, is (batch, rows, columns) of `dtype`; the blocks lie along its
// columns.
struct Mxfp8Problem {
    int64_t rows = 0, columns = 0, batch = 1;
    DType dtype = DType::bf16;
    DType data_dtype = DType::e4m3;
    bool transpose = false;  // the blocks along the rows, too
    bool row_major = true;   // of x in memory: its columns are adjacent
};
struct Nvfp4Problem {
    int64_t rows = 0, columns = 0, batch = 1;
    DType dtype = DType::bf16;
    bool square = false;      // blocks of 16 x 16
    bool stochastic = false;  // rounding
    bool unaligned = false;   // base or strides of x, which TMA cannot read
};

struct Mxfp8Quantize {
    DType dtype = DType::bf16;
    DType data_dtype = DType::e4m3;
    bool down = false;  // blocks along the rows of the matrix in memory, too or alone
    bool portable = false;

    bool operator==(const Mxfp8Quantize&) const = default;
};
struct Mxfp8Dequantize {
    DType dtype = DType::bf16;
    DType data_dtype = DType::e4m3;
    bool portable = false;

    bool operator==(const Mxfp8Dequantize&) const = default;
};
struct Nvfp4Quantize {
    DType dtype = DType::bf16;
    bool square = false;
    bool stochastic = false;
    bool unaligned = false;
    bool portable = false;

    bool operator==(const Nvfp4Quantize&) const = default;
};
// 16-bit elements come by TMA, in a ring of tiles of each of the blocks that stay on an SM.
constexpr bool in_ring(const Nvfp4Quantize& c) {
    return c.dtype != DType::fp32 && !c.unaligned && !c.portable;
}
constexpr int NVFP4_STAGES = 2, NVFP4_BLOCKS_PER_SM = 2;
constexpr int NVFP4_RING_BYTES = NVFP4_STAGES * TILE * TILE * 2 + 128;
struct Nvfp4Dequantize {
    DType dtype = DType::bf16;
    bool portable = false;

    bool operator==(const Nvfp4Dequantize&) const = default;
};

// Every kernel that is compiled, by number.
constexpr DType WIDE[] = {DType::bf16, DType::fp16, DType::fp32};
constexpr DType FP8[] = {DType::e4m3, DType::e5m2};
constexpr std::size_t MXFP8_QUANTIZE = 24, MXFP8_DEQUANTIZE = 12;
constexpr std::size_t NVFP4_QUANTIZE = 32, NVFP4_DEQUANTIZE = 6;
constexpr Mxfp8Quantize mxfp8_quantize_at(std::size_t i) {
    return {WIDE[i / 4 % 3], FP8[i / 2 % 2], i % 2 != 0, i >= 12};
}
constexpr Mxfp8Dequantize mxfp8_dequantize_at(std::size_t i) {
    return {WIDE[i / 2 % 3], FP8[i % 2], i >= 6};
}
constexpr Nvfp4Quantize nvfp4_quantize_at(std::size_t i) {
    // Kernels of 16-bit elements also without TMA, behind the others for Hopper; then portable
    // ones, which do without it.
    const bool portable = i >= 20;
    const std::size_t at = portable ? i - 20 : i;
    return {WIDE[at / 4 % 3], at / 2 % 2 != 0, at % 2 != 0, at / 4 >= 3, portable};
}
constexpr Nvfp4Dequantize nvfp4_dequantize_at(std::size_t i) { return {WIDE[i % 3], i >= 3}; }

// A matrix in memory, or a batch of them: rows of adjacent elements; strides count elements.
struct Matrix {
    const void* data = nullptr;
    int64_t rows = 0, columns = 0, batch = 1;
    int64_t row_stride = 0, batch_stride = 0;
};

// Outputs are contiguous. Rows may begin at any byte, those of x at any element.
struct Mxfp8Params {
    Matrix x;
    void* data = nullptr;  // (batch, rows, columns), blocks along the columns; or nullptr
    void* scale = nullptr;
    void* down_data = nullptr;  // (batch, columns, rows), blocks along the rows; or nullptr
    void* down_scale = nullptr;
    bool swizzle = true;
    bool floor = false;  // the rule of the scale: floor, else rceil
};
struct Nvfp4Params {
    Matrix x;
    void* data = nullptr;  // (batch, rows, columns / 2) bytes
    void* scale = nullptr;
    const void* given_scale = nullptr;  // fp32 (batch,): the global scales, or nullptr: to be found
    void* global_scale = nullptr;       // fp32 (batch,)
    void* maxima = nullptr;  // where they are to be found: uint32 (batch, maxima_count), workspace
    int maxima_count = 0;
    const void* seed = nullptr;  // int64, where rounding is stochastic
    bool swizzle = true;
    int blocks = 0;  // as many as stay, see in_ring()
};
struct DequantizeParams {
    Matrix data;  // rows and columns are those of the result; strides count bytes
    const void* scale = nullptr;
    const void* global_scale = nullptr;  // NVFP4: fp32 (batch,)
    void* out = nullptr;
    bool swizzle = true;
};

TK_FIELDS(Mxfp8Problem, rows, columns, batch, dtype, data_dtype, transpose, row_major)
TK_FIELDS(Nvfp4Problem, rows, columns, batch, dtype, square, stochastic, unaligned)
TK_FIELDS(Mxfp8Quantize, dtype, data_dtype, down, portable)
TK_FIELDS(Mxfp8Dequantize, dtype, data_dtype, portable)
TK_FIELDS(Nvfp4Quantize, dtype, square, stochastic, unaligned, portable)
TK_FIELDS(Nvfp4Dequantize, dtype, portable)

// Tiles of a batch of matrices; the kernels count them in 31 bits.
constexpr int64_t tiles(int64_t rows, int64_t columns, int64_t batch) {
    return (rows + TILE - 1) / TILE * ((columns + TILE - 1) / TILE) * batch;
}
// Blocks per matrix that look for its maximum.
int maxima_count(const Nvfp4Problem& problem, const DeviceProperties& device);
int ring_blocks(const DeviceProperties& device);

// Size of the scales of one matrix: rows and columns of the plain layout, or of the 128x4 layout.
struct ScaleShape {
    int64_t rows, columns;
};
constexpr ScaleShape scale_shape(int64_t rows, int64_t columns, int block, bool swizzle) {
    const int64_t blocks = (columns + block - 1) / block;
    if (!swizzle) return {rows, blocks};
    return {(rows + 127) / 128 * 128, (blocks + 3) / 4 * 4};
}

// Empty when there is a kernel for the problem, else the reason in a sentence.
std::string unsupported(const Mxfp8Problem& problem, const DeviceProperties& device);
std::string unsupported(const Nvfp4Problem& problem, const DeviceProperties& device);
Mxfp8Quantize choose_mxfp8_quantize(const Mxfp8Problem& problem, const DeviceProperties& device);
Mxfp8Dequantize choose_mxfp8_dequantize(const Mxfp8Problem& problem,
                                        const DeviceProperties& device);
Nvfp4Quantize choose_nvfp4_quantize(const Nvfp4Problem& problem, const DeviceProperties& device);
Nvfp4Dequantize choose_nvfp4_dequantize(const Nvfp4Problem& problem,
                                        const DeviceProperties& device);
std::string kernel_name(const Mxfp8Quantize& config);
std::string kernel_name(const Mxfp8Dequantize& config);
std::string kernel_name(const Nvfp4Quantize& config);
std::string kernel_name(const Nvfp4Dequantize& config);

// Run the kernel of `config` on the stream; find_maxima the search for a matrix's maximum.
template <Mxfp8Quantize config>
void quantize(const Mxfp8Params& params, Stream stream);
template <Mxfp8Dequantize config>
void dequantize(const DequantizeParams& params, Stream stream);
template <Nvfp4Quantize config>
void quantize(const Nvfp4Params& params, Stream stream);
template <Nvfp4Dequantize config>
void dequantize(const DequantizeParams& params, Stream stream);
template <DType dtype, bool portable>
void find_maxima(const Nvfp4Params& params, Stream stream);

}  // namespace thunderkittens::block_scaled
