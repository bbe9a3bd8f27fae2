// Launches the attention backward for head dimensions above 128: statistics, main kernel, dQ.
#pragma once

#include <algorithm>

#include "csrc/attention/backward/backward_d256_dkdv_sm90.cuh"

namespace thunderkittens::attention {

template <BackwardConfig config>
void launch_backward_d256(const BackwardParams& params, Stream stream) {
    using Kernel = BackwardD256Kernel<config>;
    static_assert(sizeof(BackwardD256Shared<Kernel>) + 1024 <= Kernel::shared_bytes,
                  "backward_d256_memory() must count all of the block's shared memory");
    const Problem& p = params.problem;
    const Workspace workspace(params, config);
    constexpr DqTiles tiles{Kernel::block_m, Kernel::blocks, Kernel::dq_cols};
    launch_preprocess<Kernel::dtype>(params, workspace, tiles, stream);

    const int64_t q_rows = p.varlen ? params.sequences.total_q : p.q_length;
    const int64_t k_rows = p.varlen ? params.sequences.total_k : p.k_length;
    const auto of_queries = [&](const Operand& x, int64_t columns) {
        return Layout<typename Kernel::share>(x, p.varlen, p.batch, p.q_heads, q_rows, columns);
    };
    const auto of_keys = [&]<class Tile>(const Operand& x, int64_t columns, Tile*) {
        return Layout<Tile>(x, p.varlen, p.batch, p.kv_heads, k_rows, columns);
    };
    constexpr typename Kernel::k_tile* k_tile = nullptr;
    constexpr typename Kernel::k_half* k_half = nullptr;
    constexpr typename Kernel::v_tile* v_tile = nullptr;
    const BackwardD256Globals<Kernel> globals{
        .q = of_queries(params.q, p.head_dim),
        .grad_out = of_queries(params.grad_out, p.value_dim),
        .k = of_keys(params.k, p.head_dim, k_tile),
        .dk = of_keys(params.dk.data ? params.dk : params.k, p.head_dim, k_tile),
        .k_peer = of_keys(params.k, p.head_dim, k_half),
        .v = of_keys(params.v, p.value_dim, v_tile),
        .dv = of_keys(params.dv.data ? params.dv : params.v, p.value_dim, v_tile),
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
        .need_dq = params.dq.data != nullptr,
        .need_dk = params.dk.data != nullptr,
        .need_dv = params.dv.data != nullptr,
        .deterministic = params.deterministic};
    const int clusters = std::min(globals.scheduler.tiles.work_tiles(),
                                  std::max(params.sm_count / Kernel::blocks, 1));
    if (clusters > 0) {
        kittens::launch({.dependent = true}, backward_d256_kernel<Kernel>,
                        dim3(unsigned(clusters * Kernel::blocks)), dim3(Kernel::threads),
                        dim3(Kernel::blocks), Kernel::shared_bytes, stream, globals);
    }
    launch_postprocess<Kernel::dtype>(params, workspace, tiles, config, stream);
}

}  // namespace thunderkittens::attention
