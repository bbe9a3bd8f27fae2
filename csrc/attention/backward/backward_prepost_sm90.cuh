// Preprocessing and postprocessing of the attention backward, per query row, for any head
// dimension. Before the main kernel: backward_rows.cuh. After it: dQ brought from the accumulator's
// order into rows, partial dK and dV added, and the gradient of the sinks.
#pragma once

#include "csrc/attention/backward/backward_rows.cuh"
#include "csrc/attention/common/softmax.cuh"
#include "csrc/common/check.h"

namespace thunderkittens::attention {

template <class T, int lanes>
__global__ __launch_bounds__(PREPROCESS_THREADS) void preprocess_kernel(
    const __grid_constant__ PreprocessGlobals<T> g) {
    preprocess<T, lanes>(g, [] {
        arch::wait_for_dependencies();
        arch::launch_dependents();
    });
}

template <class T, int part_cols>
struct PostprocessGlobals {
    using tile = st<T, 64, part_cols>;
    Layout<tile> dq;
    SequenceTable sequences;
    PaddedRows rows;
    RowBlocks all;
    const float* sums;
    const int* dq_semaphores;  // per part, the first: 0 where nothing was summed; null: all was
    int splits;                // of each head, whose partials are added
    float scale;
};

// A block brings one tile of dQ (of dK or dV, where groups are split) in order; its warpgroups hold
// what the consumers had.
template <class T, int block_m, int parts, int part_cols>
__global__ __launch_bounds__(parts* WARPGROUP_THREADS) void postprocess_kernel(
    const __grid_constant__ PostprocessGlobals<T, part_cols> g) {
    shared_allocator allocator(shared_memory());
    auto& tiles =
        allocator.template allocate<typename PostprocessGlobals<T, part_cols>::tile, parts>();
    arch::wait_for_dependencies();
    arch::launch_dependents();
    const int id = arch::warp_uniform(warpgroup::groupid());
    const auto [block, head, b] = g.all.place();
    const Lengths s = g.sequences.lengths(b);
    constexpr int row_parts = block_m / 64, part_floats = 64 * part_cols;
    const int row = block * block_m + 64 * (id % row_parts);
    if (row >= s.q_length) return;
    const int64_t tile = g.rows.first(b, s.q_begin, head * g.splits) / block_m + block;
    const float* from = g.sums + (tile * parts + id) * part_floats + 4 * warpgroup::laneid();
    const bool summed = !g.dq_semaphores || arch::load_global(g.dq_semaphores + tile * parts) != 0;
    rt_fl<16, part_cols> part;
    zero_tile(part);
    for (int split = 0; summed && split < g.splits; ++split) {
#pragma unroll
        for (int j = 0; j < part.width; ++j) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float4 x = arch::load_global(
                    reinterpret_cast<const float4*>(from + (2 * j + half) * 4 * WARPGROUP_THREADS));
                float2 &high = part.tiles[0][j].data[2 * half],
                       &low = part.tiles[0][j].data[2 * half + 1];
                high = make_float2(high.x + x.x, high.y + x.y);
                low = make_float2(low.x + x.z, low.y + x.w);
            }
        }
        from += g.rows.head / block_m * (parts * part_floats);
    }
    scale_rows(part, make_float2(g.scale, g.scale));
    warpgroup::store(tiles[id], part);
    arch::fence_async_shared();
    warpgroup::sync(1 + id);
    if (warpgroup::laneid() == 0) {
        g.dq.store(tiles[id], b, head, s.q_begin, s.q_length, row, part_cols * (id / row_parts));
        tma::store_async_read_wait();
    }
}

static __global__ __launch_bounds__(SINK_THREADS) void sink_kernel(
    const __grid_constant__ SinkGlobals g) {
    sum_sink(g);
}

template <class T>
void launch_preprocess_kernel(const BackwardParams& params, const Workspace& workspace,
                              const DqTiles& tiles, Stream stream) {
    const Problem& p = params.problem;
    const auto globals = preprocess_globals<T>(params, workspace, tiles);
    const auto kernel = p.value_dim > 128  ? preprocess_kernel<T, 32>
                        : p.value_dim > 64 ? preprocess_kernel<T, 16>
                                           : preprocess_kernel<T, 8>;
    kittens::launch({.dependent = true}, kernel, preprocess_grid(p, globals.all),
                    dim3(PREPROCESS_THREADS), dim3(1), 0, stream, globals);
}

