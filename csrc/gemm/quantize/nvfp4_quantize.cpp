// thunderkittens::nvfp4_quantize on CUDA: checks, a copy of what cannot be read in words of 16
// bytes, allocation, launch.
#include "csrc/common/tensor.h"
#include "csrc/gemm/quantize/block_scaled_dispatch.h"

namespace thunderkittens::block_scaled {
namespace {

constexpr const char* OP = "thunderkittens::nvfp4_quantize";
constexpr int BLOCK = 16;

std::tuple<Tensor, Tensor, Tensor> nvfp4_quantize(const Tensor& x,
                                                  const std::optional<Tensor>& global_scale,
                                                  bool square, bool swizzle,
                                                  const std::optional<Tensor>& seed) {
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
        TK_CHECK(seed->scalar_type() == ScalarType::Long && seed->numel() == 1, OP,
                 ": seed must be one torch.int64, got ", dtype_text(seed->scalar_type()),
                 " of shape ", shape_text(*seed));
    }
    const Nvfp4Problem problem{.rows = rows,
                               .columns = columns,
                               .batch = batch,
                               .dtype = dtype,
                               .square = square,
                               .stochastic = seed.has_value()};
    const DeviceGuard guard(x.get_device_index());
    const DeviceProperties& device = device_properties(x.get_device_index());
    if (const std::string reason = unsupported(problem, device); !reason.empty()) {
        throw std::runtime_error(concat(OP, ": ", reason));
    }
    const ScaleShape shape = scale_shape(rows, columns, BLOCK, swizzle);
    constexpr ScalarType BYTE = ScalarType::Byte, E4M3 = ScalarType::Float8_e4m3fn;
    const bool one = x.dim() == 2;
    // As bytes, because torch cannot fill new float4_e2m1fn_x2, as it does where algorithms must be
    // deterministic.
    const Tensor bytes =
        one ? empty({rows, columns / 2}, BYTE, x) : empty({batch, rows, columns / 2}, BYTE, x);
    const Tensor data = view_as(ScalarType::Float4_e2m1fn_x2, bytes);
    const Tensor scale = one ? empty({shape.rows, shape.columns}, E4M3, x)
                             : empty({batch, shape.rows, shape.columns}, E4M3, x);
    Tensor global = one ? empty(std::initializer_list<int64_t>{}, ScalarType::Float, x)
                        : empty({batch}, ScalarType::Float, x);
    if (x.numel() == 0) {
        if (global_scale) {
            torch::stable::copy_(global, *global_scale);
        } else {
            torch::stable::fill_(global, 1.0);
        }
        return {data, scale, global};
    }
    const Tensor source = for_tensor_map(x);
    std::optional<Tensor> given;
    if (global_scale) given = packed(*global_scale);
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
        maxima = empty({batch, params.maxima_count}, ScalarType::Int, x);
        params.maxima = maxima->data_ptr();
    }
    launch(choose_nvfp4_quantize(problem, device), params, current_stream(x));
    return {data, scale, global};
}

}  // namespace
}  // namespace thunderkittens::block_scaled

STABLE_TORCH_LIBRARY_IMPL(thunderkittens, CUDA, m) {
    m.impl("nvfp4_quantize", TORCH_BOX(&thunderkittens::block_scaled::nvfp4_quantize));
}
