// Attention forward of short queries against long keys, as in decoding: what counts is to read K
// and V at the full speed of memory, so the keys are split among blocks until the GPU is full, and
// all query heads that share keys are rows of one tile.
//
// A block works on 64 rows (query position by query position, in each the heads of a group) and on
// a range of key blocks. Roles:
//   consumers  one warpgroup: loads Q itself, then S = Q K^T, softmax in registers, O += P V
//   producer   one more warp, of which one thread brings K and V by TMA into two deep rings
// The partial outputs of a row, each normalised, and their LSEs go to memory, and a second kernel
// combines them in the order of the keys: reruns are bit-equal.
#pragma once

#include "csrc/attention/common/layouts.cuh"
#include "csrc/attention/common/scores.cuh"
#include "csrc/attention/common/tile_scheduler.cuh"
#include "csrc/attention/forward/forward.h"
#include "kittens/kittens.cuh"

namespace thunderkittens::attention {

using namespace kittens;

template <Config config>
struct SplitKvKernel {
    using T = std::conditional_t<config.dtype == DType::bf16, bf16, half>;
    static_assert(config.warpgroups == 1 && config.score_mod);
    static constexpr int head_dim = config.head_dim;
    static constexpr int block_n = config.block_n;
    static constexpr int stages = config.stages;
    static constexpr int threads = WARPGROUP_THREADS + WARP_THREADS;
    static constexpr int blocks_per_sm = split_kv_blocks_per_sm(config);

    using q_tile = st<T, 64, head_dim>;
    using k_tile = st<T, block_n, head_dim>;
    using v_tile = st<T, block_n, config.value_dim>;
    static constexpr int shared_bytes = forward_memory(config).bytes;
};

// Where the results of (batch, head, position) are. Dense: (batch, heads, positions), packed:
// (heads, tokens).
template <class T>
struct SplitKvResults {
    StridedRows<T> out;
    float* lse;  // may be null
    const float* sink;
    float *partial_out,
        *partial_lse;  // (splits, lines * positions, value_dim) and without the last
    int splits;        // 0: the first kernel writes the output itself
    int heads, positions, value_dim;
    int64_t rows;  // lines * positions

    __device__ __forceinline__ int64_t row(int b, int head, int position, bool packed) const {
        return (packed ? head : int64_t(b) * heads + head) * positions + position;
    }
};

template <class Kernel>
struct SplitKvGlobals {
    StridedRows<typename Kernel::T> q;
    Layout<typename Kernel::k_tile> k;
    Layout<typename Kernel::v_tile> v;
    SplitKvResults<typename Kernel::T> results;
    SequenceTable sequences;
    ScoreMod score_mod;
    int head_dim, kv_heads, group;
    int tiles, splits;  // blocks of rows per key head; ranges of keys
    Divisor by_group, by_splits, by_tiles, by_heads;
};

template <class Kernel>
struct SplitKvShared {
    typename Kernel::q_tile q;
    typename Kernel::k_tile k[Kernel::stages];
    typename Kernel::v_tile v[Kernel::stages];
    semaphore k_full[Kernel::stages], k_empty[Kernel::stages];
    semaphore v_full[Kernel::stages], v_empty[Kernel::stages];
};

// One block's share: key blocks [begin, end), from the last down.
template <class Kernel>
struct SplitKvWork {
    int b, kv_head, split, first_row, first_position;
    Lengths s;
    KeyBlocks keys;
    int begin, end;

