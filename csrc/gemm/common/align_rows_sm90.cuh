// The kernel of align_rows.h: each thread reads the vectors of 16 bytes around those that belong
// together in the copy, and shifts them into place. No roles. All but its beginning is that of the
// portable one, too.
#pragma once

#include "csrc/gemm/common/align_rows.h"
#include "csrc/gemm/common/raster.h"
#include "kittens/kittens.cuh"

namespace thunderkittens::gemm {
namespace sm90 {

using namespace kittens;

constexpr int ALIGN_VECTORS = 4;  // of a thread
constexpr uint32_t VECTOR_BYTES = 16;

struct AlignRowsGlobals {
    struct Matrix {
        const uint8_t* from;
        uint4* to;
        int64_t pitch, batch_pitch;    // bytes
        uint32_t row_bytes, to_pitch;  // the latter in vectors
        Divisor per_row, rows;         // vectors of a row
        uint32_t vectors;
        uint64_t begin, end;  // addresses around all bytes: nothing else is read
    };
    Matrix matrices[MAX_ALIGNED];
};

// The bytes of a vector on their way: the aligned vectors that they lie in, and by how many bytes
// they are behind the first one's begin.
struct UnalignedVector {
    uint4 low, high;
    uint32_t shift;
};

__device__ __forceinline__ UnalignedVector load_unaligned(const AlignRowsGlobals::Matrix& matrix,
                                                          const uint8_t* at, uint32_t bytes) {
    UnalignedVector v{};
    const uint64_t address = reinterpret_cast<uint64_t>(at);
    const uint32_t shift = address % VECTOR_BYTES, count = min(bytes, VECTOR_BYTES);
    const uint64_t first = address - shift;
    const bool two = shift + count > VECTOR_BYTES;
    if (first >= matrix.begin && first + (two ? 2 : 1) * VECTOR_BYTES <= matrix.end) {
        const auto* from = reinterpret_cast<const uint4*>(first);
        v.low = arch::load_global_readonly(from);
        if (two) v.high = arch::load_global_readonly(from + 1);
        v.shift = shift;
        return v;
    }
    // At an end of the matrices, byte by byte.
    uint32_t words[4] = {};
    for (uint32_t i = 0; i < count; ++i) {
        const uint32_t byte = arch::load_global_readonly(at + i);
#pragma unroll
        for (uint32_t w = 0; w < 4; ++w) {
            if (i / 4 == w) words[w] |= byte << i % 4 * 8;
        }
    }
    v.low = {words[0], words[1], words[2], words[3]};
    return v;
}

__device__ __forceinline__ uint4 shifted(const UnalignedVector& v) {
    uint32_t w[8] = {v.low.x, v.low.y, v.low.z, v.low.w, v.high.x, v.high.y, v.high.z, v.high.w};
#pragma unroll
    for (int i = 0; i < 6; ++i) w[i] = v.shift & 8 ? w[i + 2] : w[i];
#pragma unroll
    for (int i = 0; i < 5; ++i) w[i] = v.shift & 4 ? w[i + 1] : w[i];
    const uint32_t bytes = 0x3210 + v.shift % 4 * 0x1111;
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = arch::permute_bytes(w[i], w[i + 1], bytes);
    return {w[0], w[1], w[2], w[3]};
}

// What a thread copies, after begin().
template <class Begin>
__device__ __forceinline__ void align_rows(const AlignRowsGlobals& g, Begin begin) {
    const AlignRowsGlobals::Matrix& matrix = g.matrices[blockIdx.y];
    const uint32_t first = blockIdx.x * (ALIGN_THREADS * ALIGN_VECTORS) + threadIdx.x;
    begin();
    if (first >= matrix.vectors) return;
    UnalignedVector vectors[ALIGN_VECTORS];
    uint4* to[ALIGN_VECTORS];
#pragma unroll
    for (int i = 0; i < ALIGN_VECTORS; ++i) {
        const uint32_t at = min(first + i * ALIGN_THREADS, matrix.vectors - 1);
        const uint32_t line = matrix.per_row.divide(at), batch = matrix.rows.divide(line);
        const uint32_t vector = at - line * matrix.per_row.value;
        const uint32_t row = line - batch * matrix.rows.value, byte = vector * VECTOR_BYTES;
        vectors[i] = load_unaligned(
            matrix, matrix.from + (batch * matrix.batch_pitch + row * matrix.pitch + byte),
            matrix.row_bytes - byte);
        to[i] = matrix.to + (uint64_t{line} * matrix.to_pitch + vector);
    }
#pragma unroll
    for (int i = 0; i < ALIGN_VECTORS; ++i) {
        if (first + i * ALIGN_THREADS < matrix.vectors)
            arch::store_global(to[i], shifted(vectors[i]));
    }
}

template <int matrices>
__global__ __launch_bounds__(ALIGN_THREADS) void align_rows_kernel(
    const __grid_constant__ AlignRowsGlobals g) {
    align_rows(g, [] {
        arch::wait_for_dependencies();
        arch::launch_dependents();
    });
}

}  // namespace sm90

// Launches a kernel that takes those parameters; one that waits for the kernel before it by itself
// is `dependent`.
template <int matrices, class Kernel>
void launch_align_rows(Kernel kernel, bool dependent, const AlignRows (&copies)[matrices],
                       Stream stream) {
    static_assert(matrices <= MAX_ALIGNED);
    constexpr auto of_block = uint32_t{ALIGN_THREADS * sm90::ALIGN_VECTORS};
    sm90::AlignRowsGlobals g{};
    uint32_t count = 0, most = 0;
    for (const AlignRows& copy : copies) {
        if (copy.batch * copy.rows * copy.row_bytes == 0) continue;
        const auto per_row = static_cast<uint32_t>((copy.row_bytes + 15) / 16);
        const auto begin = reinterpret_cast<uint64_t>(copy.from);
        const int64_t bytes =
            (copy.batch - 1) * copy.batch_pitch + (copy.rows - 1) * copy.pitch + copy.row_bytes;
        g.matrices[count++] = {
            .from = static_cast<const uint8_t*>(copy.from),
            .to = static_cast<uint4*>(copy.to),
            .pitch = copy.pitch,
            .batch_pitch = copy.batch_pitch,
            .row_bytes = static_cast<uint32_t>(copy.row_bytes),
            .to_pitch = static_cast<uint32_t>(copy.to_pitch / 16),
            .per_row = Divisor(per_row),
            .rows = Divisor(static_cast<uint32_t>(copy.rows)),
            .vectors = static_cast<uint32_t>(copy.batch * copy.rows) * per_row,
            .begin = begin,
            .end = begin + static_cast<uint64_t>(bytes),
        };
        most = std::max(most, g.matrices[count - 1].vectors);
    }
    if (count == 0) return;
    kittens::launch(kittens::LaunchOptions{.dependent = dependent}, kernel,
                    dim3((most - 1) / of_block + 1, count), dim3(ALIGN_THREADS), dim3(1), 0, stream,
                    g);
}

template <int matrices>
void launch_align_rows(const AlignRows (&copies)[matrices], Stream stream) {
    launch_align_rows(sm90::align_rows_kernel<matrices>, true, copies, stream);
}

}  // namespace thunderkittens::gemm
