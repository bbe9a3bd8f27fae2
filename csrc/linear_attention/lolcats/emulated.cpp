// The ops of LoLCATS on the emulator. Optional arrays are absent.
#include "csrc/common/emulated.h"
#include "csrc/linear_attention/lolcats/lolcats_backward_body.h"
#include "csrc/linear_attention/lolcats/lolcats_body.h"
#include "csrc/linear_attention/lolcats/lolcats_decode_body.h"

namespace thunderkittens::linear_attention {
namespace {

using emulated::Array;

std::array<std::optional<Array>, 5> state_of(const emulated::Call& call) {
    return {call.if_given("numerator"), call.if_given("denominator"), call.if_given("keys"),
            call.if_given("values"), call.if_given("lengths")};
}

emulated::Result run_forward(const emulated::Call& call) {
    const Backend<Array> on(call);
    const auto r =
        lolcats_body<Array>(on,
                            {call.array("q"), call.array("k"), call.array("v"), call.array("q_map"),
                             call.array("k_map"), call.array("alpha"), call.array("beta")},
                            state_of(call), call.scalar("return_state", false), true);
    return on.result({{"out", r.out},
                      {"numerator", r.numerator},
                      {"denominator", r.denominator},
                      {"keys", r.keys},
                      {"values", r.values},
                      {"lengths", r.lengths},
                      {"maxima", r.maxima},
                      {"denominators", r.denominators}});
}

emulated::Result run_backward(const emulated::Call& call) {
    const Backend<Array> on(call);
    std::vector<bool> needs;
    for (const char* name : {"needs_q", "needs_k", "needs_v", "needs_q_map", "needs_k_map",
                             "needs_alpha", "needs_beta"}) {
        needs.push_back(call.scalar(name, true));
    }
    const auto [dq, dk, dv, dq_map, dk_map, grad_alpha, grad_beta] = lolcats_backward_body<Array>(
        on, call.array("grad_out"),
        {call.array("q"), call.array("k"), call.array("v"), call.array("q_map"),
         call.array("k_map"), call.array("alpha"), call.array("beta")},
        {call.array("out"), call.array("maxima"), call.array("denominators")}, state_of(call),
        needs);
    return on.result({{"dq", dq},
                      {"dk", dk},
                      {"dv", dv},
                      {"dq_map", dq_map},
                      {"dk_map", dk_map},
                      {"grad_alpha", grad_alpha},
                      {"grad_beta", grad_beta}});
}

// The state is copied, and returned.
emulated::Result run_decode(const emulated::Call& call) {
    const Backend<Array> on(call);
    const auto given = state_of(call);
    std::array<Array, 5> state;
    for (std::size_t i = 0; i < state.size(); ++i) {
        state[i] = empty(given[i].value().sizes(), given[i]->dtype, *given[i]);
        copy_(state[i], *given[i]);
    }
    const Array out = lolcats_decode_body<Array>(
        on,
        {call.array("q"), call.array("k"), call.array("v"), call.array("q_map"),
         call.array("k_map"), call.array("alpha"), call.array("beta")},
        state, call.scalar("sliding", false));
    return on.result({{"out", out},
                      {"numerator", state[0]},
                      {"denominator", state[1]},
                      {"keys", state[2]},
                      {"values", state[3]},
                      {"lengths", state[4]}});
}

const bool registered = emulated::register_run("lolcats", &run_forward) &&
                        emulated::register_run("lolcats_backward", &run_backward) &&
                        emulated::register_run("lolcats_decode", &run_decode);

}  // namespace
}  // namespace thunderkittens::linear_attention
