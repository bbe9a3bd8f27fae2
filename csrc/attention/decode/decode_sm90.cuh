// Attention of few new queries over a cache of keys and values: what counts is to read the cache at
// the full speed of memory, whatever the pages and the mix of lengths, so a schedule cuts the work
// into as many equal parts as there are blocks, and all query heads that share keys are rows of one
// tile of 64.
//
// Roles, in each of the blocks:
//   producer   two warps, four where the cache has 8 bits: their threads look pages up, and bring
//              keys and values by cp.async, 16 bytes each, into a ring of slots; keys that do not
//              exist become zeros
//   consumer   a warpgroup: loads Q itself, then S = Q K^T, softmax in registers, O += P V
// Results of whole items go out; those of parts go to memory, normalised, with their LSEs, and a
// second kernel combines them: reruns are bit-equal.
//
// Pages come by cp.async rather than by TMA, as that serves pages of any size with any strides: a
// page of one token is a row, and a look-up of 16 threads at a time costs less than the memory.
#pragma once

#include "csrc/attention/decode/producer_sm90.cuh"

namespace thunderkittens::attention::decode {

template <class Kernel>
struct Consumer {
    using T = typename Kernel::T;
    using Operand = typename Kernel::Operand;
    using scores = rt_fl<16, BLOCK_N>;
    using weights = rt<Operand, 16, BLOCK_N>;
    using output = rt_fl<16, Kernel::value_dim>;

    const Globals<Kernel>& g;
    Shared<Kernel>& shared;
    RingPosition<Kernel::slots> at{};

    __device__ __forceinline__ void run(Segments& segments) {
        while (segments.next()) run_segment(segments);
    }

  private:
    // Where a slot has scales, which threads read, every warp says when it is done.
    __device__ __forceinline__ void release() {
        if constexpr (Kernel::codes) arch::sync_warp();
        if (Kernel::codes ? laneid() == 0 : warpgroup::laneid() == 0) {
            arrive(shared.empty[at.stage]);
        }
        at.advance();
    }

