// The ops of Based on the emulator. Optional arrays are absent.
#include "csrc/common/emulated.h"
#include "csrc/linear_attention/based/based_body.h"
#include "csrc/linear_attention/based/based_decode_body.h"

namespace thunderkittens::linear_attention {
namespace {

using emulated::Array;

emulated::Result run_based(const emulated::Call& call) {
    const Backend<Array> on(call);
    const bool return_state = call.scalar("return_state", false);
    const auto r = based_body<Array>(on, {call.array("q"), call.array("k"), call.array("v")},
                                     call.scalar("normalize", false), call.scalar("eps", 1e-12),
                                     {call.if_given("numerator"), call.if_given("denominator")},
                                     return_state, true);
    return on.result({{"out", r.out},
                      {"denominators", r.denominators},
                      {"numerator", r.numerator},
                      {"denominator", r.denominator}});
}

emulated::Result run_based_backward(const emulated::Call& call) {
    const Backend<Array> on(call);
    std::vector<bool> needs;
    for (const char* name : {"needs_q", "needs_k", "needs_v", "needs_state"}) {
        needs.push_back(call.scalar(name, true));
    }
    const auto [dq, dk, dv, numerator, denominator] = based_backward_body<Array>(
        on, call.array("grad_out"),
        {call.if_given("grad_numerator"), call.if_given("grad_denominator")},
        {call.array("q"), call.array("k"), call.array("v")},
        {call.array("out"), call.array("denominators")}, call.scalar("normalize", false),
        {call.if_given("numerator"), call.if_given("denominator")}, needs);
    return on.result({{"dq", dq},
                      {"dk", dk},
                      {"dv", dv},
                      {"numerator", numerator},
                      {"denominator", denominator}});
}

// It changes the state in place.
emulated::Result run_based_decode(const emulated::Call& call) {
    const Backend<Array> on(call);
    Array numerator = call.array("numerator"), denominator = call.array("denominator");
    const Array out =
        based_decode_body(on, call.array("q"), call.array("k"), call.array("v"), numerator,
                          denominator, call.scalar("normalize", false), call.scalar("eps", 1e-12));
    return on.result({{"out", out}});
}

const bool registered = emulated::register_run("based", &run_based) &&
                        emulated::register_run("based_backward", &run_based_backward) &&
                        emulated::register_run("based_decode", &run_based_decode);

}  // namespace
}  // namespace thunderkittens::linear_attention
