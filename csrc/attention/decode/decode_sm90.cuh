// Attention of few new queries over a cache of keys and values: what counts is to read the cache at
// the full speed of memory, whatever the pages and the mix of lengths, so a schedule cuts the work
// into as many equal parts as there are blocks, and all query heads that share keys are rows of one
// tile of 64.
//
// Roles, in each of the blocks:
//   producer   two warps: their threads look pages up, and bring keys and values by cp.async, 16
//              bytes each, into a ring of slots; keys that do not exist become zeros
//   consumer   a warpgroup: loads Q itself, then S = Q K^T, softmax in registers, O += P V
// Results of whole items go out; those of parts go to memory, normalised, with their LSEs, and a
// second kernel combines them in the order of the keys: reruns are bit-equal.
//
// Pages come by cp.async rather than by TMA, as that serves pages of any size with any strides: a
// page of one token is a row, and a look-up of 16 threads at a time costs less than the memory.
#pragma once

#include "csrc/attention/decode/rotary.cuh"
#include "csrc/attention/decode/work_sm90.cuh"
#include "csrc/attention/layouts.cuh"
#include "csrc/attention/tile_scheduler.cuh"

namespace thunderkittens::attention::decode {

template <Config config>
struct Kernel {
    using T = std::conditional_t<config.dtype == DType::bf16, bf16, half>;
    static constexpr int head_dim = config.head_dim, value_dim = config.value_dim;
    static constexpr int slots = config.slots;
    static constexpr int producers = 2;  // warps
    static constexpr int threads = WARPGROUP_THREADS + producers * WARP_THREADS;
    static constexpr int blocks_per_sm = config.blocks_per_sm;
    static constexpr int lag = slots - 2;  // copies of so many slots are on their way at a time

    using q_tile = st<T, TILE_ROWS, head_dim>;
    using k_tile = st<T, BLOCK_N, head_dim>;
    using v_tile = st<T, BLOCK_N, value_dim>;
    union slot {
        k_tile k;
        v_tile v;
        __device__ slot() {}
    };
};

// Where the results of (batch, head, position) are, and partial ones: rows of a slot.
template <class T>
struct Results {
    StridedRows<T> out;
    float* lse;         // may be null
    const float* sink;  // may be null
    float *partial_out, *partial_lse;
    int heads, positions, value_dim, slot_rows;

    Results(const Params& params)
        : out(params.out, params.problem.varlen),
          lse(params.lse),
          sink(params.scores.sink),
          partial_out(params.partial_out),
          partial_lse(params.partial_lse),
          heads(static_cast<int>(params.problem.q_heads)),
          positions(static_cast<int>(params.problem.varlen ? params.sequences.tokens
                                                           : params.problem.q_length)),
          value_dim(static_cast<int>(params.problem.value_dim)),
          slot_rows(static_cast<int>(params.problem.tile_rows())) {}

    __device__ __forceinline__ int64_t lse_row(int b, int head, int position) const {
        return (out.packed ? head : int64_t(b) * heads + head) * positions + position;
    }
};

// A row of a tile: a query and one of the heads that share its keys.
struct Row {
    int position, head;
    bool exists;

    __device__ __forceinline__ Row(const Work& work, const Lengths& s, const Item& item, int row) {
        const int index = item.first_row + row;
        position = index / work.group;
        head = item.kv_head * work.group + index - position * work.group;
        exists = position < s.q_length;
    }
};

template <class T>
struct CacheRows {
    const T* data;
    int64_t page_stride, token_stride, head_stride;

    CacheRows(const Cache& cache)
        : data(static_cast<const T*>(cache.data)),
          page_stride(cache.page_stride),
          token_stride(cache.token_stride),
          head_stride(cache.head_stride) {}
    __device__ __forceinline__ const T* at(int page, int token, int head) const {
        return data + (page * page_stride + token * token_stride + head * head_stride);
    }
};

template <class Kernel>
struct Globals {
    using T = typename Kernel::T;
    StridedRows<T> q;
    CacheRows<T> k, v;
    Results<T> results;
    Work work;
    Schedule schedule;
    ScoreMod score_mod;
    RotaryTable<T> rotary;
    bool rotary_moves;  // with the query's position; else all stand where the new keys begin
    Pages pages;
    const int* mask;
    int64_t mask_stride;
    int mask_words;
    int head_dim;
};

template <class Kernel>
struct Shared {
    typename Kernel::q_tile q;
    typename Kernel::slot ring[Kernel::slots];
    semaphore full[Kernel::slots], empty[Kernel::slots];
};

template <class Kernel>
struct Producer {
    using T = typename Kernel::T;
    static constexpr int per_copy = 16 / int(sizeof(T));
    static constexpr int warp_rows = BLOCK_N / Kernel::producers;
    static_assert(warp_rows == WARP_THREADS);

