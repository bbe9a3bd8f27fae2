// fp8_gemm on the emulator.
#include "csrc/common/emulated.h"
#include "csrc/gemm/fp8/fp8_gemm_body.h"

namespace thunderkittens::fp8_gemm {
namespace {

using emulated::Array;

emulated::Result run(const emulated::Call& call) {
    const Backend<Array> on(call);
    const Options<Array> options{.bias = call.if_given("bias"),
                                 .activation = call.scalar("activation", int64_t{0}),
                                 .out_type = call.scalar("out_dtype", DType::bf16),
                                 .accurate = call.scalar("accurate", true),
                                 .offs = call.if_given("offs")};
    return on.result(
        {{"out", fp8_gemm_body(on, call.array("a"), call.array("b"), call.array("scale_a"),
                               call.array("scale_b"), options)}});
}

const bool registered = emulated::register_run("fp8_gemm", &run);

}  // namespace
}  // namespace thunderkittens::fp8_gemm
