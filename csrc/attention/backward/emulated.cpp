// The gradient of attention on the emulator. Optional arrays are absent, and so are scalars that
// have a default.
#include "csrc/attention/backward/backward_body.h"
#include "csrc/attention/common/emulated_arguments.h"

namespace thunderkittens::attention {
namespace {

using emulated::Array;

emulated::Result run_backward(const emulated::Call& call) {
    Backend<Array> on(call);
    const EmulatedArguments arguments(call);
    std::vector<bool> needs;
    for (const char* name : {"needs_q", "needs_k", "needs_v", "needs_sink"}) {
        needs.push_back(call.scalar(name, true));
    }
    const auto [dq, dk, dv, dsink] = attention_backward_body<Array>(
        on,
        {call.array("grad_out"), call.if_given("grad_lse"), call.array("q"), call.array("k"),
         call.array("v"), call.array("out"), call.array("lse")},
        arguments.packed(), arguments.options, needs);
    return on.result({{"dq", dq}, {"dk", dk}, {"dv", dv}, {"dsink", dsink}});
}

const bool registered = emulated::register_run("attention_backward", &run_backward);

}  // namespace
}  // namespace thunderkittens::attention
