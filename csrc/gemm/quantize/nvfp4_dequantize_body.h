// The body of nvfp4_dequantize, on any back end: checks, allocation, launch. Host C++ without
// torch.
#pragma once

#include "csrc/common/accesses.h"
#include "csrc/gemm/common/checks.h"
#include "csrc/gemm/quantize/block_scaled_checks.h"
#include "csrc/gemm/quantize/block_scaled_dispatch.h"

namespace thunderkittens::block_scaled {

template <class Tensor>
Tensor nvfp4_dequantize_body(const Backend<Tensor>& on, const Tensor& data,
                             const Tensor& block_scale, const Tensor& global_scale,
                             typename Backend<Tensor>::ScalarType type, bool swizzle) {
    using Types = Backend<Tensor>;
    constexpr const char* OP = "thunderkittens::nvfp4_dequantize";
    check_cuda(OP, "data", data);
    check_nvfp4(OP, data, block_scale, swizzle);
    const std::optional<DType> dtype = Types::dtype_of(type);
    const int64_t batch = data.dim() == 3 ? data.size(0) : 1;
    const int64_t rows = data.size(-2), columns = 2 * data.size(-1);
    gemm::check_global_scale(OP, global_scale, "data", data, data.dim() == 3, batch);
    const Nvfp4Problem problem{
        .rows = rows, .columns = columns, .batch = batch, .dtype = dtype.value_or(DType::int32)};
    const auto guard = on.guard(data);
    const DeviceProperties& device = on.device(data);
    check_supported(OP, unsupported(problem, device));
    const Tensor out = empty_batch(data.dim() == 3, {batch, rows, columns}, type, data);
    if (out.numel() == 0) return out;
    const bool rows_adjacent = data.size(-1) == 1 || data.stride(-1) == 1;
    // As bytes, because torch has no copy of float4_e2m1fn_x2.
    const Tensor codes = rows_adjacent ? data : packed(Types::view_as(Types::BYTE, data));
    const Tensor scales = packed(block_scale);
    const Tensor globals = packed(global_scale);
    DequantizeParams params{.data = matrix_of(as_4d(codes)),
                            .scale = scales.data_ptr(),
                            .global_scale = globals.data_ptr(),
                            .out = out.data_ptr(),
                            .swizzle = swizzle};
    params.data.columns = columns;
    const Nvfp4Dequantize config =
        on.chosen("nvfp4_dequantize", choose_nvfp4_dequantize(problem, device));
    auto scope = on.launch("nvfp4_dequantize", config, data);
    reads(scope, "data", codes, "block_scale", scales, "global_scale", globals);
    scope.may_write("out", out);
    launch(config, params, scope.stream);
    return out;
}

}  // namespace thunderkittens::block_scaled
