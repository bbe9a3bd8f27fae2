// nvfp4_prepare, its inverse and nvfp4_gemm on the emulator.
#include "csrc/common/emulated.h"
#include "csrc/gemm/nvfp4/nvfp4_gemm_body.h"
#include "csrc/gemm/nvfp4/nvfp4_prepare_body.h"

namespace thunderkittens::nvfp4_gemm {
namespace {

using emulated::Array;

emulated::Result run_prepare(const emulated::Call& call) {
    const Backend<Array> on(call);
    return on.result({{"out", nvfp4_prepare_body(on, call.array("data"), call.array("block_scale"),
                                                 call.scalar("swizzle", true))}});
}

emulated::Result run_restore(const emulated::Call& call) {
    const Backend<Array> on(call);
    return on.result({{"out", nvfp4_restore_body(on, call.array("data"), call.array("global_scale"),
                                                 call.scalar("rows", int64_t{0}),
                                                 call.scalar("columns", int64_t{0}),
                                                 call.scalar("dtype", DType::bf16))}});
}

emulated::Result run_gemm(const emulated::Call& call) {
    const Backend<Array> on(call);
    const Array& a = call.array("a");
    const Options<Array> options{.bias = call.if_given("bias"),
                                 .activation = call.scalar("activation", int64_t{0}),
                                 .out_type = call.scalar("out_dtype", a.dtype),
                                 .offs = call.if_given("offs")};
    return on.result({{"out", nvfp4_gemm_body(on, a, call.array("b"), call.array("global_scale"),
                                              call.scalar("n", int64_t{0}), options)}});
}

const bool registered = emulated::register_run("nvfp4_prepare", &run_prepare) &&
                        emulated::register_run("nvfp4_dequantize.prepared", &run_restore) &&
                        emulated::register_run("nvfp4_gemm", &run_gemm);

}  // namespace
}  // namespace thunderkittens::nvfp4_gemm
