// The ops of the family on the emulator. Optional arrays are absent.
#include <map>
#include <string>

#include "csrc/common/emulated.h"
#include "csrc/norm/layer_norm_body.h"
#include "csrc/norm/rms_norm_body.h"

namespace thunderkittens::norm {
namespace {

using emulated::Array;

Options<Array> options_of(const emulated::Call& call) {
    return {.weight = call.if_given("weight"),
            .bias = call.if_given("bias"),
            .residual = call.if_given("residual"),
            .gate = call.if_given("gate"),
            .seed = call.if_given("seed"),
            .eps = call.scalar("eps", 0.0),
            .offset = call.scalar("weight_offset", 0.0),
            .dropout = call.scalar("dropout_p", 0.0),
            .gate_first = call.scalar("gate_first", false),
            .group_size = call.scalar("group_size", int64_t{0})};
}

emulated::Result results(const Backend<Array>& on, const Normalised<Array>& r) {
    std::map<std::string, Array> results{{"out", r.out}};
    if (r.sum) results.emplace("sum", *r.sum);
    return on.result(std::move(results));
}
emulated::Result results(const Backend<Array>& on, const Gradients<Array>& r) {
    return on.result(
        {{"x", r.x}, {"residual", r.residual}, {"weight", r.weight}, {"last", r.last}});
}
std::vector<bool> needs_of(const emulated::Call& call) {
    std::vector<bool> needs;
    for (const char* name : {"needs_x", "needs_residual", "needs_weight", "needs_last"}) {
        needs.push_back(call.scalar(name, true));
    }
    return needs;
}

emulated::Result run_rms_norm(const emulated::Call& call) {
    const Backend<Array> on(call);
    return results(on, rms_norm_body(on, call.array("x"), options_of(call)));
}
emulated::Result run_layer_norm(const emulated::Call& call) {
    const Backend<Array> on(call);
    return results(on, layer_norm_body(on, call.array("x"), options_of(call)));
}
emulated::Result run_rms_norm_backward(const emulated::Call& call) {
    const Backend<Array> on(call);
    return results(on, rms_norm_backward_body(on, call.array("grad_out"), call.if_given("grad_sum"),
                                              call.array("x"), options_of(call), needs_of(call)));
}
emulated::Result run_layer_norm_backward(const emulated::Call& call) {
    const Backend<Array> on(call);
    return results(on,
                   layer_norm_backward_body(on, call.array("grad_out"), call.if_given("grad_sum"),
                                            call.array("x"), options_of(call), needs_of(call)));
}

const bool registered = emulated::register_run("rms_norm", &run_rms_norm) &&
                        emulated::register_run("layer_norm", &run_layer_norm) &&
                        emulated::register_run("rms_norm_backward", &run_rms_norm_backward) &&
                        emulated::register_run("layer_norm_backward", &run_layer_norm_backward);

}  // namespace
}  // namespace thunderkittens::norm
