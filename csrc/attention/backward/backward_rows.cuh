// What a row of the attention backward needs around its main kernel, for the kernels for Hopper and
// the portable ones: the statistics that the main kernel reads (LSE and delta), cleared counters, a
// cleared dQ where its parts are added in any order, and the gradient of the sinks.
#pragma once

#include <algorithm>

#include "csrc/attention/backward/backward_scheduler.cuh"
#include "csrc/attention/common/layouts.cuh"

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

// What a block of the preprocessing does; `lanes` neighbours share a row, 8 elements each. begin()
// comes before its first access to memory.
template <class T, int lanes, class Begin>
__device__ __forceinline__ void preprocess(const PreprocessGlobals<T>& g, Begin begin) {
    const auto [block, head, b] = g.all.place();
    begin();
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
__device__ __forceinline__ void sum_sink(const SinkGlobals& g) {
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
PreprocessGlobals<T> preprocess_globals(const BackwardParams& params, const Workspace& workspace,
                                        const DqTiles& tiles) {
    const Problem& p = params.problem;
    const RowBlocks all{int(std::max<int64_t>(padded_rows(p.q_length), 128) / PREPROCESS_ROWS),
                        int(p.q_heads)};
    return {.out = StridedRows<T>(params.out, p.varlen),
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
}
inline dim3 preprocess_grid(const Problem& p, const RowBlocks& all) {
    return all.grid(p.batch + (p.varlen ? 1 : 0));
}
inline SinkGlobals sink_globals(const BackwardParams& params, const Workspace& workspace) {
    const Problem& p = params.problem;
    return {.lse_log2 = workspace.lse_log2,
            .delta = workspace.delta,
            .sink = params.scores.sink,
            .dsink = params.dsink,
            .sequences = SequenceTable(p, params.sequences),
            .rows = PaddedRows(p, params.sequences),
            .batch = int(p.batch),
            .q_limit = int(p.q_length)};
}

}  // namespace thunderkittens::attention
