// thunderkittens::gemm and its twin without autograd, gemm_forward, on CUDA: checks, copies of what
// TMA cannot read, allocation, choice, launch.
#include <utility>

#include "csrc/common/tensor.h"
#include "csrc/gemm/gemm.h"

namespace thunderkittens::gemm {
namespace {

constexpr const char* OP = "thunderkittens::gemm";

// An operand as TMA reads it: rows of adjacent elements. `swapped` when those rows are the matrix's
// columns.
struct Operand {
    Tensor tensor;  // keeps a copy alive
    View view;
    bool swapped = false;

    int64_t stride() const { return view.stride[2]; }
    int64_t batch_stride() const { return view.size[1] > 1 ? view.stride[1] : 0; }
};

Operand operand(const Tensor& tensor) {
    const int bytes = static_cast<int>(tensor.element_size());
    Operand result{.tensor = tensor, .view = as_4d(tensor)};
    if (fits_tensor_map(result.view, bytes)) return result;
    if (const View columns = transposed(result.view); fits_tensor_map(columns, bytes)) {
        result.view = columns;
        result.swapped = true;
        return result;
    }
    result.tensor = copy_for_tensor_map(tensor);
    result.view = as_4d(result.tensor);
    return result;
}

// An operand in place of one without elements, k being 0: the same 8 zeros along k for every row or
// column.
Operand zeros(const Tensor& like, bool swapped) {
    Operand result{.tensor = empty({8}, like.scalar_type(), like), .swapped = swapped};
    torch::stable::zero_(result.tensor);
    result.view = as_4d(result.tensor);
    return result;
}

// Launchers of every kernel, in the order of config_at.
constexpr std::size_t SHAPES = std::size(TILE_SHAPES);
constexpr Config config_at(std::size_t i) {
    return make_config(TILE_SHAPES[i / 8], i / 4 % 2 == 0 ? DType::bf16 : DType::fp16,
                       i / 2 % 2 != 0, i % 2 != 0);
}
template <std::size_t... indices>
void launch_any(const Config& config, const Params& params, Stream stream,
                std::index_sequence<indices...>) {
    const bool found =
        ((config == config_at(indices) ? (launch<config_at(indices)>(params, stream), true)
                                       : false) ||
         ...);
    TK_CHECK(found, OP, ": no kernel ", kernel_name(config));
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

Tensor gemm(const Tensor& a, const Tensor& b, const std::optional<Tensor>& bias,
            std::optional<ScalarType> out_type) {
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
    TK_CHECK(out_dtype, OP, ": out_dtype is ", dtype_text(*out_type),
             "; supported are torch.bfloat16, torch.float16 and torch.float32");

    const DeviceGuard guard(a.get_device_index());
    const int64_t batch = a.dim() == 3 ? a.size(0) : 1;
    const int64_t m = a.size(-2), n = b.size(-1);
    const ScalarType result_type = scalar_type_of(*out_dtype);
    Tensor out =
        a.dim() == 3 ? empty({batch, m, n}, result_type, a) : empty({m, n}, result_type, a);
    if (batch == 0 || m == 0 || n == 0) return out;

    // k = 0 is a product of zeros.
    const bool nothing = a.size(-1) == 0;
    const int64_t k = nothing ? 8 : a.size(-1);
    const Operand left = nothing ? zeros(a, false) : operand(a);
    const Operand right = nothing ? zeros(b, true) : operand(b);
    std::optional<Tensor> row;
    if (bias) row = n > 1 && bias->stride(0) != 1 ? torch::stable::contiguous(*bias) : *bias;

    const Problem problem{.m = m,
                          .n = n,
                          .k = k,
                          .batch = batch,
                          .dtype = dtype,
                          .out_dtype = *out_dtype,
                          .a_m_major = left.swapped,
                          .b_n_major = !right.swapped,
                          .bias = bias.has_value()};
    const DeviceProperties& device = device_properties(a.get_device_index());
    if (const std::string reason = unsupported(problem, device); !reason.empty()) {
        throw std::runtime_error(concat(OP, ": ", reason));
    }
    const Choice choice = choose(problem, device);
    const Params params{.a = left.view.data,
                        .b = right.view.data,
                        .bias = row ? row->data_ptr() : nullptr,
                        .out = out.data_ptr(),
                        .m = m,
                        .n = n,
                        .k = k,
                        .batch = batch,
                        .a_stride = nothing ? 0 : left.stride(),
                        .a_batch_stride = nothing ? 0 : left.batch_stride(),
                        .b_stride = nothing ? 0 : right.stride(),
                        .b_batch_stride = nothing ? 0 : right.batch_stride(),
                        .out_dtype = *out_dtype,
                        .schedule = choice.schedule};
    launch_any(choice.config, params, current_stream(a), std::make_index_sequence<8 * SHAPES>());
    return out;
}

}  // namespace
}  // namespace thunderkittens::gemm

STABLE_TORCH_LIBRARY_IMPL(thunderkittens, CUDA, m) {
    m.impl("gemm", TORCH_BOX(&thunderkittens::gemm::gemm));
    m.impl("gemm_forward", TORCH_BOX(&thunderkittens::gemm::gemm));
}