    const Globals<Kernel>& g;
    Shared<Kernel>& shared;
    RingPosition<Kernel::slots> filling{}, arriving{};
    int pending = 0;  // slots whose copies are on their way

    __device__ __forceinline__ void run(Segments& segments) {
        while (segments.next()) {
            for (int block = segments.last - 1; block >= segments.first; --block) {
                load_block(segments, block);
            }
        }
        while (pending > 0) arrive_oldest(0);
    }

  private:
    // A lane looks up one of the rows that its warp copies.
    __device__ __forceinline__ void load_block(const Segments& at, int block) {
        const int first = warpgroup::warpid() * warp_rows;
        const int key = block * BLOCK_N + first + laneid();
        const bool exists = key < at.s.k_length;
        int page = at.at.b, token = key;
        if (g.pages.rows != nullptr) page = arch::load_global_readonly(g.pages.rows + page);
        if (g.pages.table != nullptr && exists) {
            const int size = static_cast<int>(g.pages.page_size);
            const int index = key / size;
            token = key - index * size;
            page = arch::load_global_readonly(g.pages.table + page * g.pages.table_stride + index);
        }
        const T* const k = exists ? g.k.at(page, token, at.item.kv_head) : nullptr;
        const T* const v = exists ? g.v.at(page, token, at.item.kv_head) : nullptr;
        load_rows(shared.ring[filling.stage].k, k, first, g.head_dim);
        load_rows(shared.ring[filling.stage].v, v, first, g.results.value_dim);
    }
    template <class Tile>
    __device__ __forceinline__ void load_rows(Tile& tile, const T* mine, int first, int columns) {
        constexpr int row_copies = Tile::cols / per_copy;
        if (pending == Kernel::lag) arrive_oldest(Kernel::lag - 1);
        wait(shared.empty[filling.stage], filling.phase ^ 1);
#pragma unroll
        for (int i = 0; i < warp_rows * row_copies / WARP_THREADS; ++i) {
            const int copy = i * WARP_THREADS + laneid();
            const int row = copy / row_copies, column = copy % row_copies * per_copy;
            const T* const from = arch::shuffle(mine, row);
            arch::cp_async<16>(tile.address_of(first + row, column), from + column,
                               from != nullptr && column < columns);
        }
        arch::cp_async_commit();
        filling.advance();
        ++pending;
    }
    // Of the oldest slot on its way, where at most `still` later ones are.
    __device__ __forceinline__ void arrive_oldest(int still) {
        if (still == 0)
            arch::cp_async_wait<0>();
        else
            arch::cp_async_wait<Kernel::lag - 1>();
        arch::fence_async_shared();
        arrive(shared.full[arriving.stage]);
        arriving.advance();
        --pending;
    }
};

template <class Kernel>
struct Consumer {
    using T = typename Kernel::T;
    using scores = rt_fl<16, BLOCK_N>;
    using weights = rt<T, 16, BLOCK_N>;
    using output = rt_fl<16, Kernel::value_dim>;

    const Globals<Kernel>& g;
    Shared<Kernel>& shared;
    RingPosition<Kernel::slots> at{};

    __device__ __forceinline__ void run(Segments& segments) {
        while (segments.next()) run_segment(segments);
    }

  private:
    __device__ __forceinline__ void release() {
        if (warpgroup::laneid() == 0) arrive(shared.empty[at.stage]);
        at.advance();
    }

    __device__ __forceinline__ void load_query(const Segments& segment) {
        constexpr int per_load = 16 / int(sizeof(T));
        constexpr int row_loads = Kernel::head_dim / per_load;
        const int begin = segment.s.k_length - g.work.added(segment.at.b);
        warpgroup::sync(1);  // the products that have read the last one are done
        for (int i = warpgroup::laneid(); i < TILE_ROWS * row_loads; i += WARPGROUP_THREADS) {
            const int column = i % row_loads * per_load;
            const Row row(g.work, segment.s, segment.item, i / row_loads);
            uint4 value = make_uint4(0, 0, 0, 0);
            if (row.exists && column < g.head_dim) {
                value = g.rotary.load(
                    g.q.at(segment.at.b, row.head, segment.s.q_begin + row.position, 0), column,
                    begin + (g.rotary_moves ? row.position : 0));
            }
            arch::store_shared(shared.q.address_of(i / row_loads, column), value);
        }
        arch::fence_async_shared();
        warpgroup::sync(1);
    }

