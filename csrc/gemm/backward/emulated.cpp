// gemm_backward on the emulator.
#include "csrc/common/emulated.h"
#include "csrc/gemm/backward/gemm_backward_body.h"

namespace thunderkittens::gemm_backward {
namespace {

using emulated::Array;

emulated::Result run(const emulated::Call& call) {
    const Backend<Array> on(call);
    return on.result({{"out", gemm_backward_body(
                                  on, call.array("grad"), call.array("z"),
                                  static_cast<int64_t>(call.scalar("activation", Activation::silu)),
                                  static_cast<int64_t>(call.scalar("gate", Gate::blocked)))}});
}

const bool registered = emulated::register_run("gemm_backward", &run);

}  // namespace
}  // namespace thunderkittens::gemm_backward
