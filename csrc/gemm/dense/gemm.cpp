// thunderkittens::gemm and its twin without autograd, gemm_forward, on CUDA: checks, copies of what
// TMA cannot read, allocation, choice, launch. The overloads `fused` and `out` have a longer
// epilogue.
#include <tuple>

#include "csrc/common/forced.h"
#include "csrc/common/tensor.h"
#include "csrc/gemm/common/operands.h"
#include "csrc/gemm/dense/dispatch.h"

namespace thunderkittens::gemm {
namespace {

constexpr const char* OP = "thunderkittens::gemm";

// A copy of b with its columns adjacent along k. TMA reads rows from multiples of 16 bytes on only,
// and values to a gate begin in the middle of b's rows.
Operand<Tensor> along_k(const Tensor& b) {
    Operand<Tensor> result{.tensor = copy_for_tensor_map(torch::stable::transpose(b, -2, -1)),
                           .swapped = true};
    result.view = as_4d(result.tensor);
    return result;
}

// An operand in place of one without elements, k being 0: the same 8 zeros along k for every row or
// column.
Operand<Tensor> zeros(const Tensor& like, bool swapped) {
    Operand<Tensor> result{.tensor = empty({8}, like.scalar_type(), like), .swapped = swapped};
    torch::stable::zero_(result.tensor);
    result.view = as_4d(result.tensor);
    return result;
}

void check_shapes(const Tensor& a, const Tensor& b, const std::optional<Tensor>& bias) {
    check_dims(OP, "a", a, {2, 3});
    check_dims(OP, "b", b, {2, 3});
    const bool batches_match = b.dim() == 2 || (a.dim() == 3 && a.size(0) == b.size(0));
    TK_CHECK(batches_match && a.size(-1) == b.size(-2), OP, ": a has shape ", shape_text(a),
             " and b has shape ", shape_text(b),
             "; expected (M, K) @ (K, N), (B, M, K) @ (K, N) or (B, M, K) @ (B, K, N)");
    if (bias) {
        TK_CHECK(bias->dim() == 1 && bias->size(0) == b.size(-1), OP, ": bias has shape ",
                 shape_text(*bias), "; expected (", b.size(-1), ",), one value per column of b");
    }
}

// What a call asks for beside the operands.
struct Options {
    std::optional<Tensor> residual;
    int64_t activation = 0, gate = 0;
    double alpha = 1, beta = 1;
    bool store_aux = false;
    std::optional<Tensor> out;
};
struct Outputs {
    Tensor out, aux;
};

// `tensor` with rows that a kernel can step through, and its strides.
struct Rows {
    Tensor tensor;
    int64_t stride = 0, batch_stride = 0;
};
Rows rows_of(const Tensor& tensor, bool copy) {
    View view = as_4d(tensor);
    Rows rows{.tensor = tensor};
    if (copy) {
        rows.tensor = copy_for_tensor_map(tensor);
        view = as_4d(rows.tensor);
    }
    rows.stride = view.stride[2];
    rows.batch_stride = view.stride[1];
    return rows;
}

Outputs product(const Tensor& a, const Tensor& b, const std::optional<Tensor>& bias,
                std::optional<ScalarType> out_type, const Options& options) {
    check_cuda(OP, "a", a);
    check_same_device(OP, "b", b, "a", a);
    const DType dtype = check_dtype(OP, "a", a, {DType::bf16, DType::fp16});
    check_same_dtype(OP, "b", b, "a", a);
    if (bias) {
        check_same_device(OP, "bias", *bias, "a", a);
        check_same_dtype(OP, "bias", *bias, "a", a);
    }
    check_shapes(a, b, bias);
    const std::optional<DType> out_dtype = out_type ? dtype_of(*out_type) : dtype;
    TK_CHECK(out_dtype && *out_dtype != DType::int32, OP, ": out_dtype is ", dtype_text(*out_type),
             "; supported are torch.bfloat16, torch.float16 and torch.float32");
    TK_CHECK(options.activation >= 0 && options.activation <= int64_t(Activation::silu), OP,
             ": activation is ", options.activation, "; expected 0 to ", int(Activation::silu));
    TK_CHECK(options.gate >= 0 && options.gate <= int64_t(Gate::interleaved), OP, ": gate is ",
             options.gate, "; expected 0 to ", int(Gate::interleaved));
    const Gate gate = static_cast<Gate>(options.gate);

    const DeviceGuard guard(a.get_device_index());
    const int64_t batch = a.dim() == 3 ? a.size(0) : 1;
    const int64_t m = a.size(-2), n = b.size(-1);
    TK_CHECK(gate == Gate::none || n % 2 == 0, OP, ": b has ", n,
             " columns; a gated activation needs an even number");
    const int64_t out_n = gate == Gate::none ? n : n / 2;
    const ScalarType result_type = scalar_type_of(*out_dtype);
    const auto check_like_out = [&](const char* name, const Tensor& x) {
        check_same_device(OP, name, x, "a", a);
        const bool matches = x.dim() == a.dim() && x.size(-1) == out_n && x.size(-2) == m &&
                             (a.dim() == 2 || x.size(0) == batch);
        TK_CHECK(matches && x.scalar_type() == result_type, OP, ": ", name, " is ",
                 dtype_text(x.scalar_type()), ' ', shape_text(x), "; expected ",
                 dtype_text(result_type), " and the result's shape, with rows of ", out_n);
    };
    if (options.residual) check_like_out("residual", *options.residual);
    if (options.out) check_like_out("out", *options.out);
    const auto allocate = [&](int64_t columns) {
        return a.dim() == 3 ? empty({batch, m, columns}, result_type, a)
                            : empty({m, columns}, result_type, a);
    };
    Outputs result{.out = options.out ? *options.out : allocate(out_n)};
    if (options.store_aux) result.aux = allocate(n);
    if (batch == 0 || m == 0 || n == 0) return result;

    // k = 0 is a product of zeros.
    const bool nothing = a.size(-1) == 0;
    const int64_t k = nothing ? 8 : a.size(-1);
    const Operand<Tensor> left = nothing ? zeros(a, false) : operand(a);
    Operand<Tensor> right = nothing ? zeros(b, true) : operand(b);
    if (gate == Gate::blocked && !right.swapped && out_n % 8 != 0) right = along_k(b);
    std::optional<Tensor> row;
    if (bias) row = n > 1 && bias->stride(0) != 1 ? packed(*bias) : *bias;
    const Rows out = rows_of(result.out, false);
    TK_CHECK(out_n == 1 || result.out.stride(-1) == 1, OP,
             ": out must have adjacent elements in its last dimension");
    const Problem problem{.m = m,
                          .n = n,
                          .k = k,
                          .batch = batch,
                          .dtype = dtype,
                          .out_dtype = *out_dtype,
                          .a_m_major = left.swapped,
                          .b_n_major = !right.swapped,
                          .gate = gate,
                          .fused = options.residual || options.activation != 0 ||
                                   gate != Gate::none || options.store_aux};
    const DeviceProperties& device = device_properties(a.get_device_index());
    if (const std::string reason = unsupported(problem, device); !reason.empty()) {
        throw std::runtime_error(concat(OP, ": ", reason));
    }
    Choice choice = choose(problem, device);
    force("gemm", choice);
    std::optional<Tensor> memory;
    Workspace workspace;
    if (const int64_t bytes = workspace_bytes(choice, m, n); bytes > 0) {
        memory = empty({bytes}, ScalarType::Byte, a);
        workspace = {memory->data_ptr(), new_epoch()};
    }
    Rows residual;
    if (options.residual) {
        // TMA reads the residual; for the swap-AB kernels rows of adjacent elements are enough.
        const View view = as_4d(*options.residual);
        const bool adjacent = view.size[3] <= 1 || view.stride[3] == 1;
        const bool readable =
            choice.config.swap_ab
                ? adjacent
                : fits_tensor_map(view, static_cast<int>(options.residual->element_size()));
        residual = rows_of(*options.residual, !readable);
    }
    const Params params{
        .a = left.view.data,
        .b = right.view.data,
        .out = result.out.data_ptr(),
        .m = m,
        .n = n,
        .k = k,
        .batch = batch,
        .a_stride = nothing ? 0 : left.stride(),
        .a_batch_stride = nothing ? 0 : left.batch_stride(),
        .b_stride = nothing ? 0 : right.stride(),
        .b_batch_stride = nothing ? 0 : right.batch_stride(),
        .out_stride = out.stride,
        .out_batch_stride = out.batch_stride,
        .out_dtype = *out_dtype,
        .epilogue = {.bias = row ? row->data_ptr() : nullptr,
                     .residual = options.residual ? residual.tensor.data_ptr() : nullptr,
                     .aux = options.store_aux ? result.aux.data_ptr() : nullptr,
                     .residual_stride = residual.stride,
                     .residual_batch_stride = residual.batch_stride,
                     .alpha = static_cast<float>(options.alpha),
                     .beta = static_cast<float>(options.beta),
                     .activation = static_cast<Activation>(options.activation),
                     .gate = gate},
        .schedule = choice.schedule};
    TK_CHECK(launch_choice(choice.config, params, workspace, current_stream(a)), OP, ": no kernel ",
             kernel_name(choice));
    return result;
}

Tensor gemm(const Tensor& a, const Tensor& b, const std::optional<Tensor>& bias,
            std::optional<ScalarType> out_type) {
    return product(a, b, bias, out_type, {}).out;
}

Tensor gemm_forward_fused(const Tensor& a, const Tensor& b, const std::optional<Tensor>& bias,
                          std::optional<ScalarType> out_type, const std::optional<Tensor>& residual,
                          int64_t activation, int64_t gate, double alpha, double beta) {
    return product(a, b, bias, out_type,
                   {.residual = residual,
                    .activation = activation,
                    .gate = gate,
                    .alpha = alpha,
                    .beta = beta})
        .out;
}

void gemm_forward_out(const Tensor& a, const Tensor& b, const std::optional<Tensor>& bias,
                      std::optional<ScalarType>, const std::optional<Tensor>& residual,
                      int64_t activation, int64_t gate, double alpha, double beta,
                      const Tensor& out) {
    product(a, b, bias, out.scalar_type(),
            {.residual = residual,
             .activation = activation,
             .gate = gate,
             .alpha = alpha,
             .beta = beta,
             .out = out});
}

// The gradient needs z where there is an activation.
std::tuple<Tensor, Tensor> gemm_fused(const Tensor& a, const Tensor& b,
                                      const std::optional<Tensor>& bias,
                                      std::optional<ScalarType> out_type,
                                      const std::optional<Tensor>& residual, int64_t activation,
                                      int64_t gate, double alpha, double beta) {
    const bool keep = activation != 0 || gate != 0;
    Outputs result = product(a, b, bias, out_type,
                             {.residual = residual,
                              .activation = activation,
                              .gate = gate,
                              .alpha = alpha,
                              .beta = beta,
                              .store_aux = keep});
    if (!keep) result.aux = empty({0}, result.out.scalar_type(), a);
    return {result.out, result.aux};
}

}  // namespace
}  // namespace thunderkittens::gemm

STABLE_TORCH_LIBRARY_IMPL(thunderkittens, CUDA, m) {
    m.impl("gemm", TORCH_BOX(&thunderkittens::gemm::gemm));
    m.impl("gemm_forward", TORCH_BOX(&thunderkittens::gemm::gemm));
    m.impl("gemm.fused", TORCH_BOX(&thunderkittens::gemm::gemm_fused));
    m.impl("gemm_forward.fused", TORCH_BOX(&thunderkittens::gemm::gemm_forward_fused));
    m.impl("gemm_forward.out", TORCH_BOX(&thunderkittens::gemm::gemm_forward_out));
}
