// The bodies of nvfp4_prepare and of its inverse, on any back end: checks, allocation, launch. Host
// C++ without torch.
#pragma once

#include "csrc/common/backend.h"
#include "csrc/gemm/nvfp4/nvfp4_gemm.h"
#include "csrc/gemm/quantize/block_scaled.h"

namespace thunderkittens::nvfp4_gemm {

template <class Tensor>
void check_supported(const Backend<Tensor>& on, const char* op, const Nvfp4Weight& weight,
                     const Tensor& tensor) {
    const DeviceProperties& device = on.device(tensor);
    if (const std::string reason = unsupported(weight, device); !reason.empty()) {
        throw std::runtime_error(concat(op, ": ", reason));
    }
}

template <class Tensor>
Tensor nvfp4_prepare_body(const Backend<Tensor>& on, const Tensor& data, const Tensor& block_scale,
                          bool swizzle) {
    using Types = Backend<Tensor>;
    constexpr const char* OP = "thunderkittens::nvfp4_prepare";
    constexpr int BYTES = PIECE_BYTES;
    check_cuda(OP, "data", data);
    TK_CHECK(data.scalar_type() == Types::E2M1X2 || data.scalar_type() == Types::BYTE, OP,
             ": data must be torch.float4_e2m1fn_x2 or torch.uint8, got ", dtype_text_of(data));
    check_dims(OP, "data", data, {2, 3});
    check_same_device(OP, "block_scale", block_scale, "data", data);
    check_dtype(OP, "block_scale", block_scale, {DType::e4m3});
    const bool grouped = data.dim() == 3;
    const int64_t groups = grouped ? data.size(0) : 1, n = data.size(-2), k = 2 * data.size(-1);
    const block_scaled::ScaleShape shape = block_scaled::scale_shape(n, k, 16, swizzle);
    TK_CHECK(block_scale.dim() == data.dim() && block_scale.size(-1) == shape.columns &&
                 block_scale.size(-2) == shape.rows && (!grouped || block_scale.size(0) == groups),
             OP, ": block_scale has shape ", shape_text(block_scale), "; expected ", shape.rows,
             " x ", shape.columns, " for data of shape ", shape_text(data));
    check_supported(on, OP, {.n = n, .k = k, .groups = groups}, data);
    const auto guard = on.guard(data);
    const Tensor out = grouped ? empty({groups, pieces(n), pieces(k), BYTES}, Types::BYTE, data)
                               : empty({pieces(n), pieces(k), BYTES}, Types::BYTE, data);
    if (out.numel() == 0) return out;
    // As bytes, because torch has no copy of float4_e2m1fn_x2.
    const Tensor codes = data.size(-1) == 1 || data.stride(-1) == 1
                             ? data
                             : packed(Types::view_as(Types::BYTE, data));
    const Tensor scales = packed(block_scale);
    auto launch = on.launch("nvfp4_prepare", data);
    launch.may_read("data", codes);
    launch.may_read("block_scale", scales);
    launch.may_write("out", out);
    run<Nvfp4Pass::prepare>({.codes = codes.data_ptr(),
                             .scales = scales.data_ptr(),
                             .prepared = out.data_ptr(),
                             .n = n,
                             .k = k,
                             .groups = groups,
                             .codes_stride = codes.stride(-2),
                             .codes_group_stride = grouped ? codes.stride(0) : 0,
                             .swizzle = swizzle},
                            launch.stream);
    return out;
}

template <class Tensor>
Tensor nvfp4_restore_body(const Backend<Tensor>& on, const Tensor& data, const Tensor& global_scale,
                          int64_t rows, int64_t columns,
                          typename Backend<Tensor>::ScalarType type) {
    using Types = Backend<Tensor>;
    constexpr const char* OP = "thunderkittens::nvfp4_dequantize";
    constexpr int BYTES = PIECE_BYTES;
    check_cuda(OP, "data", data);
    TK_CHECK(data.scalar_type() == Types::BYTE, OP, ": data must be torch.uint8, got ",
             dtype_text_of(data));
    check_dims(OP, "data", data, {3, 4});
    check_same_device(OP, "global_scale", global_scale, "data", data);
    check_dtype(OP, "global_scale", global_scale, {DType::fp32});
    const std::optional<DType> dtype = Types::dtype_of(type);
    TK_CHECK(dtype == DType::bf16 || dtype == DType::fp16 || dtype == DType::fp32, OP,
             ": dtype must be torch.bfloat16, torch.float16 or torch.float32, got ",
             Types::dtype_text(type));
    const bool grouped = data.dim() == 4;
    const int64_t groups = grouped ? data.size(0) : 1;
    TK_CHECK(rows >= 0 && columns >= 0 && data.size(-3) == pieces(rows) &&
                 data.size(-2) == pieces(columns) && data.size(-1) == BYTES,
             OP, ": data has shape ", shape_text(data), "; it is no prepared weight of ", rows,
             " x ", columns);
    TK_CHECK(global_scale.dim() == (grouped ? 1 : 0) && global_scale.numel() == groups, OP,
             ": global_scale has shape ", shape_text(global_scale),
             "; expected one value per matrix");
    check_supported(on, OP, {.n = rows, .k = columns, .groups = groups, .restore = true}, data);
    const auto guard = on.guard(data);
    const Tensor out =
        grouped ? empty({groups, rows, columns}, type, data) : empty({rows, columns}, type, data);
    if (out.numel() == 0) return out;
    const Tensor prepared = aligned_and_contiguous(data);
    const Tensor scale = packed(global_scale);
    auto launch = on.launch("nvfp4_dequantize restore", data);
    launch.may_read("data", prepared);
    launch.may_read("global_scale", scale);
    launch.may_write("out", out);
    run<Nvfp4Pass::restore>({.prepared = prepared.data_ptr(),
                             .values = out.data_ptr(),
                             .global_scale = data_as<const float>(scale),
                             .n = rows,
                             .k = columns,
                             .groups = groups,
                             .values_dtype = *dtype},
                            launch.stream);
    return out;
}

}  // namespace thunderkittens::nvfp4_gemm
