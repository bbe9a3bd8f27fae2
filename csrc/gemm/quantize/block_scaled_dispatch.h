// From a configuration chosen at run time to the kernel compiled for it. Host C++ only; the ops and
// the emulator share it.
#pragma once

#include "csrc/common/view.h"
#include "csrc/gemm/common/run_listed.h"
#include "csrc/gemm/quantize/block_scaled.h"

namespace thunderkittens::block_scaled {

inline void launch(const Mxfp8Quantize& wanted, const Mxfp8Params& params, Stream stream) {
    gemm::run_listed<mxfp8_quantize_at, MXFP8_QUANTIZE>(
        "tk.mxfp8_quantize", wanted, [&]<Mxfp8Quantize c>() { quantize<c>(params, stream); });
}
inline void launch(const Mxfp8Dequantize& wanted, const DequantizeParams& params, Stream stream) {
    gemm::run_listed<mxfp8_dequantize_at, MXFP8_DEQUANTIZE>(
        "tk.mxfp8_dequantize", wanted, [&]<Mxfp8Dequantize c>() { dequantize<c>(params, stream); });
}
inline void launch(const Nvfp4Quantize& wanted, const Nvfp4Params& params, Stream stream) {
    const auto run = [&]<Nvfp4Quantize c>() {
        if (params.given_scale == nullptr) find_maxima<c.dtype, c.portable>(params, stream);
        quantize<c>(params, stream);
    };
    gemm::run_listed<nvfp4_quantize_at, NVFP4_QUANTIZE>("tk.nvfp4_quantize", wanted, run);
}
inline void launch(const Nvfp4Dequantize& wanted, const DequantizeParams& params, Stream stream) {
    gemm::run_listed<nvfp4_dequantize_at, NVFP4_DEQUANTIZE>(
        "tk.nvfp4_dequantize", wanted, [&]<Nvfp4Dequantize c>() { dequantize<c>(params, stream); });
}

// Whether rows are of adjacent elements.
inline bool rows_adjacent(const View& view) { return view.size[3] <= 1 || view.stride[3] == 1; }

// A batch of matrices as the kernels read it: rows of adjacent elements, which may begin anywhere.
inline Matrix matrix_of(const View& view) {
    return {.data = view.data,
            .rows = view.size[2],
            .columns = view.size[3],
            .batch = view.size[1],
            .row_stride = view.stride[2],
            .batch_stride = view.size[1] > 1 ? view.stride[1] : 0};
}

}  // namespace thunderkittens::block_scaled
