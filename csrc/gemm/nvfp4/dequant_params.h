// A product with a weight of NVFP4 as one of 16-bit operands, whose weight is expanded on the way:
// see fused_dequant/fused_dequant.h. Host C++ only.
#pragma once

#include "csrc/gemm/fused_dequant/fused_dequant.h"
#include "csrc/gemm/nvfp4/nvfp4_gemm.h"

namespace thunderkittens::gemm {

// The product of 16-bit activations and a prepared weight of NVFP4, whose rows and columns in
// scratch memory are whole pieces.
inline ExpandingParams<Nvfp4Source> expanding_params(const mixed_gemm::Params& p, int band,
                                                     void* scratch) {
    return {.product = {.a = p.a,
                        .b = scratch,
                        .out = p.out,
                        .m = p.m,
                        .n = p.n,
                        .k = p.k,
                        .a_stride = p.a_stride,
                        .b_stride = mixed_gemm::pieces(p.k) * mixed_gemm::PIECE,
                        .out_stride = p.n,
                        .out_dtype = p.out_dtype,
                        .epilogue = {.bias = p.bias,
                                     .alpha = NVFP4_ALPHA,
                                     .activation = static_cast<Activation>(p.activation)},
                        .schedule = {.band = band, .blocks = p.schedule.blocks}},
            .sources = {p.weight, p.scale}};
}

}  // namespace thunderkittens::gemm
