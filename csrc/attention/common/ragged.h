// What the layouts of packed sequences ask for beside what any tensor map does. Host C++ only.
#pragma once

#include <cstdint>

namespace thunderkittens::attention {

// Their maps count in rows: these must not be one and the same, and at most 2^34 bytes apart.
constexpr bool fits_ragged_map(int64_t rows, int64_t row_stride) {
    return rows <= 1 || (row_stride > 0 && row_stride < int64_t{1} << 33);
}

}  // namespace thunderkittens::attention
