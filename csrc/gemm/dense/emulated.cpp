// gemm on the emulator. `residual` and `out` may be given; with `keep`, z comes back as `aux`.
#include "csrc/common/emulated.h"
#include "csrc/gemm/dense/gemm_body.h"

namespace thunderkittens::gemm {
namespace {

using emulated::Array;

// Memory is an input or an output, from its first byte to the last.
bool are_apart(const Array& x, const Array& y) {
    return y.data + y.extent() <= x.data || x.data + x.extent() <= y.data;
}

emulated::Result run(const emulated::Call& call) {
    const Backend<Array> on(call);
    const Array &a = call.array("a"), &b = call.array("b");
    Options<Array> options{.residual = call.if_given("residual"),
                           .activation = call.scalar("activation", int64_t{0}),
                           .gate = call.scalar("gate", int64_t{0}),
                           .alpha = call.scalar("alpha", 1.0),
                           .beta = call.scalar("beta", 1.0),
                           .store_aux = call.scalar("keep", false)};
    const Array* out = call.optional("out");
    if (out && are_apart(a, *out) && are_apart(b, *out)) options.out = *out;
    const Outputs<Array> result = gemm_body(
        on, a, b, call.if_given("bias"), std::optional(call.scalar("out_dtype", a.dtype)), options);
    std::map<std::string, Array> arrays{{"out", result.out}};
    if (result.aux) arrays["aux"] = *result.aux;
    return on.result(std::move(arrays));
}

const bool registered = emulated::register_run("gemm", &run);

}  // namespace
}  // namespace thunderkittens::gemm
