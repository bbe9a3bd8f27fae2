// thunderkittens::grouped_gemm and its twin without autograd on CUDA: checks, copies of what TMA
// cannot read, allocation, choice, launch.
#include "csrc/gemm/grouped/grouped_gemm.h"

#include "csrc/common/forced.h"
#include "csrc/common/tensor.h"
#include "csrc/gemm/common/operands.h"

namespace thunderkittens::grouped_gemm {
namespace {

constexpr const char* OP = "thunderkittens::grouped_gemm";

using gemm::Operand;
using gemm::operand;

// The groups divide the dimension that only one of three-dimensional operand, or none, has.
Grouped check_shapes(const Tensor& a, const Tensor& b, const Tensor& offs) {
    check_dims(OP, "a", a, {2, 3});
    check_dims(OP, "b", b, {2, 3});
    TK_CHECK((a.dim() == 2 || b.dim() == 2) && a.size(-1) == b.size(-2), OP, ": a has shape ",
             shape_text(a), " and b has shape ", shape_text(b),
             "; expected (M, K) @ (E, K, N), (E, M, K) @ (K, N) or (M, K) @ (K, N)");
    const Grouped grouped = b.dim() == 3   ? Grouped::rows
                            : a.dim() == 3 ? Grouped::columns
                                           : Grouped::k;
    const bool counted =
        grouped == Grouped::k || offs.numel() == (grouped == Grouped::rows ? b.size(0) : a.size(0));
    TK_CHECK(offs.dim() == 1 && counted, OP, ": offs has shape ", shape_text(offs),
             "; it must be (E,), the end of each group");
    return grouped;
}

Tensor grouped_gemm(const Tensor& a, const Tensor& b, const Tensor& given_offs) {
    check_cuda(OP, "a", a);
    check_same_device(OP, "b", b, "a", a);
    check_same_device(OP, "offs", given_offs, "a", a);
    const DType dtype = check_dtype(OP, "a", a, {DType::bf16, DType::fp16});
    check_same_dtype(OP, "b", b, "a", a);
    check_dtype(OP, "offs", given_offs, {DType::int32});
    const Grouped grouped = check_shapes(a, b, given_offs);
    const int64_t m = a.size(-2), n = b.size(-1), k = a.size(-1), groups = given_offs.size(0);

    const DeviceGuard guard(a.get_device_index());
    Tensor out = grouped == Grouped::k ? empty({groups, m, n}, a.scalar_type(), a)
                                       : empty({m, n}, a.scalar_type(), a);
    if (out.numel() == 0) return out;
    if (groups == 0 || k == 0) {
        torch::stable::zero_(out);
        return out;
    }
    const Tensor offs = packed(given_offs);
    const Operand left = operand(a), right = operand(b);
    const Problem problem{.m = m,
                          .n = n,
                          .k = k,
                          .groups = groups,
                          .grouped = static_cast<int>(grouped),
                          .dtype = dtype,
                          .a_m_major = left.swapped,
                          .b_n_major = !right.swapped};
    const DeviceProperties& device = device_properties(a.get_device_index());
    if (const std::string reason = unsupported(problem, device); !reason.empty()) {
        throw std::runtime_error(concat(OP, ": ", reason));
    }
    Choice choice = choose(problem, device);
    force("grouped_gemm", choice);
    const Params params{.product = {.a = left.view.data,
                                    .b = right.view.data,
                                    .out = out.data_ptr(),
                                    .m = m,
                                    .n = n,
                                    .k = k,
                                    .batch = groups,
                                    .a_stride = left.stride(),
                                    .a_batch_stride = left.batch_stride(),
                                    .b_stride = right.stride(),
                                    .b_batch_stride = right.batch_stride(),
                                    .out_stride = n,
                                    .out_batch_stride = grouped == Grouped::k ? m * n : 0,
                                    .out_dtype = dtype,
                                    .schedule = {.blocks = choice.blocks}},
                        .offs = static_cast<const int32_t*>(offs.data_ptr()),
                        .grouped = grouped,
                        .raster_group = choice.raster_group,
                        .two_widths = choice.two_widths};
    TK_CHECK(launch_any(choice.config, params, current_stream(a)), OP, ": no kernel ",
             kernel_name(choice));
    return out;
}

}  // namespace
}  // namespace thunderkittens::grouped_gemm

STABLE_TORCH_LIBRARY_IMPL(thunderkittens, CUDA, m) {
    m.impl("grouped_gemm", TORCH_BOX(&thunderkittens::grouped_gemm::grouped_gemm));
    m.impl("grouped_gemm_forward", TORCH_BOX(&thunderkittens::grouped_gemm::grouped_gemm));
}