    // Of a row, zeros where it or the column does not exist.
    __device__ __forceinline__ uint4 load_query_chunk(const Segments& segment, int row,
                                                      int column) const {
        const Row r(g.work, segment.s, segment.item, row);
        if (!r.exists || column >= g.head_dim) return make_uint4(0, 0, 0, 0);
        const int begin = g.work.rotary_begin(segment.at.b, segment.s.k_length);
        return g.rotary.load(g.q.at(segment.at.b, r.head, segment.s.q_begin + r.position, 0),
                             column, begin + (g.rotary_moves ? r.position : 0));
    }
    __device__ __forceinline__ void load_query(const Segments& segment) {
        constexpr int per_load = 16 / int(sizeof(T));
        constexpr int row_loads = Kernel::head_dim / per_load;
        warpgroup::sync(1);  // the products that have read the last one are done
        if constexpr (Kernel::codes) {
            static_assert(row_loads <= WARP_THREADS);
            const float scale = scale_of_head(g.k_scale, segment.at.b, segment.item.kv_head) *
                                scale_of_head(g.q_scale, segment.at.b, segment.item.kv_head);
            // A warp has 16 rows, a lane a column.
            const int column = laneid() * per_load;
            for (int i = 0; i < 16; ++i) {
                const int row = warpgroup::warpid() * 16 + i;
                store_as_halves(row, column, load_query_chunk(segment, row, column), scale);
            }
        } else {
            for (int i = warpgroup::laneid(); i < TILE_ROWS * row_loads; i += WARPGROUP_THREADS) {
                const int row = i / row_loads, column = i % row_loads * per_load;
                arch::store_shared(shared.q.address_of(row, column),
                                   load_query_chunk(segment, row, column));
            }
        }
        arch::fence_async_shared();
        warpgroup::sync(1);
    }
    // Rows of any magnitude fit: they are brought to fp16 by a power of two, which scores get back
    // with their scale.
    __device__ __forceinline__ void store_as_halves(int row, int column, const uint4& chunk,
                                                    float scale) {
        const auto x = arch::bit_cast<typename RotaryTable<T>::Vector>(chunk);
        float2 values[4];
        float largest = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            values[i] = unpack_pair<T>(x.pairs[i]);
            largest = fmaxf(largest, fmaxf(fabsf(values[i].x), fabsf(values[i].y)));
        }
#pragma unroll
        for (int d = WARP_THREADS / 2; d > 0; d /= 2) {
            largest = fmaxf(largest, arch::shuffle_xor(largest, d));
        }
        const int exponent = exponent_of(largest) - 10;
        const float down = power_of_two(-exponent);
        Halves halves;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            halves.pairs[i] =
                arch::bit_cast<uint32_t>(pack_pair<half>(values[i].x * down, values[i].y * down));
        }
        if (column < Kernel::head_dim) {
            arch::store_shared(shared.q.address_of(row, column), arch::bit_cast<uint4>(halves));
        }
        if (laneid() == 0) {
            arch::store_shared(arch::shared_address(&shared.staging.q_factors[row]),
                               power_of_two(exponent) * scale);
        }
    }
    __device__ __forceinline__ float query_factor(int row) const {
        return arch::load_shared<float>(arch::shared_address(&shared.staging.q_factors[row]));
    }
    // Of the columns of this thread, two of every eight, in a slot.
    __device__ __forceinline__ float2 token_scales(int stage, int j, int half) const {
        const int column = 16 * j + 8 * half + 2 * (laneid() % 4);
        return arch::load_shared<float2>(
            arch::shared_address(&shared.staging.scales[stage][column]));
    }
    __device__ __forceinline__ void scale_columns(scores& x, int stage, float factor) const {
#pragma unroll
        for (int j = 0; j < scores::width; ++j) {
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const float2 scale = token_scales(stage, j, k / 2);
                float2& pair = x.tiles[0][j].data[k];
                pair = {pair.x * (scale.x * factor), pair.y * (scale.y * factor)};
            }
        }
    }
    // The weights times the scales of the values, over a power of two that these do not exceed
    // much: where they grow, so does it, and what has been added up becomes less.
    __device__ __forceinline__ void scale_weights(scores& x, output& o, int stage,
                                                  int& exponent) const {
        float largest = 0.0f;
#pragma unroll
        for (int j = 0; j < scores::width; ++j) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float2 scale = token_scales(stage, j, half);
                largest = fmaxf(largest, fmaxf(fabsf(scale.x), fabsf(scale.y)));
            }
        }
        largest = fmaxf(largest, arch::shuffle_xor(largest, 1));
        largest = fmaxf(largest, arch::shuffle_xor(largest, 2));
        const int needed = exponent_of(largest);
        if (needed > exponent) {
            const float factor = power_of_two(exponent - needed);
            scale_rows(o, {factor, factor});
            exponent = needed;
        }
        scale_columns(x, stage, power_of_two(-exponent));
    }

    __device__ __forceinline__ void run_segment(const Segments& segment) {
        const Lengths& s = segment.s;
        const int row = warpgroup::warpid() * 16 + laneid() / 4;
        const Row upper(g.work, s, segment.item, row), lower(g.work, s, segment.item, row + 8);
        if (segment.last > segment.first) load_query(segment);
        int v_exponent = -126;
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
            if constexpr (Kernel::codes) {
                scale_rows(x, {query_factor(row), query_factor(row + 8)});
                if (g.k_scale.tokens) scale_columns(x, at.stage, 1.0f);
            }
            release();
            // Here rather than before, as registers are few.
            const float2 slope = {g.score_mod.slope(segment.at.b, upper.exists ? upper.head : 0),
                                  g.score_mod.slope(segment.at.b, lower.exists ? lower.head : 0)};
            const Shift shift = g.score_mod.template apply<T>(x, columns(s.diagonal), slope);
            if (block >= keys.unmasked_end || block < keys.unmasked_begin) {
                Int2 low = columns(s.low), high = columns(s.high);
                if (g.work.chunk > 0) {
                    const int2 a = g.work.chunk_of(s, upper.position);
                    const int2 b = g.work.chunk_of(s, lower.position);
                    low = {::max(low.x, a.x - first_column), ::max(low.y, b.x - first_column)};
                    high = {::min(high.x, a.y - 1 - first_column),
                            ::min(high.y, b.y - 1 - first_column)};
                }
                const int begin = s.k_begin - first_column, end = s.k_length - 1 - first_column;
                mask_outside(x, {::max(low.x, begin), ::max(low.y, begin)},
                             {::min(high.x, end), ::min(high.y, end)});
                if (g.mask != nullptr) apply_mask(x, segment, upper, lower, block);
            }
            float2 rescale = {1.0f, 1.0f};
            if (softmax.update(x, g.score_mod.unit_log2, shift, rescale)) scale_rows(o, rescale);
            wait(shared.full[at.stage], at.phase);
            if constexpr (Kernel::codes) {
                if (g.v_scale.tokens) scale_weights(x, o, at.stage, v_exponent);
            }
            weights p;
            convert_scores(p, x);
            warpgroup::mma_AB(o, p, shared.ring[at.stage].v);
            warpgroup::mma_async_wait<0>(o);
            release();
        }
        if constexpr (Kernel::codes) {
            const float scale = scale_of_head(g.v_scale, segment.at.b, segment.item.kv_head) *
                                (g.v_scale.tokens ? power_of_two(v_exponent) : 1.0f);
            scale_rows(o, {scale, scale});
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
            init_semaphore(shared.empty[i], Kernel::codes ? 4 : 1);
        }
        arch::mbarrier_init_fence();
    }
    arch::sync_block();
    arch::wait_for_dependencies();
    arch::launch_dependents();
    Segments segments(g.work, g.schedule, static_cast<int>(blockIdx.x));
    if (!g.schedule.is_of(g.work)) return poison(g);
    if (arch::warp_uniform(warpgroup::groupid()) == 0) {
        if constexpr (Kernel::reallocates) {
            warpgroup::increase_registers<Kernel::consumer_registers>();
        }
        Consumer<Kernel>{g, shared}.run(segments);
    } else {
        if constexpr (Kernel::reallocates) {
            warpgroup::decrease_registers<Kernel::producer_registers>();
        }
        Producer<Kernel>{g, shared}.run(segments);
    }
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
        .k = CacheRows<typename Globals<Kernel>::Element>(params.k),
        .v = CacheRows<typename Globals<Kernel>::Element>(params.v),
        .format = params.format,
        .k_scale = params.k_scale,
        .v_scale = params.v_scale,
        .q_scale = params.q_scale,
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
    kittens::launch({.dependent = true, .blocks_per_sm = Kernel::blocks_per_sm},
                    decode_kernel<Kernel>, dim3(params.parts), dim3(Kernel::threads), dim3(1),
                    shared_bytes(config), stream, globals);
}

}  // namespace thunderkittens::attention::decode
