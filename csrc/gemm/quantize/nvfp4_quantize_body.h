// The body of nvfp4_quantize, on any back end: checks, a copy of what has no rows of adjacent
// elements, allocation, launch. Host C++ without torch.
#pragma once

#include <tuple>

#include "csrc/common/accesses.h"
#include "csrc/gemm/common/checks.h"
#include "csrc/gemm/quantize/block_scaled_dispatch.h"

namespace thunderkittens::block_scaled {

template <class Tensor>
std::tuple<Tensor, Tensor, Tensor> nvfp4_quantize_body(const Backend<Tensor>& on, const Tensor& x,
                                                       const std::optional<Tensor>& global_scale,
                                                       bool square, bool swizzle,
                                                       const std::optional<Tensor>& seed) {
    using Types = Backend<Tensor>;
    constexpr const char* OP = "thunderkittens::nvfp4_quantize";
    constexpr int BLOCK = 16;
    check_cuda(OP, "x", x);
    const DType dtype = check_dtype(OP, "x", x, {DType::bf16, DType::fp16, DType::fp32});
    check_dims(OP, "x", x, {2, 3});
    const int64_t batch = x.dim() == 3 ? x.size(0) : 1, rows = x.size(-2), columns = x.size(-1);
    const bool batched = x.dim() == 3;
    if (global_scale) gemm::check_global_scale(OP, *global_scale, "x", x, batched, batch);
    if (seed) {
        check_same_device(OP, "seed", *seed, "x", x);
        TK_CHECK(Types::is_int64(*seed), OP, ": seed must be one torch.int64, got ",
                 dtype_text_of(*seed), " of shape ", shape_text(*seed));
    }
    const View view = as_4d(x);
    const bool copied = !rows_adjacent(view);
    const bool unaligned = !copied && !fits_tensor_map(view, static_cast<int>(x.element_size()));
    const Nvfp4Problem problem{.rows = rows,
                               .columns = columns,
                               .batch = batch,
                               .dtype = dtype,
                               .square = square,
                               .stochastic = seed.has_value(),
                               .unaligned = unaligned};
    const auto guard = on.guard(x);
    const DeviceProperties& device = on.device(x);
    check_supported(OP, unsupported(problem, device));
    const ScaleShape shape = scale_shape(rows, columns, BLOCK, swizzle);
    // As bytes, because torch cannot fill new float4_e2m1fn_x2, as it does where algorithms must be
    // deterministic.
    const Tensor bytes = empty_batch(batched, {batch, rows, columns / 2}, Types::BYTE, x);
    const Tensor data = Types::view_as(Types::E2M1X2, bytes);
    const Tensor scale = empty_batch(batched, {batch, shape.rows, shape.columns}, DType::e4m3, x);
    Tensor global = empty_batch(batched, {batch}, DType::fp32, x);
    if (x.numel() == 0) {
        if (global_scale)
            copy_(global, *global_scale);
        else
            fill_(global, 1.0);
        return {data, scale, global};
    }
    const Tensor source = copied ? copy_for_tensor_map(x) : x;
    const auto given = packed(global_scale);
    Nvfp4Params params{.x = matrix_of(as_4d(source)),
                       .data = data.data_ptr(),
                       .scale = scale.data_ptr(),
                       .given_scale = given ? given->data_ptr() : nullptr,
                       .global_scale = global.data_ptr(),
                       .maxima_count = maxima_count(problem, device),
                       .seed = seed ? seed->data_ptr() : nullptr,
                       .swizzle = swizzle,
                       .blocks = ring_blocks(device)};
    std::optional<Tensor> maxima;
    if (!given) {
        maxima = empty({batch, params.maxima_count}, DType::int32, x);
        params.maxima = maxima->data_ptr();
    }
    const Nvfp4Quantize config =
        on.chosen("nvfp4_quantize", choose_nvfp4_quantize(problem, device));
    auto scope = on.launch("nvfp4_quantize", config, x);
    reads(scope, "x", source, "global_scale", given, "seed", seed);
    writes(scope, "maxima", maxima, "data", data, "block_scale", scale, "scale", global);
    launch(config, params, scope.stream);
    return {data, scale, global};
}

}  // namespace thunderkittens::block_scaled
