// Which tiles of a product are marked. Host C++ only; kernels read it as in tile_mask_sm90.cuh.
#pragma once

#include <cstdint>

namespace thunderkittens::gemm {

// Where only some tiles are to be computed, which the device decides (mxfp8/mxfp8_gemm.h): a word
// per 128 rows and per 128 columns of the output. Tiles with a row or column of a word that is not
// zero are computed; of others the kernel writes nothing.
constexpr int MARKED_ROWS = 128;
struct Marks {
    const uint64_t* rows = nullptr;
    const uint64_t* columns = nullptr;
};

}  // namespace thunderkittens::gemm
