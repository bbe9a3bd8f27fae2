// grouped_gemm on the emulator, as grouped_gemm.cpp does it on CUDA tensors.
#include "csrc/common/emulated.h"
#include "csrc/gemm/common/emulated_operands.h"
#include "csrc/gemm/grouped/grouped_gemm.h"

namespace thunderkittens::grouped_gemm {
namespace {

using emulated::Array;
using emulated::Operand;
using emulated::operand;

emulated::Result run(const emulated::Call& call) {
    const Array &a = call.array("a"), &b = call.array("b"), &offs = call.array("offs");
    TK_CHECK(a.dims() + b.dims() <= 5 && a.size.back() == b.size[b.size.size() - 2],
             "tk.grouped_gemm: a ", tuple_text(a.size), " and b ", tuple_text(b.size),
             " do not match");
    const Grouped grouped = b.dims() == 3   ? Grouped::rows
                            : a.dims() == 3 ? Grouped::columns
                                            : Grouped::k;
    const int64_t m = a.size[a.size.size() - 2], n = b.size.back(), k = a.size.back();
    const int64_t groups = offs.size[0];
    Array out = grouped == Grouped::k ? emulated::allocate({groups, m, n}, a.dtype)
                                      : emulated::allocate({m, n}, a.dtype);
    emulated::Result result;
    result.arrays["out"] = out;
    if (out.elements() == 0) return result;
    if (groups == 0 || k == 0) {
        std::memset(out.data, 0, static_cast<std::size_t>(out.extent()));
        return result;
    }
    const Operand left = operand(a), right = operand(b);
    const Problem problem{.m = m,
                          .n = n,
                          .k = k,
                          .groups = groups,
                          .grouped = static_cast<int>(grouped),
                          .dtype = a.dtype,
                          .a_m_major = left.swapped,
                          .b_n_major = !right.swapped};
    if (const std::string reason = unsupported(problem, call.device); !reason.empty()) {
        throw std::runtime_error(concat("tk.grouped_gemm: ", reason));
    }
    Choice choice = choose(problem, call.device);
    emulated::force(choice, call);
    const Params params{.product = {.a = left.view.data,
                                    .b = right.view.data,
                                    .out = out.data,
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
                                    .out_dtype = a.dtype,
                                    .schedule = {.blocks = choice.blocks}},
                        .offs = reinterpret_cast<const int32_t*>(offs.data),
                        .grouped = grouped,
                        .raster_group = choice.raster_group,
                        .two_widths = choice.two_widths};
    emulated::Launch scope("grouped_gemm " + kernel_name(choice));
    scope.may_read("a", left.array);
    scope.may_read("b", right.array);
    scope.may_read("offs", offs);
    scope.may_write("out", out);
    TK_CHECK(launch_any(choice.config, params, nullptr), "tk.grouped_gemm: no kernel ",
             kernel_name(choice));
    result.choice = detail::fields_of(choice);
    result.choice.emplace("kernel", kernel_name(choice));
    return result;
}

const bool registered = emulated::register_run("grouped_gemm", &run);

}  // namespace
}  // namespace thunderkittens::grouped_gemm
