// fp8_quantize on the emulator.
#include "csrc/common/emulated.h"
#include "csrc/gemm/quantize/fp8_quantize_body.h"

namespace thunderkittens::fp8_quantize {
namespace {

using emulated::Array;

emulated::Result run(const emulated::Call& call) {
    const Backend<Array> on(call);
    const bool transposed = call.scalar("transposed", false);
    const auto result = fp8_quantize_body(
        on, call.array("x"), call.scalar("granularity", int64_t{1}),
        std::optional(call.scalar("dtype", DType::e4m3)), call.if_given("scale"), transposed);
    std::map<std::string, Array> arrays{{"out", result.out}, {"scale", result.scale}};
    if (transposed) arrays["out_t"] = result.out_t, arrays["scale_t"] = result.scale_t;
    return on.result(std::move(arrays));
}

const bool registered = emulated::register_run("fp8_quantize", &run);

}  // namespace
}  // namespace thunderkittens::fp8_quantize
