// gemm on the emulator, as gemm.cpp does it on CUDA tensors. `residual` and `out` may be given;
// with `keep`, z comes back as `aux`.
#include "csrc/common/emulated.h"
#include "csrc/gemm/common/emulated_operands.h"
#include "csrc/gemm/dense/dispatch.h"

namespace thunderkittens::gemm {
namespace {

using emulated::Array;
using emulated::Operand;
using emulated::operand;

Operand along_k(Array b) {
    const std::size_t dims = b.size.size();
    std::swap(b.size[dims - 2], b.size[dims - 1]);
    std::swap(b.stride[dims - 2], b.stride[dims - 1]);
    Operand result{.array = emulated::copy_for_tensor_map(b), .swapped = true};
    result.view = result.array.view();
    return result;
}
Operand zeros(DType dtype, bool swapped) {
    Operand result{.array = emulated::allocate({8}, dtype), .swapped = swapped};
    std::memset(result.array.data, 0, 16);
    result.view = result.array.view();
    return result;
}

emulated::Result run(const emulated::Call& call) {
    const Array &a = call.array("a"), &b = call.array("b");
    const Array* bias = call.optional("bias");
    TK_CHECK((a.dims() == 2 || a.dims() == 3) && (b.dims() == 2 || b.dims() == a.dims()),
             "tk.gemm: a and b must have 2 or 3 dimensions");
    TK_CHECK(a.size.back() == b.size[b.size.size() - 2] &&
                 (b.dims() == 2 || b.size[0] == a.size[0]) && a.dtype == b.dtype,
             "tk.gemm: a ", tuple_text(a.size), " and b ", tuple_text(b.size), " do not match");
    TK_CHECK(a.dtype != DType::fp32, "tk.gemm: operands must be bf16 or fp16");
    TK_CHECK(
        !bias || (bias->dims() == 1 && bias->size[0] == b.size.back() && bias->dtype == a.dtype),
        "tk.gemm: bias must have one value per column of b");
    const DType out_dtype = call.scalar("out_dtype", a.dtype);
    const int64_t batch = a.dims() == 3 ? a.size[0] : 1;
    const int64_t m = a.size[a.size.size() - 2], n = b.size.back();
    const auto activation = static_cast<Activation>(call.scalar("activation", int64_t{0}));
    const auto gate = static_cast<Gate>(call.scalar("gate", int64_t{0}));
    TK_CHECK(gate == Gate::none || n % 2 == 0, "tk.gemm: a gate needs an even number of columns");
    const int64_t out_n = gate == Gate::none ? n : n / 2;
    const auto allocate = [&](int64_t columns) {
        return a.dims() == 3 ? emulated::allocate({batch, m, columns}, out_dtype)
                             : emulated::allocate({m, columns}, out_dtype);
    };
    Array out = allocate(out_n), aux;
    if (const Array* given = call.optional("out")) {
        TK_CHECK(given->size == out.size && given->dtype == out_dtype &&
                     (out_n <= 1 || given->stride.back() == 1),
                 "tk.gemm: out must have the shape and dtype of the result, and adjacent elements "
                 "in its last dimension");
        // Memory is an input or an output, from its first byte to the last.
        const auto apart = [&](const Array& x) {
            return given->data + given->extent() <= x.data || x.data + x.extent() <= given->data;
        };
        if (apart(a) && apart(b)) out = *given;
    }
    const bool keep = call.scalar("keep", false);
    if (keep) aux = allocate(n);
    std::optional<Array> residual;
    if (const Array* given = call.optional("residual")) {
        TK_CHECK(given->size == out.size && given->dtype == out_dtype,
                 "tk.gemm: residual must have the shape and dtype of the result");
        residual = *given;
    }
    emulated::Result result;
    result.arrays["out"] = out;
    if (keep) result.arrays["aux"] = aux;
    if (out.elements() == 0) return result;

    const bool nothing = a.size.back() == 0;
    const int64_t k = nothing ? 8 : a.size.back();
    const Operand left = nothing ? zeros(a.dtype, false) : operand(a);
    Operand right = nothing ? zeros(a.dtype, true) : operand(b);
    if (gate == Gate::blocked && !right.swapped && out_n % 8 != 0) right = along_k(b);
    std::optional<Array> row;
    if (bias) row = n > 1 && bias->stride[0] != 1 ? emulated::copy_for_tensor_map(*bias) : *bias;
    const Problem problem{
        .m = m,
        .n = n,
        .k = k,
        .batch = batch,
        .dtype = a.dtype,
        .out_dtype = out_dtype,
        .a_m_major = left.swapped,
        .b_n_major = !right.swapped,
        .gate = gate,
        .fused = residual || activation != Activation::none || gate != Gate::none || keep};
    if (const std::string reason = unsupported(problem, call.device); !reason.empty()) {
        throw std::runtime_error(concat("tk.gemm: ", reason));
    }
    Choice choice = choose(problem, call.device);
    emulated::force(choice, call);
    if (residual) {
        const bool adjacent = out_n <= 1 || residual->stride.back() == 1;
        const bool readable = choice.config.swap_ab
                                  ? adjacent
                                  : fits_tensor_map(residual->view(), size_in_bytes(out_dtype));
        if (!readable) residual = emulated::copy_for_tensor_map(*residual);
    }
    const int splits = choice.schedule.splits;
    choice.schedule.blocks = (choice.schedule.blocks + splits - 1) / splits * splits;
    const Array memory = emulated::allocate({workspace_bytes(choice, m, n) / 4}, DType::fp32);
    const Workspace workspace{memory.data, emulated::recorded(new_epoch())};
    const View out_view = out.view(), residual_view = residual ? residual->view() : View{};
    const Epilogue epilogue{.bias = row ? row->data : nullptr,
                            .residual = residual ? residual->data : nullptr,
                            .aux = keep ? aux.data : nullptr,
                            .residual_stride = residual_view.stride[2],
                            .residual_batch_stride = residual_view.stride[1],
                            .alpha = static_cast<float>(call.scalar("alpha", 1.0)),
                            .beta = static_cast<float>(call.scalar("beta", 1.0)),
                            .activation = activation,
                            .gate = gate};
    const Params params{.a = left.view.data,
                        .b = right.view.data,
                        .out = out.data,
                        .m = m,
                        .n = n,
                        .k = k,
                        .batch = batch,
                        .a_stride = nothing ? 0 : left.stride(),
                        .a_batch_stride = nothing ? 0 : left.batch_stride(),
                        .b_stride = nothing ? 0 : right.stride(),
                        .b_batch_stride = nothing ? 0 : right.batch_stride(),
                        .out_stride = out_view.stride[2],
                        .out_batch_stride = out_view.stride[1],
                        .out_dtype = out_dtype,
                        .epilogue = epilogue,
                        .schedule = choice.schedule};
    const std::string name = kernel_name(choice.config, params);
    emulated::Launch scope("gemm " + name);
    scope.may_read("a", left.array);
    scope.may_read("b", right.array);
    if (row) scope.may_read("bias", *row);
    if (residual && residual->data != out.data) scope.may_read("residual", *residual);
    scope.may_write("out", out);
    scope.may_write("workspace", memory);
    if (keep) scope.may_write("aux", aux);
    TK_CHECK(launch_choice(choice.config, params, workspace, nullptr), "tk.gemm: no kernel ", name);
    if (!runs_itself(choice.config, params)) {
        choice = {fallback_config(choice.config), fallback_params(params).schedule};
    }
    result.choice = detail::fields_of(choice);
    result.choice.emplace("kernel", name);
    return result;
}

const bool registered = emulated::register_run("gemm", &run);

}  // namespace
}  // namespace thunderkittens::gemm