    __device__ __forceinline__ SplitKvWork(const SplitKvGlobals<Kernel>& g) {
        const int index = static_cast<int>(blockIdx.x);
        const int of_all = g.by_splits.quotient(index), line = g.by_tiles.quotient(of_all);
        split = index - of_all * g.splits;
        first_row = 64 * (of_all - line * g.tiles);
        b = g.by_heads.quotient(line);
        kv_head = line - b * g.kv_heads;
        s = g.sequences.lengths(b);
        first_position = g.by_group.quotient(first_row);
        const int last = ::min(g.by_group.quotient(first_row + 63), s.q_length - 1);
        keys = key_blocks<Kernel::block_n>(s, first_position, last);
        const int count = has_rows() ? keys.end - keys.begin : 0;
        begin = keys.begin + g.by_splits.quotient(count * split);
        end = keys.begin + g.by_splits.quotient(count * (split + 1));
    }
    __device__ __forceinline__ bool has_rows() const { return s.q_length > first_position; }
};

template <class Kernel>
__device__ __forceinline__ void split_kv_produce(const SplitKvGlobals<Kernel>& g,
                                                 SplitKvShared<Kernel>& shared,
                                                 const SplitKvWork<Kernel>& work) {
    RingPosition<Kernel::stages> at;
    for (int block = work.end - 1; block >= work.begin; --block) {
        const int row = block * Kernel::block_n;
        wait(shared.k_empty[at.stage], at.phase ^ 1);
        tma::expect(shared.k_full[at.stage], shared.k[at.stage]);
        g.k.load(shared.k[at.stage], work.b, work.kv_head, work.s.k_begin, work.s.k_length, row,
                 shared.k_full[at.stage]);
        wait(shared.v_empty[at.stage], at.phase ^ 1);
        tma::expect(shared.v_full[at.stage], shared.v[at.stage]);
        g.v.load(shared.v[at.stage], work.b, work.kv_head, work.s.k_begin, work.s.k_length, row,
                 shared.v_full[at.stage]);
        at.advance();
    }
}

template <class Kernel>
struct SplitKvConsumer {
    using T = typename Kernel::T;
    static constexpr int block_n = Kernel::block_n;
    using scores = rt_fl<16, block_n>;
    using weights = rt<T, 16, block_n>;
    using output = rt_fl<16, Kernel::v_tile::cols>;

    const SplitKvGlobals<Kernel>& g;
    SplitKvShared<Kernel>& shared;
    const SplitKvWork<Kernel>& work;

    // A row of the tile.
    struct Row {
        int position, head;
        bool exists;
    };
    __device__ __forceinline__ Row row_of(int row) const {
        const int index = work.first_row + row;
        const int position = g.by_group.quotient(index);
        return {position, work.kv_head * g.group + index - position * g.group,
                position < work.s.q_length};
    }
    __device__ __forceinline__ void release(semaphore& s) {
        if (warpgroup::laneid() == 0) arrive(s);
    }

    // Several loads are on their way at a time. Threads beyond whole rows have none.
    __device__ __forceinline__ void load_query() {
        constexpr int per_load = 16 / int(sizeof(T));
        constexpr int row_loads = Kernel::head_dim / per_load;
        constexpr int rows_apart = WARPGROUP_THREADS / row_loads;
        constexpr int loads = (64 + rows_apart - 1) / rows_apart, together = loads < 8 ? loads : 8;
        const int first = warpgroup::laneid() / row_loads;
        const int column = warpgroup::laneid() % row_loads * per_load;
        const auto is_there = [&](int row) { return first < rows_apart && row < 64; };
#pragma unroll
        for (int begin = 0; begin < loads; begin += together) {
            uint4 values[together];
#pragma unroll
            for (int i = 0; i < together; ++i) {
                const int in_tile = first + (begin + i) * rows_apart;
                const Row row = row_of(in_tile);
                values[i] = make_uint4(0, 0, 0, 0);
                if (is_there(in_tile) && row.exists && column < g.head_dim) {
                    const T* from = g.q.at(work.b, row.head, work.s.q_begin + row.position, column);
                    values[i] = arch::load_global(reinterpret_cast<const uint4*>(from));
                }
            }
#pragma unroll
            for (int i = 0; i < together; ++i) {
                const int row = first + (begin + i) * rows_apart;
                if (is_there(row)) arch::store_shared(shared.q.address_of(row, column), values[i]);
            }
        }
        arch::fence_async_shared();
        warpgroup::sync(1);
    }

