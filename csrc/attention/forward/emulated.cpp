// Attention on the emulator. Optional arrays are absent, and so are scalars that have a default.
#include "csrc/attention/common/emulated_arguments.h"
#include "csrc/attention/forward/attention_body.h"

namespace thunderkittens::attention {
namespace {

using emulated::Array;

emulated::Result run_forward(const emulated::Call& call) {
    Backend<Array> on(call);
    const EmulatedArguments arguments(call);
    Array lse;
    const Array out = attention_body<Array>(on, call.array("q"), call.array("k"), call.array("v"),
                                            arguments.packed(), arguments.options,
                                            call.scalar("lse", true) ? &lse : nullptr);
    return on.result({{"out", out}, {"lse", lse}});
}

const bool registered = emulated::register_run("attention", &run_forward);

}  // namespace
}  // namespace thunderkittens::attention
