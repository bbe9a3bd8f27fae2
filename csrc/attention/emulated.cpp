// The attention ops on the emulator. Optional arrays are absent, and so are scalars that have a
// default.
#include "csrc/common/emulated.h"
#include "csrc/attention/attention_body.h"
#include "csrc/attention/backward_body.h"

namespace thunderkittens::attention {
namespace {

using emulated::Array;

// What both directions take beside q, k and v.
struct Arguments {
    std::optional<Packing<Array>> packing;
    Options<Array> options;

    explicit Arguments(const emulated::Call& call)
        : options{.causal = call.scalar<int64_t>("causal", 0),
                  .window_left = call.scalar<int64_t>("window_left", -1),
                  .window_right = call.scalar<int64_t>("window_right", -1),
                  .softcap = call.scalar("softcap", 0.0),
                  .alibi_slopes = call.if_given("alibi_slopes"),
                  .sink = call.if_given("sink"),
                  .deterministic = call.scalar("deterministic", false)} {
        if (call.scalars.contains("scale")) options.scale = call.scalar("scale", 1.0);
        if (call.optional("cu_seqlens_q")) {
            packing = {call.array("cu_seqlens_q"), call.array("cu_seqlens_k"),
                       call.scalar<int64_t>("max_seqlen_q", 0),
                       call.scalar<int64_t>("max_seqlen_k", 0)};
        }
    }
    const Packing<Array>* packed() const { return packing ? &*packing : nullptr; }
};

emulated::Result run_forward(const emulated::Call& call) {
    Backend<Array> on(call);
    const Arguments arguments(call);
    Array lse;
    const Array out = attention_body<Array>(on, call.array("q"), call.array("k"), call.array("v"),
                                            arguments.packed(), arguments.options,
                                            call.scalar("lse", true) ? &lse : nullptr);
    return on.result({{"out", out}, {"lse", lse}});
}

emulated::Result run_backward(const emulated::Call& call) {
    Backend<Array> on(call);
    const Arguments arguments(call);
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

const bool registered = emulated::register_run("attention", &run_forward) &&
                        emulated::register_run("attention_backward", &run_backward);

}  // namespace
}  // namespace thunderkittens::attention
