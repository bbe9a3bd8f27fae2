// What every kernel of products asks of a problem's sizes and of the device: each is empty, or the
// reason why there is none. Host C++ only.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>

#include "csrc/common/check.h"
#include "csrc/common/device.h"

namespace thunderkittens::gemm {

// Of the sizes of a product and the number of its matrices, which has a name.
inline std::string unsupported_sizes(int64_t m, int64_t n, int64_t k, const char* name,
                                     int64_t count,
                                     int64_t limit = std::numeric_limits<int32_t>::max()) {
    if (std::min({m, n, k, count}) >= 0 && std::max({m, n, k, count}) <= limit) return "";
    return concat("sizes must be in [0, ", limit, "], got m ", m, ", n ", n, ", k ", k, ", ", name,
                  ' ', count);
}

// The kernels count tiles in 31 bits, up to one wave of blocks past the last.
inline std::string unsupported_resources(double tiles, int shared_bytes,
                                         const DeviceProperties& device) {
    if (tiles > 2e9) return concat("the output has ", tiles, " tiles; at most 2e9 are supported");
    if (shared_bytes <= device.shared_bytes_per_block) return "";
    return concat("the kernel needs ", shared_bytes,
                  " bytes of shared memory per block, this GPU has ",
                  device.shared_bytes_per_block);
}

// Clusters of so many blocks that are there at a time, of blocks that fill an SM. From three on
// they do not come out even with the SMs that they can share: an H200 of 132 SMs holds 66 clusters
// of two, 30 of four, fewer than 24 of five and than 18 of six, and 15 of eight (measured).
inline int clusters_at_a_time(int size, int sm_count) {
    const bool even = size <= 2 || sm_count < 16;
    const int clusters = even ? sm_count / size : sm_count / 16 * (16 / size) * 15 / 16;
    return std::max(1, clusters);
}

}  // namespace thunderkittens::gemm