    __device__ __forceinline__ void run() {
        load_query();
        const int row = warpgroup::warpid() * 16 + laneid() / 4;
        const Row upper = row_of(row), lower = row_of(row + 8);
        const float2 slope = {g.score_mod.slope(work.b, upper.exists ? upper.head : 0),
                              g.score_mod.slope(work.b, lower.exists ? lower.head : 0)};
        RingPosition<Kernel::stages> at;
        OnlineSoftmax softmax;
        output o;
        zero_tile(o);
        for (int block = work.end - 1; block >= work.begin; --block) {
            const auto columns = [&](int offset) -> Int2 {
                const int column = block * block_n + 2 * (laneid() % 4) - offset;
                return {upper.position - column, lower.position - column};
            };
            scores s;
            wait(shared.k_full[at.stage], at.phase);
            warpgroup::mm_ABt(s, shared.q, shared.k[at.stage]);
            warpgroup::mma_async_wait<0>(s);
            release(shared.k_empty[at.stage]);
            const Shift shift = g.score_mod.template apply<T>(s, columns(work.s.diagonal), slope);
            if (block >= work.keys.unmasked_end || block < work.keys.unmasked_begin) {
                const Int2 last = columns(work.s.high);
                const int end = work.s.k_length - 1 - block * block_n - 2 * (laneid() % 4);
                mask_outside(s, columns(work.s.low), {::min(last.x, end), ::min(last.y, end)});
            }
            float2 rescale = {1.0f, 1.0f};
            if (softmax.update(s, g.score_mod.unit_log2, shift, rescale)) scale_rows(o, rescale);
            weights p;
            convert_scores(p, s);
            wait(shared.v_full[at.stage], at.phase);
            warpgroup::mma_AB(o, p, shared.v[at.stage]);
            warpgroup::mma_async_wait<0>(o);
            release(shared.v_empty[at.stage]);
            at.advance();
        }
        softmax.reduce_sum();
        if (g.results.splits == 0)
            store_final(o, softmax, upper, lower);
        else
            store_partial(o, softmax, upper, lower);
    }

    // Calls f(column, the two values, true for the lower row) on pairs of columns that exist.
    template <class F>
    __device__ __forceinline__ void for_each_pair(const output& o, F f) {
        const int first = 2 * (laneid() % 4);
#pragma unroll
        for (int j = 0; j < output::width; ++j) {
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const int column = 16 * j + 8 * (k / 2) + first;
                if (column < g.results.value_dim) f(column, o.tiles[0][j].data[k], k % 2 == 1);
            }
        }
    }
    __device__ __forceinline__ int64_t result_row(const Row& r) const {
        return g.results.row(work.b, r.head, work.s.q_begin + r.position, g.q.packed);
    }

    __device__ __forceinline__ void store_partial(output& o, OnlineSoftmax& softmax,
                                                  const Row& upper, const Row& lower) {
        scale_rows(o, softmax.reciprocal_sum());
        const float2 lse = softmax.lse();
        const auto& to = g.results;
        const int64_t first = work.split * to.rows;
        float* const lse_rows[] = {to.partial_lse + first + result_row(upper),
                                   to.partial_lse + first + result_row(lower)};
        if (laneid() % 4 == 0) {
            if (upper.exists) arch::store_global(lse_rows[0], lse.x);
            if (lower.exists) arch::store_global(lse_rows[1], lse.y);
        }
        if (work.end <= work.begin) return;  // the combination reads no output of weight 0
        float* const rows[] = {to.partial_out + (first + result_row(upper)) * to.value_dim,
                               to.partial_out + (first + result_row(lower)) * to.value_dim};
        for_each_pair(o, [&](int column, float2 pair, bool low) {
            if (low ? lower.exists : upper.exists)
                arch::store_global(reinterpret_cast<float2*>(rows[low] + column), pair);
        });
    }
    __device__ __forceinline__ void store_final(output& o, OnlineSoftmax& softmax, const Row& upper,
                                                const Row& lower) {
        const auto& to = g.results;
        float2 factor = {1.0f, 1.0f};
        if (to.sink != nullptr) {
            const auto logit = [&](const Row& r) {
                return LOG2_E * arch::load_global_readonly(to.sink + (r.exists ? r.head : 0));
            };
            factor = softmax.add_sink({logit(upper), logit(lower)});
        }
        const float2 reciprocal = softmax.reciprocal_sum();
        scale_rows(o, {factor.x * reciprocal.x, factor.y * reciprocal.y});
        const float2 lse = softmax.lse();
        if (to.lse != nullptr && laneid() % 4 == 0) {
            if (upper.exists) arch::store_global(to.lse + result_row(upper), lse.x);
            if (lower.exists) arch::store_global(to.lse + result_row(lower), lse.y);
        }
        T* const rows[] = {to.out.at(work.b, upper.head, work.s.q_begin + upper.position, 0),
                           to.out.at(work.b, lower.head, work.s.q_begin + lower.position, 0)};
        for_each_pair(o, [&](int column, float2 pair, bool low) {
            if (low ? lower.exists : upper.exists)
                arch::store_global(reinterpret_cast<packed_type<T>*>(rows[low] + column),
                                   pack_pair<T>(pair.x, pair.y));
        });
    }
};

