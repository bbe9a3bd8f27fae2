// The gradient of the gated delta rule on the emulator. Optional arrays are absent.
#include "csrc/common/emulated.h"
#include "csrc/recurrent/gated_delta_rule_backward/gated_delta_rule_backward_body.h"

namespace thunderkittens::recurrent {
namespace {

using emulated::Array;

emulated::Result run_gated_delta_rule_backward_op(const emulated::Call& call) {
    const Backend<Array> on(call);
    const Array q = call.array("q"), k = call.array("k"), v = call.array("v"), g = call.array("g"),
                beta = call.array("beta");
    const auto initial = call.if_given("initial_state"), A_log = call.if_given("A_log"),
               dt_bias = call.if_given("dt_bias"), edges = call.if_given("cu_seqlens");
    std::vector<bool> needs;
    for (const char* name : {"needs_q", "needs_k", "needs_v", "needs_g", "needs_beta",
                             "needs_initial_state", "needs_A_log", "needs_dt_bias"}) {
        needs.push_back(call.scalar(name, true));
    }
    const DeltaRuleOptions options{call.scalar("scale", 1.0), call.scalar("qk_l2norm", false),
                                   call.scalar("beta_sigmoid", false),
                                   call.scalar("allow_neg_eigval", false),
                                   call.scalar("state_v_first", false)};
    const auto grads = gated_delta_rule_backward_body<Array>(
        on, call.array("grad_out"), call.if_given("grad_state"),
        {q, k, v, g, beta, initial, A_log, dt_bias, edges}, options, needs);
    return on.result({{"dq", grads[DQ]},
                      {"dk", grads[DK]},
                      {"dv", grads[DV]},
                      {"dg", grads[DG]},
                      {"dbeta", grads[DBETA]},
                      {"dinitial", grads[DINITIAL]},
                      {"dA_log", grads[DA_LOG]},
                      {"ddt_bias", grads[DDT_BIAS]}});
}

const bool registered =
    emulated::register_run("gated_delta_rule_backward", &run_gated_delta_rule_backward_op);

}  // namespace
}  // namespace thunderkittens::recurrent