inline void launch_sink_kernel(const BackwardParams& params, const Workspace& workspace,
                               Stream stream) {
    kittens::launch(sink_kernel, dim3(unsigned(params.problem.q_heads)), dim3(SINK_THREADS),
                    dim3(1), 1024, stream, sink_globals(params, workspace));
}

// What is brought in order: sums per query, or per key with the problem's keys as queries.
struct Postprocess {
    Operand to;
    int64_t columns;
    const float* sums;
    const int* dq_semaphores;
    int splits;
    float scale;
    bool dependent;
};

template <class T, int block_m, int parts, int part_cols>
bool launch_postprocess_kernel(const Problem& p, const Sequences& sequences,
                               const Postprocess& call, const DqTiles& tiles, Stream stream) {
    if (tiles != DqTiles{block_m, parts, part_cols}) return false;
    if (p.q_length == 0) return true;
    using Globals = PostprocessGlobals<T, part_cols>;
    using Tile = typename Globals::tile;
    const int64_t heads = p.q_heads / call.splits;
    const RowBlocks all{int((p.q_length + block_m - 1) / block_m), int(heads)};
    const Globals globals{
        .dq = Layout<Tile>(call.to, p.varlen, p.batch, heads,
                           p.varlen ? sequences.total_q : p.q_length, call.columns),
        .sequences = SequenceTable(p, sequences),
        .rows = PaddedRows(p, sequences),
        .all = all,
        .sums = call.sums,
        .dq_semaphores = call.dq_semaphores,
        .splits = call.splits,
        .scale = call.scale};
    kittens::launch({.dependent = call.dependent}, postprocess_kernel<T, block_m, parts, part_cols>,
                    all.grid(p.batch), dim3(parts * WARPGROUP_THREADS), dim3(1),
                    parts * sizeof(Tile) + 1024, stream, globals);
    return true;
}
template <class T>
void launch_postprocess_kernel(const Problem& p, const Sequences& sequences,
                               const Postprocess& call, const DqTiles& tiles, Stream stream) {
    const bool found =
        launch_postprocess_kernel<T, 128, 2, 64>(p, sequences, call, tiles, stream) ||
        launch_postprocess_kernel<T, 64, 2, 32>(p, sequences, call, tiles, stream) ||
        launch_postprocess_kernel<T, 64, 2, 48>(p, sequences, call, tiles, stream) ||
        launch_postprocess_kernel<T, 64, 2, 64>(p, sequences, call, tiles, stream) ||
        launch_postprocess_kernel<T, 64, 2, 96>(p, sequences, call, tiles, stream) ||
        launch_postprocess_kernel<T, 64, 2, 128>(p, sequences, call, tiles, stream);
    TK_CHECK(found, "tk.attention: no kernel for sums in parts of ", tiles.part_cols, " columns");
}
template <DType dtype>
void launch_preprocess(const BackwardParams& params, const Workspace& workspace,
                       const DqTiles& tiles, Stream stream) {
    using T = std::conditional_t<dtype == DType::bf16, bf16, half>;
    launch_preprocess_kernel<T>(params, workspace, tiles, stream);
}

template <DType dtype>
void launch_postprocess(const BackwardParams& params, const Workspace& workspace,
                        const DqTiles& tiles, const BackwardConfig& config, Stream stream) {
    using T = std::conditional_t<dtype == DType::bf16, bf16, half>;
    const Problem& p = params.problem;
    if (params.dsink != nullptr) launch_sink_kernel(params, workspace, stream);
    if (params.dq.data != nullptr) {
        launch_postprocess_kernel<T>(
            p, params.sequences,
            {.to = params.dq,
             .columns = p.head_dim,
             .sums = workspace.dq,
             .dq_semaphores = params.deterministic ? workspace.dq_semaphores : nullptr,
             .splits = 1,
             .scale = params.query_scale,
             .dependent = params.dsink == nullptr},
            tiles, stream);
    }
    const auto add_partials = [&](const Operand& to, const float* sums, int64_t columns,
                                  int width) {
        if (sums == nullptr) return;
        launch_postprocess_kernel<T>(keys_as_queries(p, params.head_splits),
                                     keys_as_queries(params.sequences),
                                     {.to = to,
                                      .columns = columns,
                                      .sums = sums,
                                      .dq_semaphores = nullptr,
                                      .splits = params.head_splits,
                                      .scale = 1.0f,
                                      .dependent = true},
                                     DqTiles{64, 2, width / 2}, stream);
    };
    add_partials(params.dk, workspace.dk, p.head_dim, config.head_dim);
    add_partials(params.dv, workspace.dv, p.value_dim, config.values());
}

}  // namespace thunderkittens::attention
