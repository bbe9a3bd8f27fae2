// The quantisers of the block-scaled formats and their inverses on the emulator. Codes and scales
// travel as bytes, a seed as two words.
#include "csrc/common/emulated.h"
#include "csrc/gemm/quantize/mxfp8_dequantize_body.h"
#include "csrc/gemm/quantize/mxfp8_quantize_body.h"
#include "csrc/gemm/quantize/nvfp4_dequantize_body.h"
#include "csrc/gemm/quantize/nvfp4_quantize_body.h"

namespace thunderkittens::block_scaled {
namespace {

using emulated::Array;

emulated::Result run_mxfp8_quantize(const emulated::Call& call) {
    const Backend<Array> on(call);
    const bool transpose = call.scalar("transpose", false);
    auto [data, scale, data_t, scale_t] =
        mxfp8_quantize_body(on, call.array("x"), call.scalar("data_dtype", DType::e4m3),
                            call.scalar("floor", false), call.scalar("swizzle", true), transpose);
    data.dtype = data_t.dtype = DType::e4m3;
    emulated::Result result = on.result({{"data", data}, {"scale", scale}});
    if (transpose) result.arrays.insert({{"data_t", data_t}, {"scale_t", scale_t}});
    return result;
}

emulated::Result run_mxfp8_dequantize(const emulated::Call& call) {
    const Backend<Array> on(call);
    Array data = call.array("data");
    data.dtype = call.scalar("data_dtype", DType::e4m3);
    return on.result({{"out", mxfp8_dequantize_body(on, data, call.array("scale"),
                                                    call.scalar("dtype", DType::bf16),
                                                    call.scalar("swizzle", true))}});
}

emulated::Result run_nvfp4_quantize(const emulated::Call& call) {
    const Backend<Array> on(call);
    const auto [data, block_scale, global_scale] = nvfp4_quantize_body(
        on, call.array("x"), call.if_given("global_scale"), call.scalar("square", false),
        call.scalar("swizzle", true), call.if_given("seed"));
    return on.result(
        {{"data", data}, {"block_scale", block_scale}, {"global_scale", global_scale}});
}

emulated::Result run_nvfp4_dequantize(const emulated::Call& call) {
    const Backend<Array> on(call);
    return on.result(
        {{"out", nvfp4_dequantize_body(
                     on, call.array("data"), call.array("block_scale"), call.array("global_scale"),
                     call.scalar("dtype", DType::bf16), call.scalar("swizzle", true))}});
}

const bool registered = emulated::register_run("mxfp8_quantize", &run_mxfp8_quantize) &&
                        emulated::register_run("mxfp8_dequantize", &run_mxfp8_dequantize) &&
                        emulated::register_run("nvfp4_quantize", &run_nvfp4_quantize) &&
                        emulated::register_run("nvfp4_dequantize", &run_nvfp4_dequantize);

}  // namespace
}  // namespace thunderkittens::block_scaled
