// From a configuration chosen at run time to the kernel compiled for it. Host C++ only; the ops and
// the emulator share it.
#pragma once

#include "csrc/common/check.h"
#include "csrc/common/view.h"
#include "csrc/gemm/quantize/block_scaled.h"

namespace thunderkittens::block_scaled {

// Calls f with each dtype as a type's value; f says whether it is the one.
template <DType value>
struct Constant {
    static constexpr DType dtype = value;
};
template <typename F>
bool any_wide(F&& f) {
    return f(Constant<DType::bf16>{}) || f(Constant<DType::fp16>{}) || f(Constant<DType::fp32>{});
}
template <typename F>
bool any_fp8(F&& f) {
    return f(Constant<DType::e4m3>{}) || f(Constant<DType::e5m2>{});
}

template <auto config, typename Config, typename Params>
bool quantize_if(const Config& wanted, const Params& params, Stream stream) {
    if (!(wanted == config)) return false;
    quantize<config>(params, stream);
    return true;
}
template <auto config, typename Config>
bool dequantize_if(const Config& wanted, const DequantizeParams& params, Stream stream) {
    if (!(wanted == config)) return false;
    dequantize<config>(params, stream);
    return true;
}

inline void launch(const Mxfp8Quantize& c, const Mxfp8Params& params, Stream stream) {
    const bool found = any_wide([&]<typename W>(W) {
        return any_fp8([&]<typename E>(E) {
            return quantize_if<Mxfp8Quantize{W::dtype, E::dtype, false}>(c, params, stream) ||
                   quantize_if<Mxfp8Quantize{W::dtype, E::dtype, true}>(c, params, stream);
        });
    });
    TK_CHECK(found, "tk.mxfp8_quantize: no kernel ", kernel_name(c));
}
inline void launch(const Mxfp8Dequantize& c, const DequantizeParams& params, Stream stream) {
    const bool found = any_wide([&]<typename W>(W) {
        return any_fp8([&]<typename E>(E) {
            return dequantize_if<Mxfp8Dequantize{W::dtype, E::dtype}>(c, params, stream);
        });
    });
    TK_CHECK(found, "tk.mxfp8_dequantize: no kernel ", kernel_name(c));
}
inline void launch(const Nvfp4Quantize& c, const Nvfp4Params& params, Stream stream) {
    const bool found = any_wide([&]<typename W>(W) {
        constexpr DType D = W::dtype;
        if (c.dtype != D) return false;
        if (params.given_scale == nullptr) find_maxima<D>(params, stream);
        const auto any = [&]<bool unaligned>() {
            return quantize_if<Nvfp4Quantize{D, false, false, unaligned}>(c, params, stream) ||
                   quantize_if<Nvfp4Quantize{D, false, true, unaligned}>(c, params, stream) ||
                   quantize_if<Nvfp4Quantize{D, true, false, unaligned}>(c, params, stream) ||
                   quantize_if<Nvfp4Quantize{D, true, true, unaligned}>(c, params, stream);
        };
        if constexpr (D != DType::fp32) {
            if (any.template operator()<true>()) return true;
        }
        return any.template operator()<false>();
    });
    TK_CHECK(found, "tk.nvfp4_quantize: no kernel ", kernel_name(c));
}
inline void launch(const Nvfp4Dequantize& c, const DequantizeParams& params, Stream stream) {
    const bool found = any_wide(
        [&]<typename W>(W) { return dequantize_if<Nvfp4Dequantize{W::dtype}>(c, params, stream); });
    TK_CHECK(found, "tk.nvfp4_dequantize: no kernel ", kernel_name(c));
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