template <class Kernel>
__global__ __launch_bounds__(Kernel::threads, Kernel::blocks_per_sm) void split_kv_kernel(
    const __grid_constant__ SplitKvGlobals<Kernel> g) {
    shared_allocator allocator(shared_memory());
    auto& shared = allocator.template allocate<SplitKvShared<Kernel>>();
    if (threadIdx.x == 0) {
        for (int s = 0; s < Kernel::stages; ++s) {
            init_semaphore(shared.k_full[s], 1);
            init_semaphore(shared.k_empty[s], 1);
            init_semaphore(shared.v_full[s], 1);
            init_semaphore(shared.v_empty[s], 1);
        }
        arch::mbarrier_init_fence();
    }
    arch::sync_block();
    // What comes next waits for the results by itself, and is ready by then.
    arch::wait_for_dependencies();
    arch::launch_dependents();
    const SplitKvWork<Kernel> work(g);
    if (!work.has_rows()) return;
    if (arch::warp_uniform(warpgroup::groupid()) == 0)
        SplitKvConsumer<Kernel>{g, shared, work}.run();
    else if (laneid() == 0)
        split_kv_produce(g, shared, work);
}

// Combines the splits of a row: one warp, or where there are many splits the four warps of a block,
// each of which adds up every fourth; then the sums of the warps are added.
template <class T>
struct CombineGlobals {
    SplitKvResults<T> results;
    SequenceTable sequences;
};
constexpr int COMBINE_WARPS = 4, COMBINE_THREADS = COMBINE_WARPS * WARP_THREADS;
static_assert(MAX_SPLITS <= COMBINE_THREADS && MAX_SPLITS_OF_WARP <= WARP_THREADS);
struct CombineShared {
    float weights[COMBINE_THREADS];
    float warp_top[COMBINE_WARPS], warp_sum[COMBINE_WARPS];
    float2 sums[COMBINE_WARPS][COMBINE_THREADS];  // pairs of columns
};
// What a row's results are of, and its sink; nobody: it is behind the last packed sequence.
template <class T>
struct CombineRow {
    int head, position, b;
    bool nobody;
    float sink;

    __device__ __forceinline__ CombineRow(const CombineGlobals<T>& g, int64_t row) {
        const auto& r = g.results;
        const int line = static_cast<int>(row / r.positions);
        position = static_cast<int>(row - int64_t(line) * r.positions);
        head = line % r.heads, b = line / r.heads;
        nobody = g.sequences.cu_q != nullptr &&
                 position >= arch::load_global_readonly(g.sequences.cu_q + g.sequences.batch);
        sink = r.sink == nullptr || nobody ? -INFINITY : arch::load_global_readonly(r.sink + head);
    }
    // Of a split's results.
    static __device__ __forceinline__ float2 part(const SplitKvResults<T>& r, int64_t row,
                                                  int split, int pair) {
        return arch::load_global(reinterpret_cast<const float2*>(
            r.partial_out + (split * r.rows + row) * r.value_dim + 2 * pair));
    }
    __device__ __forceinline__ void store(const SplitKvResults<T>& r, int pair, float2 o,
                                          float reciprocal) const {
        T* to = r.out.at(b, head, position, 2 * pair);
        arch::store_global(reinterpret_cast<packed_type<T>*>(to),
                           pack_pair<T>(o.x * reciprocal, o.y * reciprocal));
    }
    static __device__ __forceinline__ void store_lse(const SplitKvResults<T>& r, int64_t row,
                                                     float base, float sum) {
        if (r.lse != nullptr)
            arch::store_global(r.lse + row, sum == 0.0f ? -INFINITY : base + logf(sum));
    }
};

