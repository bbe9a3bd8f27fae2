// The gradients of the recurrent ops on the emulator. Optional arrays are absent; a gradient that
// is not wanted has a flag that says so.
#include <limits>
#include <string>

#include "csrc/common/emulated.h"
#include "csrc/recurrent/gradient/linear_attention_backward_body.h"
#include "csrc/recurrent/gradient/ssd_backward_body.h"

namespace thunderkittens::recurrent {
namespace {

using emulated::Array;

std::vector<bool> needs_of(const emulated::Call& call, int count) {
    std::vector<bool> needs;
    for (int i = 0; i < count; ++i)
        needs.push_back(call.scalar(("needs_" + std::to_string(i)).c_str(), true));
    return needs;
}

emulated::Result run_ssd_backward(const emulated::Call& call) {
    const Backend<Array> on(call);
    const auto grad_state = call.if_given("grad_state"), D = call.if_given("D"),
               z = call.if_given("z"), dt_bias = call.if_given("dt_bias"),
               initial_state = call.if_given("initial_state"),
               cu_seqlens = call.if_given("cu_seqlens");
    const Array x = call.array("x"), dt = call.array("dt"), A = call.array("A"),
                B = call.array("B"), C = call.array("C");
    const auto r =
        ssd_backward_body<Array>(on, call.array("grad_out"), grad_state,
                                 {x, dt, A, B, C, D, z, dt_bias, initial_state, cu_seqlens},
                                 {call.scalar("dt_softplus", false), call.scalar("dt_min", 0.0),
                                  call.scalar("dt_max", std::numeric_limits<double>::infinity())},
                                 needs_of(call, 9));
    return on.result({{"grad_x", r[0]},
                      {"grad_dt", r[1]},
                      {"grad_A", r[2]},
                      {"grad_B", r[3]},
                      {"grad_C", r[4]},
                      {"grad_D", r[5]},
                      {"grad_z", r[6]},
                      {"grad_dt_bias", r[7]},
                      {"grad_initial_state", r[8]}});
}

emulated::Result run_linear_attention_backward(const emulated::Call& call) {
    const Backend<Array> on(call);
    const auto grad_state = call.if_given("grad_state"), decay = call.if_given("decay"),
               g = call.if_given("g"), initial_state = call.if_given("initial_state"),
               cu_seqlens = call.if_given("cu_seqlens");
    const Array q = call.array("q"), k = call.array("k"), v = call.array("v");
    const auto r = linear_attention_backward_body<Array>(
        on, call.array("grad_out"), grad_state, {q, k, v, decay, g, initial_state, cu_seqlens},
        call.scalar("scale", 1.0), call.scalar("state_v_first", false), needs_of(call, 6));
    return on.result({{"grad_q", r[0]},
                      {"grad_k", r[1]},
                      {"grad_v", r[2]},
                      {"grad_decay", r[3]},
                      {"grad_g", r[4]},
                      {"grad_initial_state", r[5]}});
}

const bool registered =
    emulated::register_run("ssd_backward", &run_ssd_backward) &&
    emulated::register_run("linear_attention_backward", &run_linear_attention_backward);

}  // namespace
}  // namespace thunderkittens::recurrent
