// The operands of MXFP8 products as their bodies have them, and what a pass makes of one that is
// rescaled: on any back end. Host C++ without torch.
#pragma once

#include <tuple>

#include "csrc/common/accesses.h"
#include "csrc/common/backend.h"
#include "csrc/gemm/mxfp8/mxfp8_gemm.h"
#include "csrc/gemm/quantize/block_scaled_checks.h"
#include "csrc/gemm/quantize/block_scaled_dispatch.h"

namespace thunderkittens::mxfp8_gemm {

// An operand (rows, K), or a batch of them, whose K is adjacent, with its scales.
template <class Tensor>
struct Quantised {
    DType dtype;
    Tensor data, scale;
    block_scaled::Matrix matrix;
    bool swizzle;

    Quantised(const char* op, const char* name, const Tensor& given, const Tensor& scales,
              bool swizzled)
        : dtype(block_scaled::check_mxfp8(op, name, given, scales, swizzled)),
          data(given.size(-1) <= 1 || given.stride(-1) == 1 ? given : packed(given)),
          scale(aligned_and_contiguous(scales)),
          matrix(block_scaled::matrix_of(as_4d(data))),
          swizzle(swizzled) {}

    bool short_rows() const { return matrix.row_stride <= INT32_MAX; }
    // Whether TMA can load the operand, and bulk copies its scales, in the 128x4 layout.
    bool readable() const {
        return swizzle && aligned_scales(scale.data_ptr()) && fits_tensor_map(as_4d(data), 1);
    }
    template <class Launch>
    void read_by(Launch& launch) const {
        reads(launch, "data", data, "scale", scale);
    }
};

// What mxfp8_prepare makes of an operand.
template <class Tensor>
struct Prepared {
    Tensor codes, factor, mask;

    static Prepared allocate(const Quantised<Tensor>& o) {
        const block_scaled::Matrix& m = o.matrix;
        const auto make = [&](std::initializer_list<int64_t> sizes, auto type) {
            return empty_batch(o.data.dim() == 3, sizes, type, o.data);
        };
        return {make({m.batch, m.rows, round_up(m.columns, 16)}, DType::e4m3),
                make({m.batch, m.rows}, DType::fp32),
                make({m.batch, mask_words(m.rows), MASK_BYTES}, Backend<Tensor>::BYTE)};
    }
};

// The pass that makes it, and the memory that the pass may access.
template <class Tensor, class Launch>
Rescale rescale(const Quantised<Tensor>& o, const Prepared<Tensor>& to, Launch& launch) {
    o.read_by(launch);
    writes(launch, "codes", to.codes, "factor", to.factor, "marks", to.mask);
    return {.data = o.matrix,
            .scale = o.scale.data_ptr(),
            .swizzle = o.swizzle,
            .e5m2 = o.dtype == DType::e5m2,
            .codes = to.codes.data_ptr(),
            .pitch = round_up(o.matrix.columns, 16),
            .factor = data_as<float>(to.factor),
            .mask = data_as<uint8_t>(to.mask),
            .blocks = rescale_blocks(o.matrix)};
}

template <class Tensor>
Prepared<Tensor> mxfp8_prepare_body(const Backend<Tensor>& on, const Tensor& data,
                                    const Tensor& scale, bool swizzle) {
    constexpr const char* OP = "thunderkittens::mxfp8_prepare";
    check_cuda(OP, "data", data);
    check_dims(OP, "data", data, {2, 3});
    check_same_device(OP, "scale", scale, "data", data);
    const auto guard = on.guard(data);
    const Quantised<Tensor> operand(OP, "data", data, scale, swizzle);
    const PrepareProblem problem{.rows = operand.matrix.rows,
                                 .columns = operand.matrix.columns,
                                 .batch = operand.matrix.batch,
                                 .data_dtype = operand.dtype};
    check_supported(OP, unsupported_operand(problem, on.device(data)));
    auto prepared = Prepared<Tensor>::allocate(operand);
    if (prepared.factor.numel() > 0) {
        const PrepareChoice choice = choose_prepare(problem, on.device(data));
        auto launch = on.launch("mxfp8_prepare", choice, data);
        run_pass(RescaleParams{.operands = {rescale(operand, prepared, launch)}}, on.device(data),
                 launch.stream);
    }
    return prepared;
}

// What has been prepared of an operand, if it has been, as the arguments of the op.
template <class Tensor>
struct Kept {
    std::optional<Tensor> codes = {}, factor = {}, mask = {};

    std::optional<Prepared<Tensor>> checked(const char* op, const char* name,
                                            const Quantised<Tensor>& o) const {
        using Types = Backend<Tensor>;
        using Type = typename Types::ScalarType;
        TK_CHECK(codes.has_value() == factor.has_value() && codes.has_value() == mask.has_value(),
                 op, ": of what is prepared of ", name, " a part is missing");
        if (!codes) return std::nullopt;
        const int64_t rows = o.matrix.rows;
        const std::tuple<const char*, const Tensor&, Type, int64_t, int64_t> parts[] = {
            {"codes", *codes, Types::scalar_type(DType::e4m3), rows,
             round_up(o.matrix.columns, 16)},
            {"factor", *factor, Types::scalar_type(DType::fp32), rows, 1},
            {"marks", *mask, Types::BYTE, mask_words(rows), MASK_BYTES}};
        for (const auto& [part, tensor, type, height, width] : parts) {
            check_same_device(op, part, tensor, name, o.data);
            TK_CHECK(tensor.scalar_type() == type && tensor.size(0) == height &&
                         tensor.numel() == height * width,
                     op, ": ", part, " prepared of ", name, " is ", dtype_text_of(tensor), ' ',
                     shape_text(tensor), "; expected ", Types::dtype_text(type), " of ", height,
                     " x ", width);
        }
        return Prepared<Tensor>{aligned_and_contiguous(*codes), aligned_and_contiguous(*factor),
                                aligned_and_contiguous(*mask)};
    }
};

}  // namespace thunderkittens::mxfp8_gemm