template <class T>
__global__ __launch_bounds__(COMBINE_THREADS) void combine_kernel(
    const __grid_constant__ CombineGlobals<T> g) {
    auto& shared = arch::static_shared<CombineShared>();
    const auto& r = g.results;
    const int64_t row = blockIdx.x;
    const int thread = static_cast<int>(threadIdx.x), warp = warpid(), lane = laneid();
    arch::wait_for_dependencies();
    arch::launch_dependents();
    const CombineRow<T> of(g, row);
    // A thread per split.
    const bool exists = thread < r.splits && !of.nobody;
    const float lse = exists ? arch::load_global(r.partial_lse + thread * r.rows + row) : -INFINITY;
    float top = lse;
#pragma unroll
    for (int d = WARP_THREADS / 2; d > 0; d /= 2) top = fmaxf(top, arch::shuffle_xor(top, d));
    if (lane == 0) shared.warp_top[warp] = top;
    arch::sync_block();
    top = of.sink;
    for (const float x : shared.warp_top) top = fmaxf(top, x);
    const float base = top == -INFINITY ? 0.0f : top;
    float sum = arch::exp2_approx((lse - base) * LOG2_E);
    shared.weights[thread] = sum;
#pragma unroll
    for (int d = WARP_THREADS / 2; d > 0; d /= 2) sum += arch::shuffle_xor(sum, d);
    if (lane == 0) shared.warp_sum[warp] = sum;
    arch::sync_block();
    sum = arch::exp2_approx((of.sink - base) * LOG2_E);
    for (const float x : shared.warp_sum) sum += x;

    const int pairs = r.value_dim / 2;
    for (int pair = lane; pair < pairs; pair += WARP_THREADS) {
        float2 o = {0.0f, 0.0f};
#pragma unroll 8
        for (int i = warp; i < r.splits; i += COMBINE_WARPS) {
            const float weight = shared.weights[i];
            if (weight == 0.0f) continue;  // nothing was written, or it does not count
            const float2 part = of.part(r, row, i, pair);
            o = {fmaf(weight, part.x, o.x), fmaf(weight, part.y, o.y)};
        }
        shared.sums[warp][pair] = o;
    }
    arch::sync_block();
    if (thread < pairs) {
        float2 o = {0.0f, 0.0f};
        for (const auto& sums : shared.sums) o = {o.x + sums[thread].x, o.y + sums[thread].y};
        of.store(r, thread, o, sum == 0.0f ? 0.0f : 1.0f / sum);
    }
    if (thread == 0) of.store_lse(r, row, base, sum);
}

// Of few splits: a lane knows the weight of one, and the warp passes it round. Columns are up to
// four pairs a lane.
template <class T>
__global__ __launch_bounds__(COMBINE_THREADS) void combine_few_kernel(
    const __grid_constant__ CombineGlobals<T> g) {
    constexpr int PAIRS = 4;
    const auto& r = g.results;
    const int64_t row = int64_t(blockIdx.x) * COMBINE_WARPS + warpid();
    const int lane = laneid();
    arch::wait_for_dependencies();
    arch::launch_dependents();
    if (row >= r.rows) return;
    const CombineRow<T> of(g, row);
    const bool exists = lane < r.splits && !of.nobody;
    const float lse = exists ? arch::load_global(r.partial_lse + lane * r.rows + row) : -INFINITY;
    float top = fmaxf(lse, of.sink);
#pragma unroll
    for (int d = MAX_SPLITS_OF_WARP / 2; d > 0; d /= 2) top = fmaxf(top, arch::shuffle_xor(top, d));
    top = arch::shuffle(top, 0);
    const float base = top == -INFINITY ? 0.0f : top;
    const float weight = arch::exp2_approx((lse - base) * LOG2_E);
    float sum = weight;
#pragma unroll
    for (int d = MAX_SPLITS_OF_WARP / 2; d > 0; d /= 2) sum += arch::shuffle_xor(sum, d);
    sum = arch::shuffle(sum, 0) + arch::exp2_approx((of.sink - base) * LOG2_E);
    const int pairs = r.value_dim / 2;
    float2 o[PAIRS] = {};
#pragma unroll 4
    for (int i = 0; i < r.splits; ++i) {
        const float share = arch::shuffle(weight, i);
#pragma unroll
        for (int j = 0; j < PAIRS; ++j) {
            const int pair = lane + j * WARP_THREADS;
            // Of weight 0 nothing was written, or it does not count.
            if (pair >= pairs || share == 0.0f) continue;
            const float2 part = of.part(r, row, i, pair);
            o[j] = {fmaf(share, part.x, o[j].x), fmaf(share, part.y, o[j].y)};
        }
    }
    const float reciprocal = sum == 0.0f ? 0.0f : 1.0f / sum;
#pragma unroll
    for (int j = 0; j < PAIRS; ++j) {
        const int pair = lane + j * WARP_THREADS;
        if (pair < pairs) of.store(r, pair, o[j], reciprocal);
    }
    if (lane == 0) of.store_lse(r, row, base, sum);
}