    __device__ __forceinline__ void run_segment(const Segments& segment) {
        const Lengths& s = segment.s;
        const int row = warpgroup::warpid() * 16 + laneid() / 4;
        const Row upper(g.work, s, segment.item, row), lower(g.work, s, segment.item, row + 8);
        const float2 slope = {g.score_mod.slope(segment.at.b, upper.exists ? upper.head : 0),
                              g.score_mod.slope(segment.at.b, lower.exists ? lower.head : 0)};
        if (segment.last > segment.first) load_query(segment);
        OnlineSoftmax softmax;
        output o;
        zero_tile(o);
        const KeyBlocks& keys = segment.item.keys;
        for (int block = segment.last - 1; block >= segment.first; --block) {
            const int first_column = block * BLOCK_N + 2 * (laneid() % 4);
            const auto columns = [&](int offset) -> Int2 {
                return {upper.position - first_column + offset,
                        lower.position - first_column + offset};
            };
            scores x;
            wait(shared.full[at.stage], at.phase);
            warpgroup::mm_ABt(x, shared.q, shared.ring[at.stage].k);
            warpgroup::mma_async_wait<0>(x);
            release();
            const Shift shift = g.score_mod.template apply<T>(x, columns(s.diagonal), slope);
            if (block >= keys.unmasked_end || block < keys.unmasked_begin) {
                const Int2 low = columns(s.low), high = columns(s.high);
                const int begin = s.k_begin - first_column, end = s.k_length - 1 - first_column;
                mask_outside(x, {::max(low.x, begin), ::max(low.y, begin)},
                             {::min(high.x, end), ::min(high.y, end)});
                if (g.mask != nullptr) apply_mask(x, segment, upper, lower, block);
            }
            float2 rescale = {1.0f, 1.0f};
            if (softmax.update(x, g.score_mod.unit_log2, shift, rescale)) scale_rows(o, rescale);
            weights p;
            convert_scores(p, x);
            wait(shared.full[at.stage], at.phase);
            warpgroup::mma_AB(o, p, shared.ring[at.stage].v);
            warpgroup::mma_async_wait<0>(o);
            release();
        }
        softmax.reduce_sum();
        if (segment.stale) softmax.sum = {NAN, NAN};
        if (segment.whole)
            store_final(o, softmax, segment, upper, lower);
        else
            store_partial(o, softmax, segment.at.slot, row);
    }

