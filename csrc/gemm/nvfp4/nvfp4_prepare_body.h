// The bodies of nvfp4_prepare and of its inverse, on any back end: checks, allocation, launch. Host
// C++ without torch.
#pragma once

#include "csrc/common/accesses.h"
#include "csrc/gemm/common/checks.h"
#include "csrc/gemm/nvfp4/nvfp4_gemm.h"
#include "csrc/gemm/quantize/block_scaled_checks.h"

namespace thunderkittens::nvfp4_gemm {

template <Nvfp4Pass pass>
void run_on(const DeviceProperties& device, const PrepareParams& params, Stream stream) {
    if (runs_native(device)) return run<pass, false>(params, stream);
    if constexpr (BUILDS_PORTABLE) run<pass, true>(params, stream);
}

template <class Tensor>
Tensor nvfp4_prepare_body(const Backend<Tensor>& on, const Tensor& data, const Tensor& block_scale,
                          bool swizzle) {
    using Types = Backend<Tensor>;
    constexpr const char* OP = "thunderkittens::nvfp4_prepare";
    check_cuda(OP, "data", data);
    block_scaled::check_nvfp4(OP, data, block_scale, swizzle);
    const bool grouped = data.dim() == 3;
    const int64_t groups = grouped ? data.size(0) : 1, n = data.size(-2), k = 2 * data.size(-1);
    const Nvfp4Weight weight{.n = n, .k = k, .groups = groups};
    check_supported(OP, unsupported(weight, on.device(data)));
    const auto guard = on.guard(data);
    const Tensor out =
        empty_batch(grouped, {groups, pieces(n), pieces(k), PIECE_BYTES}, Types::BYTE, data);
    if (out.numel() == 0) return out;
    // As bytes, because torch has no copy of float4_e2m1fn_x2.
    const Tensor codes = data.size(-1) == 1 || data.stride(-1) == 1
                             ? data
                             : packed(Types::view_as(Types::BYTE, data));
    const Tensor scales = packed(block_scale);
    auto launch = on.launch("nvfp4_prepare", data);
    reads(launch, "data", codes, "block_scale", scales);
    launch.may_write("out", out);
    run_on<Nvfp4Pass::prepare>(on.device(data),
                               {.codes = codes.data_ptr(),
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
    check_cuda(OP, "data", data);
    TK_CHECK(data.scalar_type() == Types::BYTE, OP, ": data must be torch.uint8, got ",
             dtype_text_of(data));
    check_dims(OP, "data", data, {3, 4});
    const DType dtype = gemm::checked_out_dtype<Tensor>(OP, type);
    const bool grouped = data.dim() == 4;
    const int64_t groups = grouped ? data.size(0) : 1;
    TK_CHECK(rows >= 0 && columns >= 0 && data.size(-3) == pieces(rows) &&
                 data.size(-2) == pieces(columns) && data.size(-1) == PIECE_BYTES,
             OP, ": data has shape ", shape_text(data), "; it is no prepared weight of ", rows,
             " x ", columns);
    gemm::check_global_scale(OP, global_scale, "data", data, grouped, groups);
    const Nvfp4Weight weight{.n = rows, .k = columns, .groups = groups, .restore = true};
    check_supported(OP, unsupported(weight, on.device(data)));
    const auto guard = on.guard(data);
    const Tensor out = empty_batch(grouped, {groups, rows, columns}, type, data);
    if (out.numel() == 0) return out;
    const Tensor prepared = aligned_and_contiguous(data);
    const Tensor scale = packed(global_scale);
    auto launch = on.launch("nvfp4_dequantize restore", data);
    reads(launch, "data", prepared, "global_scale", scale);
    launch.may_write("out", out);
    run_on<Nvfp4Pass::restore>(on.device(data),
                               {.prepared = prepared.data_ptr(),
                                .values = out.data_ptr(),
                                .global_scale = data_as<const float>(scale),
                                .n = rows,
                                .k = columns,
                                .groups = groups,
                                .values_dtype = dtype},
                               launch.stream);
    return out;
}

}  // namespace thunderkittens::nvfp4_gemm
