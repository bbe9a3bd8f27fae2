// nvfp4_prepare and nvfp4_gemm on the emulator, as their op files do it on CUDA tensors. Bytes are
// arrays of e4m3.
#include "csrc/common/emulated.h"
#include "csrc/gemm/common/workspace.h"
#include "csrc/gemm/nvfp4/dequant_params.h"
#include "csrc/gemm/nvfp4/nvfp4_gemm.h"
#include "csrc/gemm/nvfp4/nvfp4_prepare_body.h"
#include "csrc/gemm/quantize/block_scaled.h"

namespace thunderkittens::nvfp4_gemm {
namespace {

using emulated::Array;

constexpr DType BYTE = DType::e4m3;
constexpr int BYTES = PIECE_BYTES;

template <class Problem>
void check_supported(const char* op, const Problem& problem, const DeviceProperties& device) {
    if (const std::string reason = unsupported(problem, device); !reason.empty()) {
        throw std::runtime_error(concat(op, ": ", reason));
    }
}

emulated::Result run_prepare(const emulated::Call& call) {
    const Backend<Array> on(call);
    return on.result({{"out", nvfp4_prepare_body(on, call.array("data"), call.array("block_scale"),
                                                 call.scalar("swizzle", true))}});
}

emulated::Result run_restore(const emulated::Call& call) {
    const Backend<Array> on(call);
    return on.result({{"out", nvfp4_restore_body(on, call.array("data"), call.array("global_scale"),
                                                 call.scalar("rows", int64_t{0}),
                                                 call.scalar("columns", int64_t{0}),
                                                 call.scalar("dtype", DType::bf16))}});
}

template <DType dtype>
void multiply_fused_dequant(const Params& params, const Choice& choice, emulated::Launch& scope) {
    constexpr gemm::Config config = gemm::fused_dequant_config(dtype);
    const Array workspace =
        emulated::allocate({pieces(params.n) * PIECE, pieces(params.k) * PIECE}, dtype);
    auto fused_dequant = gemm::fused_dequant_params(params, choice.raster_group, workspace.data);
    const Array counters =
        emulated::allocate({gemm::dequant_order(config, fused_dequant).counters()}, DType::int32);
    std::memset(counters.data, 0, static_cast<std::size_t>(counters.extent()));
    fused_dequant.counters = reinterpret_cast<int*>(counters.data);
    scope.may_write("dequantized", workspace);
    scope.may_write("counters", counters);
    gemm::launch_fused_dequant<config>(fused_dequant, nullptr);
}

emulated::Result nvfp4_gemm(const emulated::Call& call) {
    constexpr const char* OP = "tk.nvfp4_gemm";
    const Array& a = call.array("a");
    const Array *bias = call.optional("bias"), *offs = call.optional("offs");
    Array weight = packed(call.array("b"));
    const Array scale = packed(call.array("global_scale"));
    const int64_t m = a.size[0], k = a.size[1], n = call.scalar("n", int64_t{0});
    const int64_t groups = offs ? weight.size[0] : 1;
    const DType out_dtype = call.scalar("out_dtype", a.dtype);
    TK_CHECK(weight.elements() == groups * pieces(n) * pieces(k) * BYTES &&
                 scale.elements() == groups && (!bias || bias->elements() == n) &&
                 (!offs || offs->elements() == groups),
             OP, ": the operands do not match");
    Array out = emulated::allocate({m, n}, out_dtype);
    emulated::Result result;
    result.arrays["out"] = out;
    if (out.elements() == 0) return result;
    if (groups == 0) {
        std::memset(out.data, 0, static_cast<std::size_t>(out.extent()));
        return result;
    }
    const bool nothing = k == 0;
    Array rows = nothing ? emulated::allocate({m, 16}, a.dtype) : emulated::for_tensor_map(a);
    if (nothing) {
        std::memset(rows.data, 0, static_cast<std::size_t>(rows.extent()));
        weight = emulated::allocate({groups, pieces(n), 1, BYTES}, BYTE);
        std::memset(weight.data, 0, static_cast<std::size_t>(weight.extent()));
    }
    std::optional<Array> row, ends;
    if (bias) row = packed(*bias);
    if (offs) ends = packed(*offs);
    const Problem problem{.m = m,
                          .n = n,
                          .k = rows.size[1],
                          .groups = groups,
                          .dtype = a.dtype,
                          .out_dtype = out_dtype,
                          .grouped = offs != nullptr};
    check_supported(OP, problem, call.device);
    Choice choice = choose(problem, call.device);
    emulated::force(choice, call);
    const int in_cluster = choice.schedule.splits * choice.schedule.multicast;
    choice.schedule.blocks = (choice.schedule.blocks + in_cluster - 1) / in_cluster * in_cluster;
    Array workspace = emulated::allocate({workspace_bytes(choice.config, choice.schedule)}, BYTE);
    emulated::Launch scope("nvfp4_gemm " + kernel_name(choice));
    scope.may_read("a", rows);
    scope.may_read("b", weight);
    scope.may_read("global_scale", scale);
    if (row) scope.may_read("bias", *row);
    if (ends) scope.may_read("offs", *ends);
    scope.may_write("out", out);
    scope.may_write("workspace", workspace);
    const Params params{.a = rows.data,
                        .weight = weight.data,
                        .scale = reinterpret_cast<const float*>(scale.data),
                        .bias = row ? row->data : nullptr,
                        .offs = ends ? reinterpret_cast<const int32_t*>(ends->data) : nullptr,
                        .out = out.data,
                        .m = m,
                        .n = n,
                        .k = rows.size[1],
                        .groups = groups,
                        .a_stride = rows.stride[0],
                        .out_dtype = out_dtype,
                        .activation = static_cast<int>(call.scalar("activation", int64_t{0})),
                        .workspace = workspace.data,
                        .epoch = emulated::recorded(gemm::new_epoch()),
                        .schedule = choice.schedule};
    if (choice.fused_dequant) {
        if (a.dtype == DType::bf16)
            multiply_fused_dequant<DType::bf16>(params, choice, scope);
        else
            multiply_fused_dequant<DType::fp16>(params, choice, scope);
    } else {
        TK_CHECK(launch_any(choice.config, params, nullptr), OP, ": no kernel ",
                 kernel_name(choice));
    }
    result.choice = detail::fields_of(choice);
    result.choice.emplace("kernel", kernel_name(choice));
    return result;
}

const bool registered = emulated::register_run("nvfp4_prepare", &run_prepare) &&
                        emulated::register_run("nvfp4_dequantize.prepared", &run_restore) &&
                        emulated::register_run("nvfp4_gemm", &nvfp4_gemm);

}  // namespace
}  // namespace thunderkittens::nvfp4_gemm
