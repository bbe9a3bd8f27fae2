// The passes that quantise and dequantise as portable kernels, for every GPU from compute
// capability 8.0 on: those for Hopper without TMA, compiled once more, with the conversions of
// common/fp8_codes_sm80.cuh. They are bound by memory, here as there.
#pragma once

#include "csrc/gemm/quantize/fp8_quantize_sm90.cuh"
#include "csrc/gemm/quantize/mxfp8_quantize_sm90.cuh"
#include "csrc/gemm/quantize/nvfp4_quantize_sm90.cuh"
