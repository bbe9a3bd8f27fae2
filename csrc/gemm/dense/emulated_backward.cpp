// gemm_backward on the emulator, as gemm_backward.cpp does it on CUDA tensors.
#include "csrc/common/emulated.h"
#include "csrc/gemm/dense/gemm_backward.h"

namespace thunderkittens::gemm_backward {
namespace {

using emulated::Array;

emulated::Result run(const emulated::Call& call) {
    const Array &grad = call.array("grad"), &z = call.array("z");
    TK_CHECK(grad.dims() == 2 && z.dims() == 2 && z.size[0] == grad.size[0] &&
                 z.size[1] == 2 * grad.size[1] && z.dtype == grad.dtype,
             "tk.gemm_backward: grad must be (M, N) and z (M, 2 N)");
    const int64_t columns = grad.size[1];
    const Problem problem{.rows = grad.size[0],
                          .columns = columns,
                          .dtype = grad.dtype,
                          .activation = call.scalar("activation", Activation::silu),
                          .gate = call.scalar("gate", Gate::blocked)};
    const std::string reason = unsupported(problem, call.device);
    TK_CHECK(reason.empty(), "tk.gemm_backward: ", reason);
    emulated::Result result;
    Array& out = result.arrays["out"] = emulated::allocate(z.size, z.dtype);
    if (out.elements() == 0) return result;
    const Config config = choose(problem, call.device);
    emulated::Launch scope("gemm_backward " + kernel_name(config));
    scope.may_read("grad", grad);
    scope.may_read("z", z);
    scope.may_write("out", out);
    const Params params = params_of(problem, grad.data, grad.stride[0], z.data, out.data);
    TK_CHECK(launch_choice(config, params, nullptr), "tk.gemm_backward: no kernel ",
             kernel_name(config));
    result.choice = detail::fields_of(config);
    result.choice.emplace("kernel", kernel_name(config));
    return result;
}

const bool registered = emulated::register_run("gemm_backward", &run);

}  // namespace
}  // namespace thunderkittens::gemm_backward
