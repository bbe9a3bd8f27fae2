// The body of nvfp4_quantize, on any back end: checks, a copy of what has no rows of adjacent
// elements, allocation, launch. Host C++ without torch.
#pragma once

#include <tuple>

#include "csrc/common/backend.h"
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
    if (global_scale) {
        check_same_device(OP, "global_scale", *global_scale, "x", x);
        check_dtype(OP, "global_scale", *global_scale, {DType::fp32});
        TK_CHECK(global_scale->dim() == x.dim() - 2 && global_scale->numel() == batch, OP,
                 ": global_scale has shape ", shape_text(*global_scale), ", x has shape ",
                 shape_text(x), "; expected one value per matrix");
    }
    if (seed) {
        check_same_device(OP, "seed", *seed, "x", x);
        TK_CHECK(Types::is_int64(*seed), OP, ": seed must be one torch.int64, got ",
                 dtype_text_of(*seed), " of shape ", shape_text(*seed));
    }
    const View given = as_4d(x);
    const bool copied = !rows_adjacent(given);
    const bool unaligned = !copied && !fits_tensor_map(given, static_cast<int>(x.element_size()));
    const Nvfp4Problem problem{.rows = rows,
                               .columns = columns,
                               .batch = batch,
                               .dtype = dtype,
                               .square = square,
                               .stochastic = seed.has_value(),
                               .unaligned = unaligned};
    const auto guard = on.guard(x);
    const DeviceProperties& device = on.device(x);
    if (const std::string reason = unsupported(problem, device); !reason.empty()) {
        throw std::runtime_error(concat(OP, ": ", reason));
    }
    const ScaleShape shape = scale_shape(rows, columns, BLOCK, swizzle);
    constexpr auto BYTE = Types::BYTE;
    constexpr DType E4M3 = DType::e4m3;
    const bool one = x.dim() == 2;
    // As bytes, because torch cannot fill new float4_e2m1fn_x2, as it does where algorithms must be
    // deterministic.
    const Tensor bytes =
        one ? empty({rows, columns / 2}, BYTE, x) : empty({batch, rows, columns / 2}, BYTE, x);
    const Tensor data = Types::view_as(Types::E2M1X2, bytes);
    const Tensor scale = one ? empty({shape.rows, shape.columns}, E4M3, x)
                             : empty({batch, shape.rows, shape.columns}, E4M3, x);
    Tensor global = one ? empty(std::initializer_list<int64_t>{}, DType::fp32, x)
                        : empty({batch}, DType::fp32, x);
    if (x.numel() == 0) {
        if (global_scale) {
            copy_(global, *global_scale);
        } else {
            fill_(global, 1.0);
        }
        return {data, scale, global};
    }
    const Tensor source = copied ? copy_for_tensor_map(x) : x;
    std::optional<Tensor> scale_given;
    if (global_scale) scale_given = packed(*global_scale);
    Nvfp4Params params{.x = matrix_of(as_4d(source)),
                       .data = data.data_ptr(),
                       .scale = scale.data_ptr(),
                       .given_scale = scale_given ? scale_given->data_ptr() : nullptr,
                       .global_scale = global.data_ptr(),
                       .maxima_count = maxima_count(problem, device),
                       .seed = seed ? seed->data_ptr() : nullptr,
                       .swizzle = swizzle,
                       .blocks = ring_blocks(device)};
    std::optional<Tensor> maxima;
    if (!scale_given) {
        maxima = empty({batch, params.maxima_count}, DType::int32, x);
        params.maxima = maxima->data_ptr();
    }
    const Nvfp4Quantize config =
        on.chosen("nvfp4_quantize", choose_nvfp4_quantize(problem, device));
    auto scope = on.launch("nvfp4_quantize", config, x);
    scope.may_read("x", source);
    scope.may_read("global_scale", scale_given);
    scope.may_read("seed", seed);
    scope.may_write("maxima", maxima);
    scope.may_write("data", data);
    scope.may_write("block_scale", scale);
    scope.may_write("scale", global);
    launch(config, params, scope.stream);
    return {data, scale, global};
}

}  // namespace thunderkittens::block_scaled
