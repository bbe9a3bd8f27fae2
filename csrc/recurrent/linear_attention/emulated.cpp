// The ops linear_attention and linear_attention_decode on the emulator. Optional arrays are absent.
#include "csrc/common/emulated.h"
#include "csrc/recurrent/linear_attention/linear_attention_body.h"
#include "csrc/recurrent/linear_attention/linear_attention_decode_body.h"

namespace thunderkittens::recurrent {
namespace {

using emulated::Array;

emulated::Result run_linear_attention(const emulated::Call& call) {
    const Backend<Array> on(call);
    const auto decay = call.if_given("decay"), g = call.if_given("g"),
               initial_state = call.if_given("initial_state"),
               cu_seqlens = call.if_given("cu_seqlens");
    const Array q = call.array("q"), k = call.array("k"), v = call.array("v");
    const auto r = linear_attention_body<Array>(
        on, {q, k, v, decay, g, initial_state, cu_seqlens}, call.scalar("scale", 1.0),
        call.scalar("state_v_first", false), call.scalar("return_state", false));
    return on.result(results_of(r));
}

// It changes the state in place.
emulated::Result run_linear_attention_decode(const emulated::Call& call) {
    const Backend<Array> on(call);
    const auto decay = call.if_given("decay"), g = call.if_given("g"),
               state_indices = call.if_given("state_indices");
    const Array q = call.array("q"), k = call.array("k"), v = call.array("v");
    Array state = call.array("state");
    const Array out = linear_attention_decode_body<Array>(on, {q, k, v, decay, g, state_indices},
                                                          state, call.scalar("scale", 1.0),
                                                          call.scalar("state_v_first", false));
    return on.result({{"out", out}});
}

const bool registered =
    emulated::register_run("linear_attention", &run_linear_attention) &&
    emulated::register_run("linear_attention_decode", &run_linear_attention_decode);

}  // namespace
}  // namespace thunderkittens::recurrent
