// thunderkittens::nvfp4_gemm on CUDA: checks, allocation, choice, launch.
#include "csrc/gemm/nvfp4/nvfp4_gemm.h"
#include "csrc/common/forced.h"
#include "csrc/common/tensor.h"
#include "csrc/gemm/common/workspace.h"
#include "csrc/gemm/nvfp4/dequant_params.h"

namespace thunderkittens::nvfp4_gemm {
namespace {

constexpr const char* OP = "thunderkittens::nvfp4_gemm";

Tensor zeros(std::initializer_list<int64_t> sizes, ScalarType type, const Tensor& like) {
    Tensor result = empty(sizes, type, like);
    torch::stable::zero_(result);
    return result;
}

// Dequantizes the weight into a workspace under the product.
template <DType dtype>
void multiply_fused_dequant(const Params& params, const Choice& choice, const Tensor& like) {
    constexpr gemm::Config config = gemm::fused_dequant_config(dtype);
    const Tensor workspace =
        empty({pieces(params.n) * PIECE, pieces(params.k) * PIECE}, like.scalar_type(), like);
    auto fused_dequant =
        gemm::fused_dequant_params(params, choice.raster_group, workspace.data_ptr());
    const Tensor counters =
        zeros({gemm::dequant_order(config, fused_dequant).counters()}, ScalarType::Int, like);
    fused_dequant.counters = static_cast<int*>(counters.data_ptr());
    gemm::launch_fused_dequant<config>(fused_dequant, current_stream(like));
}

Tensor nvfp4_gemm(const Tensor& a, const Tensor& b, const Tensor& global_scale, int64_t n,
                  const std::optional<Tensor>& bias, int64_t activation,
                  std::optional<ScalarType> out_type, const std::optional<Tensor>& offs) {
    check_cuda(OP, "a", a);
    const DType dtype = check_dtype(OP, "a", a, {DType::bf16, DType::fp16});
    check_dims(OP, "a", a, {2});
    check_same_device(OP, "b", b, "a", a);
    TK_CHECK(b.scalar_type() == ScalarType::Byte, OP, ": b must be torch.uint8, got ",
             dtype_text(b.scalar_type()));
    check_dims(OP, "b", b, {offs ? 4 : 3});
    const int64_t m = a.size(0), k = a.size(1), groups = offs ? b.size(0) : 1;
    TK_CHECK(
        n >= 0 && b.size(-3) == pieces(n) && b.size(-2) == pieces(k) && b.size(-1) == PIECE_BYTES,
        OP, ": b has shape ", shape_text(b), "; it is no prepared weight of ", n, " x ", k);
    check_same_device(OP, "global_scale", global_scale, "a", a);
    check_dtype(OP, "global_scale", global_scale, {DType::fp32});
    TK_CHECK(global_scale.dim() == (offs ? 1 : 0) && global_scale.numel() == groups, OP,
             ": global_scale has shape ", shape_text(global_scale),
             "; expected one value per matrix of b");
    if (bias) {
        check_same_device(OP, "bias", *bias, "a", a);
        check_same_dtype(OP, "bias", *bias, "a", a);
        TK_CHECK(bias->dim() == 1 && bias->size(0) == n, OP, ": bias has shape ", shape_text(*bias),
                 "; expected (", n, ",)");
    }
    if (offs) {
        check_same_device(OP, "offs", *offs, "a", a);
        check_dtype(OP, "offs", *offs, {DType::int32});
        TK_CHECK(offs->dim() == 1 && offs->size(0) == groups, OP, ": offs has shape ",
                 shape_text(*offs), "; expected (", groups, ",)");
    }
    TK_CHECK(activation >= 0 && activation <= 4, OP, ": activation is ", activation,
             "; it is 0 to 4");
    const ScalarType type = out_type.value_or(a.scalar_type());
    const std::optional<DType> out_dtype = dtype_of(type);
    TK_CHECK(out_dtype == DType::bf16 || out_dtype == DType::fp16 || out_dtype == DType::fp32, OP,
             ": out_dtype must be torch.bfloat16, torch.float16 or torch.float32, got ",
             dtype_text(type));

    const DeviceGuard guard(a.get_device_index());
    Tensor out = empty({m, n}, type, a);
    if (out.numel() == 0) return out;
    if (groups == 0) {
        torch::stable::zero_(out);
        return out;
    }
    // k = 0 is a product of zeros.
    const bool nothing = k == 0;
    const Tensor rows = nothing ? zeros({m, 16}, a.scalar_type(), a) : for_tensor_map(a);
    const Tensor weight = nothing ? zeros({groups, pieces(n), 1, PIECE_BYTES}, ScalarType::Byte, a)
                                  : aligned_and_contiguous(b);
    const Tensor scale = packed(global_scale);
    std::optional<Tensor> row, ends;
    if (bias) row = packed(*bias);
    if (offs) ends = packed(*offs);
    const Problem problem{.m = m,
                          .n = n,
                          .k = rows.size(1),
                          .groups = groups,
                          .dtype = dtype,
                          .out_dtype = *out_dtype,
                          .grouped = offs.has_value()};
    const DeviceProperties& device = device_properties(a.get_device_index());
    if (const std::string reason = unsupported(problem, device); !reason.empty()) {
        throw std::runtime_error(concat(OP, ": ", reason));
    }
    Choice choice = choose(problem, device);
    force("nvfp4_gemm", choice);
    std::optional<Tensor> workspace;
    if (const int64_t bytes = workspace_bytes(choice.config, choice.schedule); bytes > 0) {
        workspace = empty({bytes}, ScalarType::Byte, a);
    }
    const Params params{.a = rows.data_ptr(),
                        .weight = weight.data_ptr(),
                        .scale = static_cast<const float*>(scale.data_ptr()),
                        .bias = row ? row->data_ptr() : nullptr,
                        .offs = ends ? static_cast<const int32_t*>(ends->data_ptr()) : nullptr,
                        .out = out.data_ptr(),
                        .m = m,
                        .n = n,
                        .k = rows.size(1),
                        .groups = groups,
                        .a_stride = rows.stride(0),
                        .out_dtype = *out_dtype,
                        .activation = static_cast<int>(activation),
                        .workspace = workspace ? workspace->data_ptr() : nullptr,
                        .epoch = workspace ? gemm::new_epoch() : 0,
                        .schedule = choice.schedule};
    if (choice.fused_dequant) {
        if (dtype == DType::bf16)
            multiply_fused_dequant<DType::bf16>(params, choice, a);
        else
            multiply_fused_dequant<DType::fp16>(params, choice, a);
        return out;
    }
    TK_CHECK(launch_any(choice.config, params, current_stream(a)), OP, ": no kernel ",
             kernel_name(choice));
    return out;
}

}  // namespace
}  // namespace thunderkittens::nvfp4_gemm

STABLE_TORCH_LIBRARY_IMPL(thunderkittens, CUDA, m) {
    m.impl("nvfp4_gemm", TORCH_BOX(&thunderkittens::nvfp4_gemm::nvfp4_gemm));
}
