// The tile mask: which tiles of a product are computed. Host C++ only; kernels read it as in
// tile_mask_sm90.cuh.
#pragma once

#include <cstdint>

namespace thunderkittens::gemm {

// A tile mask is made on the device (mxfp8/mxfp8_gemm.h), so that the host never waits for it: a
// word for each 128 rows and each 128 columns of the output. Tiles that touch a word other than
// zero are computed; of the others the kernel writes nothing.
constexpr int MASK_ROWS = 128;
struct TileMask {
    const uint64_t* rows = nullptr;
    const uint64_t* columns = nullptr;
};

}  // namespace thunderkittens::gemm
