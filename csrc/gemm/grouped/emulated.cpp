// grouped_gemm on the emulator.
#include "csrc/common/emulated.h"
#include "csrc/gemm/grouped/grouped_gemm_body.h"

namespace thunderkittens::grouped_gemm {
namespace {

using emulated::Array;

emulated::Result run(const emulated::Call& call) {
    const Backend<Array> on(call);
    return on.result(
        {{"out", grouped_gemm_body(on, call.array("a"), call.array("b"), call.array("offs"))}});
}

const bool registered = emulated::register_run("grouped_gemm", &run);

}  // namespace
}  // namespace thunderkittens::grouped_gemm
