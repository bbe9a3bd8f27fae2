// The body of grouped_gemm, on any back end: checks, copies of what TMA cannot read, allocation,
// choice, launch. Host C++ without torch.
#pragma once

#include "csrc/common/accesses.h"
#include "csrc/gemm/common/operands.h"
#include "csrc/gemm/grouped/dispatch.h"

namespace thunderkittens::grouped_gemm {

constexpr const char* OP = "thunderkittens::grouped_gemm";

using gemm::operand;

// The groups divide the dimension that only one of three-dimensional operand, or none, has.
template <class Tensor>
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

// An operand in the order that a kernel reads, by a copy if it lies in the other one.
template <class Tensor>
gemm::Operand<Tensor> in_order(const Tensor& tensor, bool swapped) {
    const auto in_place = gemm::operand_in_place(tensor);
    if (in_place.swapped == swapped) return gemm::readable(in_place);
    gemm::Operand<Tensor> copy{
        .tensor = copy_for_tensor_map(swapped ? transpose(tensor, -2, -1) : tensor),
        .swapped = swapped};
    copy.view = as_4d(copy.tensor);
    return copy;
}

template <class Tensor>
Tensor grouped_gemm_body(const Backend<Tensor>& on, const Tensor& a, const Tensor& b,
                         const Tensor& given_offs) {
    check_cuda(OP, "a", a);
    check_same_device(OP, "b", b, "a", a);
    check_same_device(OP, "offs", given_offs, "a", a);
    const DType dtype = check_dtype(OP, "a", a, {DType::bf16, DType::fp16});
    check_same_dtype(OP, "b", b, "a", a);
    check_dtype(OP, "offs", given_offs, {DType::int32});
    const Grouped grouped = check_shapes(a, b, given_offs);
    const int64_t m = a.size(-2), n = b.size(-1), k = a.size(-1), groups = given_offs.size(0);

    const auto guard = on.guard(a);
    Tensor out = grouped == Grouped::k ? empty({groups, m, n}, a.scalar_type(), a)
                                       : empty({m, n}, a.scalar_type(), a);
    if (out.numel() == 0) return out;
    if (groups == 0 || k == 0) return zeroed(out);
    const Tensor offs = packed(given_offs);
    const DeviceProperties& device = on.device(a);
    const bool native = runs_native(device);
    const auto right_in_place = gemm::operand_in_place(b);
    const Order order = native ? Order{} : portable_order(grouped, !right_in_place.swapped);
    const auto left = native ? operand(a) : in_order(a, order.a_m_major);
    const auto right = native ? gemm::readable(right_in_place) : in_order(b, !order.b_n_major);
    align(on, left, a, right, b);
    const Problem problem{.m = m,
                          .n = n,
                          .k = k,
                          .groups = groups,
                          .grouped = static_cast<int>(grouped),
                          .dtype = dtype,
                          .a_m_major = left.swapped,
                          .b_n_major = !right.swapped};
    check_supported(OP, unsupported(problem, device));
    const Choice choice = on.chosen("grouped_gemm", choose(problem, device));
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
                        .offs = data_as<const int32_t>(offs),
                        .grouped = grouped,
                        .raster_group = choice.raster_group,
                        .two_widths = choice.two_widths};
    auto launch = on.launch("grouped_gemm", choice, a);
    reads(launch, "a", left.tensor, "b", right.tensor, "offs", offs);
    launch.may_write("out", out);
    TK_CHECK(launch_choice(choice, params, launch.stream), OP, ": no kernel ", kernel_name(choice));
    return out;
}

}  // namespace thunderkittens::grouped_gemm
