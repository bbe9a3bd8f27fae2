// An NVFP4 product as the fused dequantization sees it: one of 16-bit operands, whose weight is
// dequantized on the way (fused_dequant/fused_dequant.h). Host C++ only.
#pragma once

#include "csrc/gemm/fused_dequant/fused_dequant.h"
#include "csrc/gemm/nvfp4/nvfp4_gemm.h"

namespace thunderkittens::gemm {

// The product of 16-bit activations and a prepared weight of NVFP4, whose rows and columns in the
// workspace are whole pieces.
inline FusedDequantParams<Nvfp4Source> fused_dequant_params(const nvfp4_gemm::Params& p,
                                                            int raster_group, void* workspace) {
    return {.product = {.a = p.a,
                        .b = workspace,
                        .out = p.out,
                        .m = p.m,
                        .n = p.n,
                        .k = p.k,
                        .a_stride = p.a_stride,
                        .b_stride = nvfp4_gemm::pieces(p.k) * nvfp4_gemm::PIECE,
                        .out_stride = p.n,
                        .out_dtype = p.out_dtype,
                        .epilogue = {.bias = p.bias,
                                     .alpha = NVFP4_ALPHA,
                                     .activation = static_cast<Activation>(p.activation)},
                        .schedule = {.raster_group = raster_group, .blocks = p.schedule.blocks}},
            .sources = {p.weight, p.scale}};
}

}  // namespace thunderkittens::gemm