template <Config config>
void launch_split_kv(const ForwardParams& params, Stream stream) {
    using Kernel = SplitKvKernel<config>;
    using T = typename Kernel::T;
    static_assert(sizeof(SplitKvShared<Kernel>) + 1024 <= Kernel::shared_bytes,
                  "forward_memory() must count all of the block's shared memory");
    const Problem& p = params.problem;
    const Sequences& s = params.sequences;
    const int64_t q_rows = p.varlen ? s.total_q : p.q_length;
    const int64_t k_rows = p.varlen ? s.total_k : p.k_length;
    const bool combine = combines(p, params.splits);
    const SplitKvResults<T> results{.out = StridedRows<T>(params.out, p.varlen),
                                    .lse = params.lse,
                                    .sink = params.scores.sink,
                                    .partial_out = params.partial_out,
                                    .partial_lse = params.partial_lse,
                                    .splits = combine ? params.splits : 0,
                                    .heads = int(p.q_heads),
                                    .positions = int(q_rows),
                                    .value_dim = int(p.value_dim),
                                    .rows = partial_rows(p, s)};
    const int group = int(p.q_heads / p.kv_heads);
    const SplitKvGlobals<Kernel> globals{
        .q = StridedRows<T>(params.q, p.varlen),
        .k = {params.k, p.varlen, p.batch, p.kv_heads, k_rows, p.head_dim},
        .v = {params.v, p.varlen, p.batch, p.kv_heads, k_rows, p.value_dim},
        .results = results,
        .sequences = {p, s},
        .score_mod = ScoreMod(params.scores),
        .head_dim = int(p.head_dim),
        .kv_heads = int(p.kv_heads),
        .group = group,
        .tiles = int((p.q_length * group + 63) / 64),
        .splits = params.splits,
        .by_group = Divisor(group),
        .by_splits = Divisor(params.splits),
        .by_tiles = Divisor(int((p.q_length * group + 63) / 64)),
        .by_heads = Divisor(int(p.kv_heads))};
    const int64_t blocks = p.batch * p.kv_heads * globals.tiles * globals.splits;
    if (blocks > 0) {
        kittens::launch({.dependent = true}, split_kv_kernel<Kernel>, dim3(unsigned(blocks)),
                        dim3(Kernel::threads), dim3(1), Kernel::shared_bytes, stream, globals);
    }
    if (combine) {
        const bool few = params.splits <= MAX_SPLITS_OF_WARP;
        const int64_t rows =
            few ? (results.rows + COMBINE_WARPS - 1) / COMBINE_WARPS : results.rows;
        kittens::launch({.dependent = true}, few ? combine_few_kernel<T> : combine_kernel<T>,
                        dim3(unsigned(rows)), dim3(COMBINE_THREADS), dim3(1), 0, stream,
                        CombineGlobals<T>{results, {p, s}});
    }
}

}  // namespace thunderkittens::attention
