// The body of merge_attention, on any back end. Host C++ without torch.
#pragma once

#include <vector>

#include "csrc/attention/common/operands.h"
#include "csrc/attention/decode/dispatch.h"

namespace thunderkittens::attention::decode {

// outs (B, s, H, D) each, or packed (T, H, D); lses (B, H, s), or (H, T).
template <class Tensor>
Tensor merge_attention_body(const Backend<Tensor>& on, const std::vector<Tensor>& outs,
                            const std::vector<Tensor>& lses, Tensor& lse) {
    constexpr const char* OP = "tk.merge_attention";
    TK_CHECK(!outs.empty() && outs.size() <= MOST_MERGED && lses.size() == outs.size(), OP,
             ": 1 to ", MOST_MERGED, " outs and as many lses are merged, got ", outs.size(),
             " and ", lses.size());
    const Tensor& first = outs[0];
    check_cuda(OP, "outs", first);
    MergeParams params;
    params.dtype = check_dtype(OP, "outs", first, {DType::bf16, DType::fp16});
    check_dims(OP, "outs", first, {3, 4});
    const int64_t dims = first.dim();
    const bool packed = dims == 3;
    params.batch = packed ? 1 : first.size(0);
    params.length = first.size(dims - 3);
    params.heads = first.size(dims - 2);
    params.dim = first.size(dims - 1);
    params.count = static_cast<int>(outs.size());
    TK_CHECK(params.dim % 8 == 0, OP, ": outs must have a multiple of 8 columns, got ",
             shape_text(first));
    const auto guard = on.guard(first);
    const auto operand_of = [&](const Tensor& x) -> Operand {
        const View view = as_4d(x);
        return {view.data, packed ? 0 : view.stride[0], view.stride[2], view.stride[1]};
    };
    std::vector<Tensor> kept;
    for (std::size_t i = 0; i < outs.size(); ++i) {
        check_same_device(OP, "outs", outs[i], "outs", first);
        check_same_dtype(OP, "outs", outs[i], "outs", first);
        check_same_device(OP, "lses", lses[i], "outs", first);
        check_dtype(OP, "lses", lses[i], {DType::fp32});
        check_dims(OP, "outs", outs[i], {dims});
        check_dims(OP, "lses", lses[i], {dims - 1});
        for (int64_t d = 0; d < dims; ++d) {
            TK_CHECK(outs[i].size(d) == first.size(d), OP, ": outs must have one shape, got ",
                     shape_text(first), " and ", shape_text(outs[i]));
        }
        const int64_t expected[] = {params.batch, params.heads, params.length};
        for (int64_t d = 0; d < dims - 1; ++d) {
            TK_CHECK(lses[i].size(d) == expected[d + (packed ? 1 : 0)], OP,
                     ": lses must have a number for each row of outs, ", packed ? "(" : "(B, ",
                     "heads, length), got ", shape_text(lses[i]), " for ", shape_text(outs[i]));
        }
        kept.push_back(for_tensor_map(outs[i]));
        params.parts[i] = operand_of(kept[i]);
        params.lses[i] = data_as<const float>(lses[i]);
        if (!packed) params.lse_strides[i][0] = lses[i].stride(0);
        params.lse_strides[i][1] = lses[i].stride(dims - 3);
        params.lse_strides[i][2] = lses[i].stride(dims - 2);
    }
    Tensor out = empty(first.sizes(), first.scalar_type(), first);
    lse = packed ? empty({params.heads, params.length}, DType::fp32, first)
                 : empty({params.batch, params.heads, params.length}, DType::fp32, first);
    if (out.numel() == 0) {
        if (lse.numel() > 0) fill_(lse, -INFINITY);
        return out;
    }
    params.out = operand_of(out);
    params.lse = data_as<float>(lse);
    const DeviceProperties& device = on.device(first);
    check_supported(OP, unsupported_merge({params.dtype}, device));
    const MergeChoice choice = choose_merge({params.dtype}, device);
    auto launch = on.launch("merge_attention", choice, first);
    for (std::size_t i = 0; i < outs.size(); ++i) {
        launch.may_read("outs", kept[i]);
        launch.may_read("lses", lses[i]);
    }
    launch.may_write("out", out);
    launch.may_write("lse", lse);
    launch_merge_of(choice, params, launch.stream);
    return out;
}

}  // namespace thunderkittens::attention::decode
