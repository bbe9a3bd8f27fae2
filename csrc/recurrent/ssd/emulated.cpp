// The ops ssd and ssd_decode on the emulator. Optional arrays are absent.
#include <limits>

#include "csrc/common/emulated.h"
#include "csrc/recurrent/ssd/ssd_body.h"
#include "csrc/recurrent/ssd/ssd_decode_body.h"

namespace thunderkittens::recurrent {
namespace {

using emulated::Array;

StepOptions options_of(const emulated::Call& call) {
    return {call.scalar("dt_softplus", false), call.scalar("dt_min", 0.0),
            call.scalar("dt_max", std::numeric_limits<double>::infinity())};
}

emulated::Result run_ssd(const emulated::Call& call) {
    const Backend<Array> on(call);
    const auto D = call.if_given("D"), z = call.if_given("z"), dt_bias = call.if_given("dt_bias"),
               initial_state = call.if_given("initial_state"),
               cu_seqlens = call.if_given("cu_seqlens");
    const Array x = call.array("x"), dt = call.array("dt"), A = call.array("A"),
                B = call.array("B"), C = call.array("C");
    const auto r = ssd_body<Array>(on, {x, dt, A, B, C, D, z, dt_bias, initial_state, cu_seqlens},
                                   options_of(call), call.scalar("return_state", false));
    return on.result(results_of(r));
}

// It changes the state in place.
emulated::Result run_ssd_decode(const emulated::Call& call) {
    const Backend<Array> on(call);
    const auto D = call.if_given("D"), z = call.if_given("z"), dt_bias = call.if_given("dt_bias"),
               state_indices = call.if_given("state_indices");
    const Array x = call.array("x"), dt = call.array("dt"), A = call.array("A"),
                B = call.array("B"), C = call.array("C");
    Array state = call.array("state");
    const Array out = ssd_decode_body<Array>(on, {x, dt, A, B, C, D, z, dt_bias, state_indices},
                                             state, options_of(call));
    return on.result({{"out", out}});
}

const bool registered = emulated::register_run("ssd", &run_ssd) &&
                        emulated::register_run("ssd_decode", &run_ssd_decode);

}  // namespace
}  // namespace thunderkittens::recurrent
