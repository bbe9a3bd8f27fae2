// The ops of convolutions on the emulator. Optional arrays are absent.
#include <map>
#include <string>

#include "csrc/common/emulated.h"
#include "csrc/convolution/causal_conv1d_body.h"
#include "csrc/convolution/causal_conv1d_update_body.h"

namespace thunderkittens::convolution {
namespace {

using emulated::Array;

emulated::Result run_conv(const emulated::Call& call) {
    const Backend<Array> on(call);
    const auto r =
        causal_conv1d_body<Array>(on, call.array("x"), call.array("weight"), call.if_given("bias"),
                                  call.scalar("activation", int64_t{0}), call.if_given("state"),
                                  call.if_given("cu_seqlens"), call.scalar("return_state", false));
    std::map<std::string, Array> results{{"out", r.out}};
    if (r.state) results.emplace("state", *r.state);
    return on.result(std::move(results));
}

emulated::Result run_gradient(const emulated::Call& call) {
    const Backend<Array> on(call);
    std::vector<bool> needs;
    for (const char* name : {"needs_x", "needs_weight", "needs_bias", "needs_state"}) {
        needs.push_back(call.scalar(name, true));
    }
    const auto [x, weight, bias, state] = causal_conv1d_backward_body<Array>(
        on, call.array("grad_out"), call.if_given("grad_state"), call.array("x"),
        call.array("weight"), call.if_given("bias"), call.scalar("activation", int64_t{0}),
        call.if_given("state"), call.if_given("cu_seqlens"), needs);
    return on.result(
        {{"grad_x", x}, {"grad_weight", weight}, {"grad_bias", bias}, {"grad_state", state}});
}

// It changes the state in place.
emulated::Result run_update(const emulated::Call& call) {
    const Backend<Array> on(call);
    Array state = call.array("state");
    const Array out = causal_conv1d_update_body<Array>(
        on, call.array("x"), state, call.array("weight"), call.if_given("bias"),
        call.scalar("activation", int64_t{0}), call.if_given("slots"));
    return on.result({{"out", out}});
}

const bool registered = emulated::register_run("causal_conv1d", &run_conv) &&
                        emulated::register_run("causal_conv1d_backward", &run_gradient) &&
                        emulated::register_run("causal_conv1d_update", &run_update);

}  // namespace
}  // namespace thunderkittens::convolution
