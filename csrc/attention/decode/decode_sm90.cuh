// Attention of few new queries over a cache of keys and values: what counts is to read the cache at
// the full speed of memory, whatever the pages and the mix of lengths, so a schedule cuts the work
// into as many equal parts as there are blocks, and all query heads that share keys are rows of one
// tile of 64.
//
// Roles, in each of the blocks:
//   producer   two warps, four where the cache has 8 bits or 4: their threads look pages up, and
//              bring keys and values by cp.async, 16 bytes each, into a ring of slots; keys that do
//              not exist become zeros
//   consumer   a warpgroup: loads Q itself, then S = Q K^T, softmax in registers, O += P V
// Results of whole items go out; those of parts go to memory, normalised, with their LSEs, and a
// second kernel combines them: reruns are bit-equal.
//
// Pages come by cp.async rather than by TMA, as that serves pages of any size with any strides: a
// page of one token is a row, and a look-up of 16 threads at a time costs less than the memory.
#pragma once

#include "csrc/attention/decode/eight_rows_sm90.cuh"

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
        if constexpr (Kernel::token_scales) arch::sync_warp();
        if (Kernel::token_scales ? laneid() == 0 : warpgroup::laneid() == 0) {
            arrive(shared.empty[at.stage]);
        }
        at.advance();
    }

    __device__ __forceinline__ void load_query(const Segments& segment) {
        constexpr int per_load = 16 / int(sizeof(T));
        constexpr int row_loads = Kernel::head_dim / per_load;
        warpgroup::sync(1);  // the products that have read the last one are done
        if constexpr (Kernel::codes) {
            static_assert(row_loads <= WARP_THREADS);
            const float scale = scale_of_head(g.k_scale, segment.b(), segment.item.kv_head) *
                                scale_of_head(g.q_scale, segment.b(), segment.item.kv_head) *
                                (Kernel::nvfp4 ? 1.0f / NV_UNIT : 1.0f);
            // A warp has 16 rows, a lane a column.
            const int column = laneid() * per_load;
            for (int i = 0; i < 16; ++i) {
                const int row = warpgroup::warpid() * 16 + i;
                store_as_halves(row, column, load_query_chunk(g, segment, row, column), scale);
            }
        } else {
            for (int i = warpgroup::laneid(); i < TILE_ROWS * row_loads; i += WARPGROUP_THREADS) {
                const int row = i / row_loads, column = i % row_loads * per_load;
                arch::store_shared(shared.q.address_of(row, column),
                                   load_query_chunk(g, segment, row, column));
            }
        }
        arch::fence_async_shared();
        warpgroup::sync(1);
    }
    __device__ __forceinline__ void store_as_halves(int row, int column, const uint4& chunk,
                                                    float scale) {
        const auto halved = halved_row<T>(chunk);
        if (column < Kernel::head_dim) {
            arch::store_shared(shared.q.address_of(row, column),
                               arch::bit_cast<uint4>(halved.elements));
        }
        if (laneid() == 0) {
            arch::store_shared(arch::shared_address(&shared.staging.q_factors[row]),
                               halved.factor * scale);
        }
    }
    __device__ __forceinline__ float query_factor(int row) const {
        return arch::load_shared<float>(arch::shared_address(&shared.staging.q_factors[row]));
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
        const auto row_of = [&](int low) { return low ? lower : upper; };
        const VisibleKeys<Kernel, decltype(row_of)> visible{g, segment, row_of};
        for (int block = segment.last - 1; block >= segment.first; --block) {
            scores x;
            wait(shared.full[at.stage], at.phase);
            warpgroup::mm_ABt(x, shared.q, shared.ring[at.stage].k);
            warpgroup::mma_async_wait<0>(x);
            if constexpr (Kernel::codes) {
                scale_rows(x, {query_factor(row), query_factor(row + 8)});
                if constexpr (Kernel::token_scales) {
                    if (g.k_scale.tokens) scale_columns(x, shared.staging.scales[at.stage], 1.0f);
                }
            }
            release();
            const Shift shift = visible.apply(x, block, block * BLOCK_N);
            float2 rescale = {1.0f, 1.0f};
            if (softmax.update(x, g.score_mod.unit_log2, shift, rescale)) scale_rows(o, rescale);
            wait(shared.full[at.stage], at.phase);
            if constexpr (Kernel::token_scales) {
                if (g.v_scale.tokens)
                    scale_weights(x, o, shared.staging.scales[at.stage], v_exponent);
            }
            weights p;
            convert_scores(p, x);
            warpgroup::mma_AB(o, p, shared.ring[at.stage].v);
            warpgroup::mma_async_wait<0>(o);
            release();
        }
        if constexpr (Kernel::codes) {
            const float scale = scale_of_head(g.v_scale, segment.b(), segment.item.kv_head) *
                                (Kernel::nvfp4      ? 1.0f / NV_UNIT
                                 : g.v_scale.tokens ? power_of_two(v_exponent)
                                                    : 1.0f);
            scale_rows(o, {scale, scale});
        }
        softmax.reduce_sum();
        if (segment.stale) softmax.sum = {NAN, NAN};
        if (segment.whole)
            store_final(o, softmax, segment, upper, lower);
        else
            store_partial(o, softmax, segment.at.slot, row);
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
        const int b = segment.b(), begin = segment.s.q_begin;
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
            init_semaphore(shared.full[i], Kernel::slot_arrivals);
            init_semaphore(shared.empty[i], Kernel::token_scales ? 4 : 1);
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

template <Config config>
void launch(const Params& params, Stream stream) {
    using Kernel = decode::Kernel<config>;
    static_assert(sizeof(Shared<Kernel>) + 1024 <= shared_bytes(config),
                  "shared_bytes() must count all of the block's shared memory");
    const Globals<Kernel> globals(params);
    constexpr auto kernel = [] {
        if constexpr (Kernel::few_rows)
            return few_rows_kernel<Kernel>;
        else
            return decode_kernel<Kernel>;
    }();
    kittens::launch({.dependent = true, .blocks_per_sm = Kernel::blocks_per_sm}, kernel,
                    dim3(params.parts), dim3(Kernel::threads), dim3(1), shared_bytes(config),
                    stream, globals);
}

}  // namespace thunderkittens::attention::decode