    // The newest keys, those of the queries themselves, are seen where the mask has a bit; all
    // before are.
    __device__ __forceinline__ void apply_mask(scores& x, const Segments& segment, const Row& upper,
                                               const Row& lower, int block) {
        const int first_bit = block * BLOCK_N - segment.s.diagonal;  // of the block's first key
        const uint64_t visible[] = {mask_bits(segment, upper, first_bit),
                                    mask_bits(segment, lower, first_bit)};
        const int mine = 2 * (laneid() % 4);
        for_each_element(x, [&](float& value, int column, bool low) {
            if ((visible[low] >> (column + mine) & 1) == 0) value = -INFINITY;
        });
    }
    // Bits [first, first + 64) of a row, those before the first set.
    __device__ __forceinline__ uint64_t mask_bits(const Segments& segment, const Row& row,
                                                  int first) const {
        if (!row.exists) return 0;
        const int64_t token = g.q.packed ? segment.s.q_begin + row.position
                                         : int64_t(segment.at.b) * g.work.q_length + row.position;
        const auto word = [&](int index) -> uint64_t {
            if (index < 0) return ~0u;
            if (index >= g.mask_words) return 0;
            return static_cast<uint32_t>(
                arch::load_global_readonly(g.mask + token * g.mask_stride + index));
        };
        const int index = first >> 5, offset = first & 31;
        const uint64_t low = word(index) | word(index + 1) << 32;
        return offset == 0 ? low : low >> offset | word(index + 2) << (64 - offset);
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
    __device__ __forceinline__ void store_partial(output& o, OnlineSoftmax& softmax, int slot,
                                                  int row) {
        scale_rows(o, softmax.reciprocal_sum());
        const float2 lse = softmax.lse();
        const auto& to = g.results;
        const int64_t upper = int64_t(slot) * to.slot_rows + row, lower = upper + 8;
        const bool exists[] = {row < to.slot_rows, row + 8 < to.slot_rows};
        if (laneid() % 4 == 0) {
            if (exists[0]) arch::store_global(to.partial_lse + upper, lse.x);
            if (exists[1]) arch::store_global(to.partial_lse + lower, lse.y);
        }
        float* const rows[] = {to.partial_out + upper * to.value_dim,
                               to.partial_out + lower * to.value_dim};
        for_each_pair(o, [&](int column, float2 pair, bool low) {
            if (exists[low]) {
                arch::store_global(reinterpret_cast<float2*>(rows[low] + column), pair);
            }
        });
    }
    __device__ __forceinline__ void store_final(output& o, OnlineSoftmax& softmax,
                                                const Segments& segment, const Row& upper,
                                                const Row& lower) {
        const auto& to = g.results;
        const int b = segment.at.b, begin = segment.s.q_begin;
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
            const auto row = [&](const Row& r) {
                return to.lse + to.lse_row(b, r.head, begin + r.position);
            };
            if (upper.exists) arch::store_global(row(upper), lse.x);
            if (lower.exists) arch::store_global(row(lower), lse.y);
        }
        T* const rows[] = {to.out.at(b, upper.head, begin + upper.position, 0),
                           to.out.at(b, lower.head, begin + lower.position, 0)};
        for_each_pair(o, [&](int column, float2 pair, bool low) {
            if (low ? lower.exists : upper.exists)
                arch::store_global(reinterpret_cast<packed_type<T>*>(rows[low] + column),
                                   pack_pair<T>(pair.x, pair.y));
        });
    }
};

template <class Kernel>
__global__ __launch_bounds__(Kernel::threads, Kernel::blocks_per_sm) void decode_kernel(
    const __grid_constant__ Globals<Kernel> g) {
    shared_allocator allocator(shared_memory());
    auto& shared = allocator.template allocate<Shared<Kernel>>();
    if (threadIdx.x == 0) {
        for (int i = 0; i < Kernel::slots; ++i) {
            init_semaphore(shared.full[i], Kernel::producers * WARP_THREADS);
            init_semaphore(shared.empty[i], 1);
        }
        arch::mbarrier_init_fence();
    }
    arch::sync_block();
    arch::wait_for_dependencies();
    arch::launch_dependents();
    if (!g.schedule.is_of(g.work)) return poison(g);
    Segments segments(g.work, g.schedule, static_cast<int>(blockIdx.x));
    if (arch::warp_uniform(warpgroup::groupid()) == 0)
        Consumer<Kernel>{g, shared}.run(segments);
    else
        Producer<Kernel>{g, shared}.run(segments);
}

// The schedule was made for another call: a result that is no number shows it.
template <class Kernel>
__device__ __forceinline__ void poison(const Globals<Kernel>& g) {
    using T = typename Kernel::T;
    const auto& to = g.results;
    const int64_t rows = int64_t(to.heads) * to.positions * (g.q.packed ? 1 : g.work.batch);
    for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
        const int position = static_cast<int>(row % to.positions);
        const int line = static_cast<int>(row / to.positions);
        T* const out = to.out.at(line / to.heads, line % to.heads, position, 0);
        for (int i = static_cast<int>(threadIdx.x); i < to.value_dim; i += Kernel::threads) {
            arch::store_global(out + i, T(NAN));
        }
        if (to.lse != nullptr && threadIdx.x == 0) arch::store_global(to.lse + row, NAN);
    }
}

template <Config config>
void launch(const Params& params, Stream stream) {
    using Kernel = decode::Kernel<config>;
    using T = typename Kernel::T;
    static_assert(sizeof(Shared<Kernel>) + 1024 <= shared_bytes(config),
                  "shared_bytes() must count all of the block's shared memory");
    const Problem& p = params.problem;
    const Globals<Kernel> globals{
        .q = StridedRows<T>(params.q, p.varlen),
        .k = CacheRows<T>(params.k),
        .v = CacheRows<T>(params.v),
        .results = Results<T>(params),
        .work = Work(params),
        .schedule = Schedule(params.schedule, schedule_shape(p, params.parts)),
        .score_mod = ScoreMod(params.scores),
        .rotary = RotaryTable<T>(params.rotary),
        .rotary_moves = p.causal || p.window_left >= 0 || p.window_right >= 0,
        .pages = params.pages,
        .mask = params.mask,
        .mask_stride = params.mask_stride,
        .mask_words = static_cast<int>(params.mask_words),
        .head_dim = static_cast<int>(p.head_dim)};
    kittens::launch({.dependent = true}, decode_kernel<Kernel>, dim3(params.parts),
                    dim3(Kernel::threads), dim3(1), shared_bytes(config), stream, globals);
}

}  // namespace thunderkittens::attention::decode
