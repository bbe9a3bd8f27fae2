// thunderkittens::fp8_gemm on CUDA: checks, operands in the order that wgmma takes, allocation,
// choice, launch.
#include "csrc/gemm/fp8/split_k.h"

#include <limits>

#include "csrc/common/forced.h"
#include "csrc/common/tensor.h"
#include "csrc/gemm/quantize/fp8_quantize.h"

namespace thunderkittens::fp8_gemm {
namespace {

constexpr const char* OP = "thunderkittens::fp8_gemm";

// An operand, K-major: (groups, rows, k).
struct Operand {
    Tensor tensor;  // keeps a copy alive
    const void* data = nullptr;
    int64_t stride = 0, group_stride = 0;
};

// The operand of a view (groups, rows, k); `rows_first` is the same as a tensor. One whose rows are
// adjacent instead of its k is transposed by a kernel; what neither TMA nor that can read is
// copied.
Operand operand(const Tensor& tensor, const View& view, const Tensor& rows_first, Stream stream) {
    const auto of = [](const Tensor& t, const View& v) {
        return Operand{t, v.data, v.stride[2], v.size[1] > 1 ? v.stride[1] : 0};
    };
    if (fits_tensor_map(view, 1)) return of(tensor, view);
    const int64_t groups = view.size[1], rows = view.size[2], k = view.size[3];
    const int64_t pitch = (k + 15) / 16 * 16;
    Tensor copy = empty({groups, rows, pitch}, tensor.scalar_type(), tensor);
    const View columns = transposed(view);
    if (columns.stride[3] == 1) {
        namespace q = fp8_quantize;
        const bool aligned = reinterpret_cast<uintptr_t>(view.data) % 8 == 0 && rows % 8 == 0 &&
                             columns.stride[2] % 8 == 0 && columns.stride[1] % 8 == 0;
        const int64_t blocks = q::blocks_of(q::Pass::transpose, k, rows, 0);
        TK_CHECK(double(blocks) * double(groups) <= std::numeric_limits<int32_t>::max(), OP, ": ",
                 groups, " operands of ", rows, " x ", k, " are too large to be transposed");
        q::launch<q::TRANSPOSE>({.x = view.data,
                                 .m = k,
                                 .k = rows,
                                 .stride = columns.stride[2],
                                 .out_t = copy.data_ptr(),
                                 .aligned = aligned,
                                 .pitch_t = pitch,
                                 .batch_stride = columns.stride[1],
                                 .batches = static_cast<int>(groups),
                                 .blocks = static_cast<int>(blocks)},
                                stream);
        return {copy, copy.data_ptr(), pitch, rows * pitch};
    }
    Tensor inside = torch::stable::narrow(copy, 2, 0, k);
    torch::stable::copy_(inside, rows_first);
    return {copy, copy.data_ptr(), pitch, rows * pitch};
}

Tensor fp8_gemm(const Tensor& a, const Tensor& b, const Tensor& scale_a, const Tensor& scale_b,
                const std::optional<Tensor>& bias, int64_t activation,
                std::optional<ScalarType> out_type, bool accurate,
                const std::optional<Tensor>& offs) {
    check_cuda(OP, "a", a);
    check_same_device(OP, "b", b, "a", a);
    const DType a_dtype = check_dtype(OP, "a", a, {DType::e4m3, DType::e5m2});
    const DType b_dtype = check_dtype(OP, "b", b, {DType::e4m3, DType::e5m2});
    check_same_device(OP, "scale_a", scale_a, "a", a);
    check_same_device(OP, "scale_b", scale_b, "a", a);
    check_dtype(OP, "scale_a", scale_a, {DType::fp32});
    check_dtype(OP, "scale_b", scale_b, {DType::fp32});
    check_dims(OP, "a", a, {2});
    check_dims(OP, "b", b, {offs ? 3 : 2});
    check_dims(OP, "scale_a", scale_a, {2});
    check_dims(OP, "scale_b", scale_b, {2, offs ? 3 : 2});
    TK_CHECK(a.size(1) == b.size(-2), OP, ": a has shape ", shape_text(a), " and b has shape ",
             shape_text(b), "; a's columns must be b's rows");
    const int64_t m = a.size(0), k = a.size(1), n = b.size(-1), groups = offs ? b.size(0) : 1;
    const ScaleKind kind =
        scale_kind({scale_a.size(0), scale_a.size(1), scale_b.size(-2), scale_b.size(-1)}, m, n, k);
    TK_CHECK(kind.valid && (scale_b.dim() == 2 || scale_b.size(0) == groups), OP,
             ": the scales have shapes ", shape_text(scale_a), " and ", shape_text(scale_b),
             ", which do not fit a of shape ", shape_text(a), " and b of shape ", shape_text(b));
    TK_CHECK(activation >= 0 && activation <= 4, OP, ": activation is ", activation,
             "; it must be from 0 to 4");
    const ScalarType type = out_type.value_or(ScalarType::BFloat16);
    const std::optional<DType> out_dtype = dtype_of(type);
    TK_CHECK(out_dtype && (*out_dtype == DType::bf16 || *out_dtype == DType::fp16 ||
                           *out_dtype == DType::fp32),
             OP, ": out_dtype is ", dtype_text(type),
             "; supported are torch.bfloat16, torch.float16 and torch.float32");
    DType bias_dtype = DType::bf16;
    std::optional<Tensor> row;
    if (bias) {
        check_same_device(OP, "bias", *bias, "a", a);
        bias_dtype = check_dtype(OP, "bias", *bias, {DType::bf16, DType::fp16, DType::fp32});
        TK_CHECK(bias->dim() == 1 && bias->size(0) == n, OP, ": bias has shape ", shape_text(*bias),
                 "; expected (", n, ",)");
        row = packed(*bias);
    }
    std::optional<Tensor> ends;
    if (offs) {
        check_same_device(OP, "offs", *offs, "a", a);
        check_dtype(OP, "offs", *offs, {DType::int32});
        TK_CHECK(offs->dim() == 1 && offs->size(0) == groups, OP, ": offs has shape ",
                 shape_text(*offs), "; expected (", groups, ",), the end of each group's rows");
        ends = packed(*offs);
    }

    const DeviceGuard guard(a.get_device_index());
    Tensor out = empty({m, n}, type, a);
    if (m == 0 || n == 0) return out;
    if (groups == 0) {
        torch::stable::zero_(out);
        return out;
    }
    // Without k all sums are zero, which the kernel of promoted sums begins with.
    const Problem problem{.m = m,
                          .n = n,
                          .k = k,
                          .groups = groups,
                          .a_dtype = a_dtype,
                          .b_dtype = b_dtype,
                          .out_dtype = *out_dtype,
                          .accurate = accurate || k == 0,
                          .blockwise = kind.blockwise,
                          .blockwise_1d1d = kind.is_1d1d,
                          .grouped = offs.has_value(),
                          .activated = activation != 0};
    const DeviceProperties& device = device_properties(a.get_device_index());
    if (const std::string reason = unsupported(problem, device); !reason.empty()) {
        throw std::runtime_error(concat(OP, ": ", reason));
    }
    const Stream stream = current_stream(a);
    Operand left{.data = out.data_ptr(), .stride = 16}, right = left;
    if (k > 0) {
        left = operand(a, as_4d(a), a, stream);
        right = operand(b, transposed(as_4d(b)), torch::stable::transpose(b, -2, -1), stream);
    }
    Choice choice = choose(problem, device);
    force("fp8_gemm", choice);
    const bool row_scales = !kind.blockwise && scale_a.size(0) > 1;
    const bool column_scales = !kind.blockwise && scale_b.size(-1) > 1;
    const Params params{
        .a = left.data,
        .b = right.data,
        .bias = row ? row->data_ptr() : nullptr,
        .offs = ends ? static_cast<const int32_t*>(ends->data_ptr()) : nullptr,
        .out = out.data_ptr(),
        .m = m,
        .n = n,
        .k = k,
        .groups = groups,
        .a_stride = left.stride,
        .b_stride = right.stride,
        .b_group_stride = right.group_stride,
        .scale_a = {static_cast<const float*>(scale_a.data_ptr()),
                    row_scales || kind.blockwise ? scale_a.stride(0) : 0, scale_a.stride(1)},
        .scale_b = {static_cast<const float*>(scale_b.data_ptr()),
                    column_scales || kind.blockwise ? scale_b.stride(-1) : 0, scale_b.stride(-2),
                    scale_b.dim() == 3 && scale_b.size(0) > 1 ? scale_b.stride(0) : 0},
        .blockwise = kind.blockwise,
        .is_1d1d = kind.is_1d1d,
        .out_dtype = *out_dtype,
        .bias_dtype = bias_dtype,
        .activation = static_cast<int>(activation),
        .schedule = choice.schedule};
    TK_CHECK(launch_choice(choice.config, params, stream), OP, ": no kernel ", kernel_name(choice));
    return out;
}

}  // namespace
}  // namespace thunderkittens::fp8_gemm

STABLE_TORCH_LIBRARY_IMPL(thunderkittens, CUDA, m) {
    m.impl("fp8_gemm", TORCH_BOX(&thunderkittens::fp8_gemm::fp8_gemm));
}
