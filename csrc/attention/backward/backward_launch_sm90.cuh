// Launches the attention backward for head dimensions up to 128: statistics, main kernel, dQ.
#pragma once

#include <algorithm>

#include "csrc/attention/backward/backward_sm90.cuh"

namespace thunderkittens::attention {

template <class Kernel>
void launch_backward_kernels(const BackwardParams& params, Stream stream) {
    static_assert(sizeof(BackwardShared<Kernel>) + 1024 <= Kernel::shared_bytes,
                  "backward_memory() must count all of the block's shared memory");
    const Problem& p = params.problem;
    const Workspace workspace(params, Kernel::config);
    constexpr DqTiles tiles{Kernel::block_m, Kernel::dq_parts, Kernel::part_cols};
    launch_preprocess<Kernel::dtype>(params, workspace, tiles, stream);

    const int64_t q_rows = p.varlen ? params.sequences.total_q : p.q_length;
    const int64_t k_rows = p.varlen ? params.sequences.total_k : p.k_length;
    const auto of_queries = [&](const Operand& x, int64_t columns) {
        return Layout<typename Kernel::q_tile>(x, p.varlen, p.batch, p.q_heads, q_rows, columns);
    };
    const auto of_keys = [&](const Operand& x, int64_t columns) {
        return Layout<typename Kernel::v_tile>(x, p.varlen, p.batch, p.kv_heads, k_rows, columns);
    };
    const BackwardGlobals<Kernel> globals{
        .q = of_queries(params.q, p.head_dim),
        .grad_out = of_queries(params.grad_out, p.value_dim),
        .k = Layout<typename Kernel::k_tile>(params.k, p.varlen, p.batch, p.kv_heads, k_rows,
                                             p.head_dim),
        .v = of_keys(params.v, p.value_dim),
        .dk = of_keys(params.dk.data ? params.dk : params.k, p.head_dim),
        .dv = of_keys(params.dv.data ? params.dv : params.v, p.value_dim),
        .scheduler = typename Kernel::Scheduler(params, workspace.next_work_tile),
        .lse_log2 = workspace.lse_log2,
        .delta = workspace.delta,
        .dq = workspace.dq,
        .partial_dk = workspace.dk,
        .partial_dv = workspace.dv,
        .dq_semaphores = workspace.dq_semaphores,
        .score_mod = ScoreMod(params.scores),
        .scale = params.scores.scale,
        .scale_log2 = params.scores.scale * LOG2_E,
        .need_dk = params.dk.data != nullptr,
        .need_dv = params.dv.data != nullptr};
    const auto blocks = unsigned(std::min(globals.scheduler.tiles.work_tiles(), params.sm_count));
    if (blocks > 0) {
        kittens::launch({.dependent = true}, backward_kernel<Kernel>, dim3(blocks),
                        dim3(Kernel::threads), dim3(1), Kernel::shared_bytes, stream, globals);
    }
    launch_postprocess<Kernel::dtype>(params, workspace, tiles, Kernel::config, stream);
}

template <BackwardConfig config>
void launch_backward(const BackwardParams& params, Stream stream) {
    if (params.dq.data == nullptr)
        launch_backward_kernels<BackwardKernel<config, QueryGradient::none>>(params, stream);
    else if (params.deterministic)
        launch_backward_kernels<BackwardKernel<config, QueryGradient::deterministic>>(params,
                                                                                      stream);
    else
        launch_backward_kernels<BackwardKernel<config, QueryGradient::any_order>>(params, stream);
}

}  // namespace thunderkittens::attention
