// The body of gemm_backward, on any back end: checks, allocation, launch. Host C++ without torch.
#pragma once

#include "csrc/common/backend.h"
#include "csrc/gemm/backward/gemm_backward.h"
#include "csrc/gemm/common/listed.h"

namespace thunderkittens::gemm_backward {

constexpr const char* OP = "thunderkittens::gemm_backward";

template <class Tensor>
Tensor gemm_backward_body(const Backend<Tensor>& on, const Tensor& grad_in, const Tensor& z_in,
                          int64_t activation, int64_t gate) {
    check_cuda(OP, "grad", grad_in);
    check_same_device(OP, "z", z_in, "grad", grad_in);
    check_same_dtype(OP, "z", z_in, "grad", grad_in);
    check_dims(OP, "grad", grad_in, {2, 3});
    TK_CHECK(z_in.dim() == grad_in.dim() && z_in.size(-1) == 2 * grad_in.size(-1) &&
                 z_in.size(-2) == grad_in.size(-2) &&
                 (z_in.dim() == 2 || z_in.size(0) == grad_in.size(0)),
             OP, ": z has shape ", shape_text(z_in), ", grad has shape ", shape_text(grad_in),
             "; z must have twice as many columns");
    const auto guard = on.guard(grad_in);
    const DeviceProperties& device = on.device(grad_in);
    const int64_t columns = grad_in.size(-1);
    const Problem problem{
        .rows = grad_in.numel() / std::max<int64_t>(columns, 1),
        .columns = columns,
        .dtype = Backend<Tensor>::dtype_of(grad_in.scalar_type()).value_or(DType::int32),
        .activation = static_cast<Activation>(activation),
        .gate = static_cast<Gate>(gate)};
    check_supported(OP, unsupported(problem, device));
    const Tensor out = empty(z_in.sizes(), z_in.scalar_type(), z_in);
    if (out.numel() == 0) return out;
    const bool in_place = grad_in.dim() == 2 && (columns == 1 || grad_in.stride(1) == 1);
    const Tensor grad = in_place ? grad_in : packed(grad_in);
    const Tensor z = packed(z_in);
    const Params params = params_of(problem, grad.data_ptr(), in_place ? grad.stride(0) : columns,
                                    z.data_ptr(), out.data_ptr());
    const Config config = on.chosen("gemm_backward", choose(problem, device));
    auto launch = on.launch("gemm_backward", config, grad);
    launch.may_read("grad", grad);
    launch.may_read("z", z);
    launch.may_write("out", out);
    const bool found = gemm::launch_listed<config_at, KERNELS>(config, [&]<Config c>() {
        if constexpr (!c.portable)
            gemm_backward::launch<c>(params, launch.stream);
        else if constexpr (BUILDS_PORTABLE)
            launch_portable<c>(params, launch.stream);
        return true;
    });
    TK_CHECK(found, OP, ": no kernel for ", name_of(problem.dtype));
    return out;
}

}  // namespace thunderkittens::gemm_backward
