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

}  // namespace thunderkittens::gemm
