// mxfp8_gemm and mxfp8_prepare on the emulator. Scales and tile masks travel as bytes.
#include "csrc/common/emulated.h"
#include "csrc/gemm/mxfp8/mxfp8_gemm_body.h"

namespace thunderkittens::mxfp8_gemm {
namespace {

using emulated::Array;

emulated::Result run_prepare(const emulated::Call& call) {
    const Backend<Array> on(call);
    const Prepared<Array> prepared = mxfp8_prepare_body(on, call.array("data"), call.array("scale"),
                                                        call.scalar("swizzle", true));
    return on.result(
        {{"codes", prepared.codes}, {"factor", prepared.factor}, {"marks", prepared.mask}});
}

emulated::Result run_gemm(const emulated::Call& call) {
    const Backend<Array> on(call);
    const auto kept = [&](const std::string& operand) {
        return Kept<Array>{call.if_given("codes_" + operand), call.if_given("factor_" + operand),
                           call.if_given("marks_" + operand)};
    };
    const Options<Array> options{.bias = call.if_given("bias"),
                                 .activation = call.scalar("activation", int64_t{0}),
                                 .out_type = call.scalar("out_dtype", DType::bf16),
                                 .rescaled = call.scalar("rebased", false),
                                 .swizzle_a = call.scalar("swizzle_a", true),
                                 .swizzle_b = call.scalar("swizzle_b", true),
                                 .a = kept("a"),
                                 .b = kept("b"),
                                 .offs = call.if_given("offs")};
    return on.result(
        {{"out", mxfp8_gemm_body(on, call.array("a"), call.array("b"), call.array("scale_a"),
                                 call.array("scale_b"), options)}});
}

const bool registered = emulated::register_run("mxfp8_prepare", &run_prepare) &&
                        emulated::register_run("mxfp8_gemm", &run_gemm);

}  // namespace
}  // namespace thunderkittens::mxfp8_gemm
