// From a configuration chosen at run time to the kernel compiled for it. Host C++ only; the ops and
// the emulator share it.
#pragma once

#include "csrc/common/check.h"
#include "csrc/common/view.h"
#include "csrc/gemm/common/listed.h"
#include "csrc/gemm/quantize/block_scaled.h"

namespace thunderkittens::block_scaled {

inline void launch(const Mxfp8Quantize& wanted, const Mxfp8Params& params, Stream stream) {
    const bool found =
        gemm::launch_listed<mxfp8_quantize_at, MXFP8_QUANTIZE>(wanted, [&]<Mxfp8Quantize c>() {
            if constexpr (!c.portable || BUILDS_PORTABLE) quantize<c>(params, stream);
            return true;
        });
    TK_CHECK(found, "tk.mxfp8_quantize: no kernel ", kernel_name(wanted));
}
inline void launch(const Mxfp8Dequantize& wanted, const DequantizeParams& params, Stream stream) {
    const bool found = gemm::launch_listed<mxfp8_dequantize_at, MXFP8_DEQUANTIZE>(
        wanted, [&]<Mxfp8Dequantize c>() {
            if constexpr (!c.portable || BUILDS_PORTABLE) dequantize<c>(params, stream);
            return true;
        });
    TK_CHECK(found, "tk.mxfp8_dequantize: no kernel ", kernel_name(wanted));
}
inline void launch(const Nvfp4Quantize& wanted, const Nvfp4Params& params, Stream stream) {
    const auto run = [&]<Nvfp4Quantize c>() {
        if constexpr (!c.portable || BUILDS_PORTABLE) {
            if (params.given_scale == nullptr) find_maxima<c.dtype, c.portable>(params, stream);
            quantize<c>(params, stream);
        }
        return true;
    };
    const bool found = gemm::launch_listed<nvfp4_quantize_at, NVFP4_QUANTIZE>(wanted, run);
    TK_CHECK(found, "tk.nvfp4_quantize: no kernel ", kernel_name(wanted));
}
inline void launch(const Nvfp4Dequantize& wanted, const DequantizeParams& params, Stream stream) {
    const bool found = gemm::launch_listed<nvfp4_dequantize_at, NVFP4_DEQUANTIZE>(
        wanted, [&]<Nvfp4Dequantize c>() {
            if constexpr (!c.portable || BUILDS_PORTABLE) dequantize<c>(params, stream);
            return true;
        });
    TK_CHECK(found, "tk.nvfp4_dequantize: no kernel ", kernel_name(wanted));
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
