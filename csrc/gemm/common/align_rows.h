// Copies of matrices that TMA cannot read because their rows do not begin at multiples of 16 bytes.
// The order of the elements in memory stays, so that nothing is transposed, and one kernel makes
// the copies of both operands. Host C++ without torch.
#pragma once

#include <algorithm>
#include <cstdint>

#include "csrc/common/device.h"

namespace thunderkittens::gemm {

// Rows of adjacent bytes of `batch` matrices, and where their copies go: rows of `to_pitch` bytes,
// a multiple of 16, from one matrix to the next without a gap.
struct AlignRows {
    const void* from = nullptr;
    void* to = nullptr;
    int64_t batch = 1, rows = 0, row_bytes = 0;
    int64_t pitch = 0, batch_pitch = 0, to_pitch = 0;  // bytes
};

// Rows of the copy begin at lines of 128 bytes, unless that made it much larger.
constexpr int64_t aligned_pitch(int64_t row_bytes) {
    const int64_t vectors = (row_bytes + 15) / 16 * 16, lines = (row_bytes + 127) / 128 * 128;
    return lines * 4 <= vectors * 5 ? lines : vectors;
}

// The kernel counts vectors of 16 bytes in 31 bits.
constexpr bool can_align(const AlignRows& copy) {
    return copy.batch * copy.rows * ((copy.row_bytes + 15) / 16) < (int64_t{1} << 31);
}

constexpr int MAX_ALIGNED = 2;  // matrices of a launch
constexpr int ALIGN_THREADS = 256;

// Run the kernel of align_rows_sm90.cuh, and of align_rows_sm80.cuh; matrices without rows are left
// out.
template <int matrices>
void launch_align_rows(const AlignRows (&copies)[matrices], Stream stream);
template <int matrices>
void launch_portable_align_rows(const AlignRows (&copies)[matrices], Stream stream);

}  // namespace thunderkittens::gemm
