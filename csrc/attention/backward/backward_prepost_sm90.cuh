// Preprocessing and postprocessing of the attention backward, per query row, for any head
// dimension. Before the main kernel: the statistics that it reads (LSE and delta), cleared
// counters, and a cleared dQ where its parts are added in any order. After it: dQ brought from the
// accumulator's order into rows, partial dK and dV added, and the gradient of the sinks.
#pragma once

#include <algorithm>

#include "csrc/attention/backward/backward_scheduler.cuh"
#include "csrc/attention/common/layouts.cuh"
#include "csrc/attention/common/softmax.cuh"
#include "csrc/common/check.h"

namespace thunderkittens::attention {

// The blocks of all heads of all sequences, in one dimension of the grid: the others end at 65535.
struct RowBlocks {
    int blocks, heads;  // of a head, of a sequence

    struct Place {
        int block, head, b;
    };
    __device__ __forceinline__ Place place() const {
        const int line = int(blockIdx.x) / blocks;
        return {int(blockIdx.x) % blocks, line % heads, line / heads};
    }
    dim3 grid(int64_t sequences) const { return dim3(unsigned(sequences * heads * blocks)); }
};

template <class T>
struct PreprocessGlobals {
    StridedRows<T> out, grad_out;
    int value_dim;
    const float* lse;       // (batch, heads, q_length), packed: (heads, tokens)
    const float* grad_lse;  // likewise, or null
    SequenceTable sequences;
    PaddedRows rows;
    RowBlocks all;
    int batch, q_limit;
    float* lse_log2;  // per row of the workspace
    float* delta;     // likewise
    int* next_work_tile;
    float* dq;           // null: not to be cleared
    int* dq_semaphores;  // as many as `parts` per block_m rows
    int block_m, parts, dq_columns;
    // Rows behind the last packed sequence get zero gradients.
    StridedRows<T> tail_dq, tail_dk, tail_dv;
    int head_dim, kv_heads;
};

constexpr int PREPROCESS_ROWS = 64;  // of a block
constexpr int PREPROCESS_THREADS = 256;

template <class T>
__device__ __forceinline__ void clear_rows(const PreprocessGlobals<T>& g, int block,
                                           const StridedRows<T>& rows, int head, int first, int end,
                                           int columns) {
    if (rows.data == nullptr) return;
    const int words = columns / 8;
    const int count = (end - first) * words, step = g.all.blocks * PREPROCESS_THREADS;
    for (int i = block * PREPROCESS_THREADS + int(threadIdx.x); i < count; i += step) {
        arch::store_global(
            reinterpret_cast<uint4*>(rows.at(0, head, first + i / words, i % words * 8)),
            make_uint4(0, 0, 0, 0));
    }
}
template <class T>
__device__ __forceinline__ void clear_tail(const PreprocessGlobals<T>& g, int block, int head) {
    const SequenceTable& s = g.sequences;
    const int first_q = s.lengths(g.batch).q_begin, first_k = s.lengths(g.batch).k_begin;
    clear_rows(g, block, g.tail_dq, head, first_q, s.q_length, g.head_dim);
    if (head >= g.kv_heads) return;
    clear_rows(g, block, g.tail_dk, head, first_k, s.k_length, g.head_dim);
    clear_rows(g, block, g.tail_dv, head, first_k, s.k_length, g.value_dim);
}

// `lanes` neighbours share a row, 8 elements each.
template <class T, int lanes>
__global__ __launch_bounds__(PREPROCESS_THREADS) void preprocess_kernel(
    const __grid_constant__ PreprocessGlobals<T> g) {
    const auto [block, head, b] = g.all.place();
    arch::launch_dependents();
    if (threadIdx.x == 0 && blockIdx.x == 0) arch::store_global(g.next_work_tile, 0);
    if (b == g.batch) {
        clear_tail(g, block, head);
        return;
    }
    const Lengths s = g.sequences.lengths(b);
    const int q_length = ::min(s.q_length, g.q_limit);
    const int first = block * PREPROCESS_ROWS;
    if (first >= (q_length + 127) / 128 * 128) return;
    const int64_t rows = g.rows.first(b, s.q_begin, head) + first;
    const int64_t statistics = g.rows.packed
                                   ? int64_t(head) * g.sequences.q_length + s.q_begin
                                   : (int64_t(b) * g.all.heads + head) * g.sequences.q_length;
    const int lane = threadIdx.x % lanes;
#pragma unroll 2
    for (int r = threadIdx.x / lanes; r < PREPROCESS_ROWS; r += PREPROCESS_THREADS / lanes) {
        const int row = first + r;
        float sum = 0.0f;
        if (row < q_length && 8 * lane < g.value_dim) {
            const int token = s.q_begin + row;
            const uint4 x = arch::load_global(
                reinterpret_cast<const uint4*>(g.out.at(b, head, token, 8 * lane)));
            const uint4 y = arch::load_global(
                reinterpret_cast<const uint4*>(g.grad_out.at(b, head, token, 8 * lane)));
            const auto* xs = reinterpret_cast<const packed_type<T>*>(&x);
            const auto* ys = reinterpret_cast<const packed_type<T>*>(&y);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 p = unpack_pair<T>(xs[i]), q = unpack_pair<T>(ys[i]);
                sum = fmaf(p.x, q.x, fmaf(p.y, q.y, sum));
            }
        }
#pragma unroll
        for (int distance = lanes / 2; distance > 0; distance /= 2) {
            sum += arch::shuffle_xor(sum, distance);
        }
        if (lane == 0) {
            float lse = INFINITY, delta = 0.0f;
            if (row < q_length) {
                const float value = arch::load_global(g.lse + statistics + row);
                // A row that sees nothing has weights exp(s - inf) = 0, and nothing infinite may
                // multiply them, as the gradient of its LSE may be.
                if (value != -INFINITY) {
                    lse = value * LOG2_E;
                    delta = sum;
                    if (g.grad_lse) delta -= arch::load_global(g.grad_lse + statistics + row);
                }
            }
            arch::store_global(g.lse_log2 + rows + r, lse);
            arch::store_global(g.delta + rows + r, delta);
        }
    }
    if (g.dq != nullptr) {
        auto* sums = reinterpret_cast<float4*>(g.dq + rows * g.dq_columns);
        for (int i = threadIdx.x; i < PREPROCESS_ROWS / 4 * g.dq_columns; i += PREPROCESS_THREADS) {
            arch::store_global(sums + i, make_float4(0.0f, 0.0f, 0.0f, 0.0f));
        }
    } else if (threadIdx.x < g.parts) {
        arch::store_global(g.dq_semaphores + g.parts * (rows / g.block_m) + threadIdx.x, 0);
    }
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

struct SinkGlobals {
    const float *lse_log2, *delta;  // per row of the workspace
    const float* sink;              // (heads,)
    float* dsink;                   // (heads,)
    SequenceTable sequences;
    PaddedRows rows;
    int batch, q_limit;
};
constexpr int SINK_THREADS = 512;

// The weight of a row's sink times -delta, summed over all rows of a head, in a fixed order.
static __global__ __launch_bounds__(SINK_THREADS) void sink_kernel(
    const __grid_constant__ SinkGlobals g) {
    shared_allocator allocator(shared_memory());
    auto& partial = allocator.template allocate<sv<float, 16>>();
    const int head = blockIdx.x;
    const float sink = arch::load_global(g.sink + head) * LOG2_E;
    float sum = 0.0f;
    for (int b = 0; b < g.batch; ++b) {
        const Lengths s = g.sequences.lengths(b);
        const int64_t rows = g.rows.first(b, s.q_begin, head);
        const int q_length = ::min(s.q_length, g.q_limit);
        for (int row = threadIdx.x; row < q_length; row += SINK_THREADS) {
            const float weight =
                arch::exp2_approx(sink - arch::load_global(g.lse_log2 + rows + row));
            sum = fmaf(-weight, arch::load_global(g.delta + rows + row), sum);
        }
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) sum += arch::shuffle_xor(sum, distance);
    if (laneid() == 0) arch::store_shared(partial.address_of(threadIdx.x / 32), sum);
    arch::sync_block();
    if (threadIdx.x == 0) {
        float total = 0.0f;
        for (int w = 0; w < SINK_THREADS / 32; ++w) {
            total += arch::load_shared<float>(partial.address_of(w));
        }
        arch::store_global(g.dsink + head, total);
    }
}

template <class T>
void launch_preprocess_kernel(const BackwardParams& params, const Workspace& workspace,
                              const DqTiles& tiles, Stream stream) {
    const Problem& p = params.problem;
    const RowBlocks all{int(std::max<int64_t>(padded_rows(p.q_length), 128) / PREPROCESS_ROWS),
                        int(p.q_heads)};
    const PreprocessGlobals<T> globals{.out = StridedRows<T>(params.out, p.varlen),
                                       .grad_out = StridedRows<T>(params.grad_out, p.varlen),
                                       .value_dim = int(p.value_dim),
                                       .lse = params.lse,
                                       .grad_lse = params.grad_lse,
                                       .sequences = SequenceTable(p, params.sequences),
                                       .rows = PaddedRows(p, params.sequences),
                                       .all = all,
                                       .batch = int(p.batch),
                                       .q_limit = int(p.q_length),
                                       .lse_log2 = workspace.lse_log2,
                                       .delta = workspace.delta,
                                       .next_work_tile = workspace.next_work_tile,
                                       .dq = params.deterministic ? nullptr : workspace.dq,
                                       .dq_semaphores = workspace.dq_semaphores,
                                       .block_m = tiles.block_m,
                                       .parts = tiles.parts,
                                       .dq_columns = tiles.columns(),
                                       .tail_dq = StridedRows<T>(params.dq, p.varlen),
                                       .tail_dk = StridedRows<T>(params.dk, p.varlen),
                                       .tail_dv = StridedRows<T>(params.dv, p.varlen),
                                       .head_dim = int(p.head_dim),
                                       .kv_heads = int(p.kv_heads)};
    const auto kernel = p.value_dim > 128  ? preprocess_kernel<T, 32>
                        : p.value_dim > 64 ? preprocess_kernel<T, 16>
                                           : preprocess_kernel<T, 8>;
    kittens::launch(kernel, all.grid(p.batch + (p.varlen ? 1 : 0)), dim3(PREPROCESS_THREADS),
                    dim3(1), 0, stream, globals);
}

inline void launch_sink_kernel(const BackwardParams& params, const Workspace& workspace,
                               Stream stream) {
    const Problem& p = params.problem;
    const SinkGlobals globals{.lse_log2 = workspace.lse_log2,
                              .delta = workspace.delta,
                              .sink = params.scores.sink,
                              .dsink = params.dsink,
                              .sequences = SequenceTable(p, params.sequences),
                              .rows = PaddedRows(p, params.sequences),
                              .batch = int(p.batch),
                              .q_limit = int(p.q_length)};
    kittens::launch(sink_kernel, dim3(unsigned(p.q_heads)), dim3(SINK_THREADS), dim3(1), 1024,
                    stream, globals);
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
