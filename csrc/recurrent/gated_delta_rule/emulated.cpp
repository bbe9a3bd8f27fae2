// The ops of the gated delta rule on the emulator. Optional arrays are absent.
#include <map>
#include <string>

#include "csrc/common/emulated.h"
#include "csrc/recurrent/gated_delta_rule/gated_delta_rule_body.h"
#include "csrc/recurrent/gated_delta_rule/gated_delta_rule_decode_body.h"

namespace thunderkittens::recurrent {
namespace {

using emulated::Array;

DeltaRuleOptions options_of(const emulated::Call& call) {
    return {call.scalar("scale", 1.0), call.scalar("qk_l2norm", false),
            call.scalar("beta_sigmoid", false), call.scalar("allow_neg_eigval", false),
            call.scalar("state_v_first", false)};
}

emulated::Result run_gated_delta_rule_op(const emulated::Call& call) {
    const Backend<Array> on(call);
    const Array q = call.array("q"), k = call.array("k"), v = call.array("v"), g = call.array("g"),
                beta = call.array("beta");
    const auto initial = call.if_given("initial_state"), A_log = call.if_given("A_log"),
               dt_bias = call.if_given("dt_bias"), edges = call.if_given("cu_seqlens");
    const auto r =
        gated_delta_rule_body<Array>(on, {q, k, v, g, beta, initial, A_log, dt_bias, edges},
                                     options_of(call), call.scalar("return_state", false));
    std::map<std::string, Array> results{{"out", r.out}};
    if (r.state) results.emplace("state", *r.state);
    return on.result(std::move(results));
}

// It changes the state in place.
emulated::Result run_gated_delta_rule_decode_op(const emulated::Call& call) {
    const Backend<Array> on(call);
    const Array q = call.array("q"), k = call.array("k"), v = call.array("v"), g = call.array("g"),
                beta = call.array("beta");
    Array state = call.array("state");
    const auto none = std::optional<Array>(), A_log = call.if_given("A_log"),
               dt_bias = call.if_given("dt_bias");
    const Array out = gated_delta_rule_decode_body<Array>(
        on, {q, k, v, g, beta, none, A_log, dt_bias, none}, state, call.if_given("state_indices"),
        options_of(call));
    return on.result({{"out", out}});
}

const bool registered =
    emulated::register_run("gated_delta_rule", &run_gated_delta_rule_op) &&
    emulated::register_run("gated_delta_rule_decode", &run_gated_delta_rule_decode_op);

}  // namespace
}  // namespace thunderkittens::recurrent
