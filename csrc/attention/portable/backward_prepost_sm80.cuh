// Before and after the portable backward kernels: statistics of the rows, cleared sums, and sums of
// dQ, and of dK and dV where groups are split, brought from tiles of 16 x 16 into rows.
#pragma once

#include "csrc/attention/backward/backward_rows.cuh"
#include "csrc/attention/portable/copies_sm80.cuh"

namespace thunderkittens::attention {

using namespace kittens;

template <class T, int lanes>
__global__ __launch_bounds__(PREPROCESS_THREADS) void portable_statistics_kernel(
    const __grid_constant__ PreprocessGlobals<T> g) {
    preprocess<T, lanes>(g, [] {});
}

template <class T>
struct PortablePostprocessGlobals {
    StridedRows<T> to;
    SequenceTable sequences;
    PaddedRows rows;
    RowBlocks all;
    const float* sums;
    int sum_columns, columns;  // of the sums; of those the ones that exist
    const int* dq_semaphores;  // of block_m rows: 0 where nothing was summed; null: all was
    int block_m;
    int splits;  // of each head, whose partials are added
    float scale;
};

constexpr int POSTPROCESS_ROWS = 64;  // of a block, 16 of a warp
constexpr int POSTPROCESS_THREADS = 128;

template <class T>
__global__ __launch_bounds__(POSTPROCESS_THREADS) void portable_sums_kernel(
    const __grid_constant__ PortablePostprocessGlobals<T> g) {
    const auto [block, head, b] = g.all.place();
    const Lengths s = g.sequences.lengths(b);
    const int row = block * POSTPROCESS_ROWS + 16 * warpid();
    if (row >= s.q_length) return;
    const int64_t first = g.rows.first(b, s.q_begin, head * g.splits) + row;
    const bool summed =
        !g.dq_semaphores || arch::load_global(g.dq_semaphores + first / g.block_m) != 0;
    const float* from = g.sums + first * g.sum_columns + laneid();
    T* const to = g.to.at(b, head, s.q_begin + row, 0);
#pragma unroll 2
    for (int column = 0; column < g.columns; column += 16) {
        rt_fl<16, 16> tile;
        zero_tile(tile);
        const float* line = from + 16 * column;
        for (int split = 0; summed && split < g.splits; ++split) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float2& x = tile.tiles[0][0].data[i];
                x.x += arch::load_global(line + 64 * i);
                x.y += arch::load_global(line + 64 * i + 32);
            }
            line += g.rows.head * g.sum_columns;
        }
        scale_rows(tile, make_float2(g.scale, g.scale));
        store_tile<T>(tile, to + column, g.to.row_stride, s.q_length - row, g.columns - column);
    }
}

template <DType dtype>
__global__ __launch_bounds__(SINK_THREADS) void portable_sinks_kernel(
    const __grid_constant__ SinkGlobals g) {
    sum_sink(g);
}

template <DType dtype>
void launch_portable_preprocess(const BackwardParams& params, const Workspace& workspace,
                                const BackwardConfig& config, Stream stream) {
    using T = std::conditional_t<dtype == DType::bf16, bf16, half>;
    const Problem& p = params.problem;
    const int counters = PREPROCESS_ROWS / config.block_m;
    const auto globals = preprocess_globals<T>(
        params, workspace, DqTiles{PREPROCESS_ROWS, counters, config.head_dim / counters});
    const auto kernel = p.value_dim > 128  ? portable_statistics_kernel<T, 32>
                        : p.value_dim > 64 ? portable_statistics_kernel<T, 16>
                                           : portable_statistics_kernel<T, 8>;
    kittens::launch(kernel, preprocess_grid(p, globals.all), dim3(PREPROCESS_THREADS), dim3(1), 0,
                    stream, globals);
}

template <DType dtype>
void launch_portable_postprocess(const BackwardParams& params, const Workspace& workspace,
                                 const BackwardConfig& config, Stream stream) {
    using T = std::conditional_t<dtype == DType::bf16, bf16, half>;
    if (params.dsink != nullptr) {
        kittens::launch(portable_sinks_kernel<dtype>, dim3(unsigned(params.problem.q_heads)),
                        dim3(SINK_THREADS), dim3(1), 1024, stream, sink_globals(params, workspace));
    }
    const auto launch = [&](const Problem& p, const Sequences& sequences, const Operand& to,
                            const float* sums, int sum_columns, int64_t columns, int splits,
                            float scale, const int* dq_semaphores) {
        if (sums == nullptr || p.q_length == 0) return;
        const int64_t heads = p.q_heads / splits;
        const RowBlocks all{int((p.q_length + POSTPROCESS_ROWS - 1) / POSTPROCESS_ROWS),
                            int(heads)};
        const PortablePostprocessGlobals<T> globals{.to = StridedRows<T>(to, p.varlen),
                                                    .sequences = SequenceTable(p, sequences),
                                                    .rows = PaddedRows(p, sequences),
                                                    .all = all,
                                                    .sums = sums,
                                                    .sum_columns = sum_columns,
                                                    .columns = int(columns),
                                                    .dq_semaphores = dq_semaphores,
                                                    .block_m = config.block_m,
                                                    .splits = splits,
                                                    .scale = scale};
        kittens::launch(portable_sums_kernel<T>, all.grid(p.batch), dim3(POSTPROCESS_THREADS),
                        dim3(1), 0, stream, globals);
    };
    const Problem& p = params.problem;
    launch(p, params.sequences, params.dq, workspace.dq, config.head_dim, p.head_dim, 1,
           params.query_scale, params.deterministic ? workspace.dq_semaphores : nullptr);
    const Problem keys = keys_as_queries(p, params.head_splits);
    const Sequences packed = keys_as_queries(params.sequences);
    launch(keys, packed, params.dk, workspace.dk, config.head_dim, p.head_dim, params.head_splits,
           1.0f, nullptr);
    launch(keys, packed, params.dv, workspace.dv, config.values(), p.value_dim, params.head_splits,
           1.0f, nullptr);
}

}  // namespace thunderkittens::attention
