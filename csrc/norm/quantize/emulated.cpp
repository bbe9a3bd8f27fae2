// The quantising norms on the emulator. Codes and scales of e4m3 travel as bytes.
#include "csrc/common/emulated.h"
#include "csrc/norm/quantize/layer_norm_quantize_body.h"
#include "csrc/norm/quantize/rms_norm_quantize_body.h"

namespace thunderkittens::norm {
namespace {

using emulated::Array;

emulated::Result results(const Backend<Array>& on, const Quantized<Array>& r) {
    return on.result({{"data", r.data}, {"scale", r.scale}, {"sum", r.sum}});
}
Options<Array> options_of(const emulated::Call& call) {
    return {.weight = call.if_given("weight"),
            .bias = call.if_given("bias"),
            .residual = call.if_given("residual"),
            .eps = call.scalar("eps", 0.0),
            .offset = call.scalar("weight_offset", 0.0)};
}

emulated::Result run_rms_norm_quantize(const emulated::Call& call) {
    const Backend<Array> on(call);
    return results(on, rms_norm_quantize_body(
                           on, call.array("x"), options_of(call), call.if_given("scale"),
                           call.scalar("output", int64_t{1}), call.scalar("swizzle", true)));
}
emulated::Result run_layer_norm_quantize(const emulated::Call& call) {
    const Backend<Array> on(call);
    return results(on, layer_norm_quantize_body(
                           on, call.array("x"), options_of(call), call.if_given("scale"),
                           call.scalar("output", int64_t{1}), call.scalar("swizzle", true)));
}

const bool registered = emulated::register_run("rms_norm_quantize", &run_rms_norm_quantize) &&
                        emulated::register_run("layer_norm_quantize", &run_layer_norm_quantize);

}  // namespace
}  // namespace thunderkittens::norm
