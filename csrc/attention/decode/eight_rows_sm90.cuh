// Attention of up to 8 rows of queries over a cache of 8 or 4 bits: what few_rows_sm90.cuh does for
// 16, with the operands exchanged (swap-AB), since 8 is the narrower side of mma.sync. Half as many
// products, weights and registers of the output are left.
//
//   S^T = K Q^T    A: 16 keys. B: the queries, in shared memory
//   O^T = V^T P^T  A: 16 columns of the values of 16 keys. B: the weights, transposed by movmatrix
//
// A thread has the scores of keys lane/4 and lane/4 + 8 of 16, for the row 2 (lane % 4) and the
// next.
#pragma once

#include "csrc/attention/decode/few_rows_sm90.cuh"

namespace thunderkittens::attention::decode {

// The running softmax of scores whose rows are keys. Eight threads share a query.
struct TransposedSoftmax : OnlineSoftmax {
    // The scores of 16 keys, as mma.sync leaves them.
    using Scores = float[4];

    // As OnlineSoftmax::update.
    __device__ __forceinline__ bool update(Scores& x, float scale_log2, float2& rescale) {
        const float2 top = {fmaxf(x[0], x[2]), fmaxf(x[1], x[3])};
        const bool grown = arch::any_lane(outgrown(top, scale_log2));
        if (grown) {
            const auto larger = [](float a, float b) { return fmaxf(a, b); };
            const float2 last = base;
            base = {fmaxf(base.x, arch::multiply_rounded(over_keys(top.x, larger), scale_log2)),
                    fmaxf(base.y, arch::multiply_rounded(over_keys(top.y, larger), scale_log2))};
            rescale = {arch::exp2_approx(last.x - base.x), arch::exp2_approx(last.y - base.y)};
            sum = {sum.x * rescale.x, sum.y * rescale.y};
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            x[i] = arch::exp2_approx(fmaf(x[i], scale_log2, i % 2 == 0 ? -base.x : -base.y));
            (i % 2 == 0 ? sum.x : sum.y) += x[i];
        }
        return grown;
    }
    __device__ __forceinline__ void reduce_sum() {
        const auto add = [](float a, float b) { return a + b; };
        sum = {over_keys(sum.x, add), over_keys(sum.y, add)};
    }
    template <class F>
    static __device__ __forceinline__ float over_keys(float x, F combine) {
#pragma unroll
        for (int d = 4; d < WARP_THREADS; d *= 2) x = combine(x, arch::shuffle_xor(x, d));
        return x;
    }
};

// The keys that a row sees of a block that is cut.
struct SeenKeys {
    int begin, end;  // of the sequence
    bool masked;     // by bits of the block's keys besides
    uint64_t bits;

    template <class Kernel>
    __device__ __forceinline__ SeenKeys(const Globals<Kernel>& g, const Segments& segment,
                                        const Row& row, int first_key)
        : begin(::max(row.position + segment.s.low, segment.s.k_begin)),
          end(::min(row.position + segment.s.high, segment.s.k_length - 1) + 1),
          masked(g.mask != nullptr),
          bits(masked ? mask_bits(g, segment, row, first_key - segment.s.diagonal) : 0) {
        if (g.work.chunk > 0) {
            const int2 chunk = g.work.chunk_of(segment.s, row.position);
            begin = ::max(begin, chunk.x);
            end = ::min(end, chunk.y);
        }
    }
    __device__ __forceinline__ bool has(int key, int first_key) const {
        return key >= begin && key < end && (!masked || (bits >> (key - first_key) & 1) != 0);
    }
};

template <class Kernel>
struct EightRowsConsumer : FewRowsConsumer<Kernel> {
    using Base = FewRowsConsumer<Kernel>;
    using Base::first_key, Base::release, Base::block_scale_of_key;
    using Base::g, Base::shared, Base::at, Base::first_codes, Base::first_rows, Base::parts;
    using typename Base::T, typename Base::k_tile, typename Base::v_tile, typename Base::chunks,
        typename Base::product;
    static constexpr int columns = Kernel::value_dim / 16;
    static_assert(Base::warp_keys == 16);
    using Scores = TransposedSoftmax::Scores;
    using Output = float[columns][4];  // 16 columns of the values each, like scores

    __device__ __forceinline__ void run(Segments& segments) {
        with_format(g, [&]<CacheFormat format>() {
            while (segments.next()) run_segment<format>(segments);
        });
    }

  private:
    // The first of the rows of this thread.
    static __device__ __forceinline__ int own_row() { return 2 * (laneid() % 4); }

    template <CacheFormat format>
    __device__ __forceinline__ void score_keys(Scores& x) {
        const uint32_t first = first_codes + this->template slot_offset<k_tile>();
        float sums[2][4] = {};  // of every second product: shorter chains
#pragma unroll
        for (int i = 0; i < chunks::count; ++i) {
            const int chunk = i / chunks::of_stripe * chunks::row_of_stripe + i % chunks::of_stripe;
            Codes codes[2];  // of keys eight apart
            __half2 scales[2];
#pragma unroll
            for (int lower = 0; lower < 2; ++lower) {
                codes[lower] = arch::bit_cast<Codes>(arch::load_shared<uint4>(
                    chunk_behind<k_tile>(first + 8 * lower * row_bytes<k_tile>, chunk)));
                if constexpr (Kernel::nvfp4) {
                    scales[lower] = scales_of_blocks<Kernel::portable>(
                        arch::load_shared<uint16_t>(block_scale_of_key(lower, i)));
                }
            }
#pragma unroll
            for (int part = 0; part < parts; ++part) {
                const Halves upper = eight_elements<format>(codes[0], scales[0], part);
                const Halves lower = eight_elements<format>(codes[1], scales[1], part);
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const auto& q = this->query_operand(2 * (parts * i + part) + j).pairs;
                    multiply(sums[j],
                             {upper.pairs[2 * j], lower.pairs[2 * j], upper.pairs[2 * j + 1],
                              lower.pairs[2 * j + 1]},
                             {q[0][0], q[1][0]});
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            x[i] = sums[0][i] + sums[1][i];
            if constexpr (has_infinities<Kernel::portable, format>) x[i] = no_infinity(x[i]);
        }
    }
    // The part-th eight of 16 bytes.
    template <CacheFormat format>
    static __device__ __forceinline__ Halves eight_elements(const Codes& codes, __half2 scales,
                                                            int part) {
        if constexpr (Kernel::nvfp4) {
            return four_apart_of(codes.words[part],
                                 part < 2 ? __low2half2(scales) : __high2half2(scales));
        } else {
            return halves_of<Kernel::portable, format>(codes.words[2 * part],
                                                       codes.words[2 * part + 1]);
        }
    }
    static __device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4],
                                                    const uint2& b) {
        const uint32_t both[2] = {b.x, b.y};
        product::fma(d, a, both, d);
    }
    // The weights of 16 keys as the second operand.
    static __device__ __forceinline__ uint2 transposed_weights(const float (&x)[4]) {
        const auto turned = [](float a, float b) {
            return arch::transpose_matrix(arch::bit_cast<uint32_t>(pack_pair<half>(a, b)));
        };
        return {turned(x[0], x[1]), turned(x[2], x[3])};
    }
    // Which columns a product has: see FewRowsConsumer.
    template <CacheFormat format>
    __device__ __forceinline__ void add_values(Output& o, const Scores& weights) {
        const uint2 p = transposed_weights(weights);
        this->template for_each_code_operand<format>(
            first_rows + this->template slot_offset<v_tile>(), 0,
            [&](int column, const uint32_t(&v)[4]) { multiply(o[column], v, p); });
    }

    // Softcap and ALiBi, then -inf where a row does not see a key.
    __device__ __forceinline__ void modify(Scores& x, const Segments& walked, int block) const {
        const bool cut = is_cut<Kernel>(shared, walked, block);
        if (g.score_mod.scale_by_cap > 0.0f) {
#pragma unroll
            for (int i = 0; i < 4; ++i) x[i] = softcap_tanh<T>(x[i] * g.score_mod.scale_by_cap);
        }
        if (!cut && !g.score_mod.has_slopes()) return;
        const int first = block * BLOCK_N + first_key() + laneid() / 4;
        const Segments segment = restored<Kernel>(shared, walked);
#pragma unroll
        for (int second = 0; second < 2; ++second) {
            const Row row(g.work, segment.s, segment.item, own_row() + second);
            if (g.score_mod.has_slopes()) {
                const float slope = g.score_mod.slope(segment.b(), row.exists ? row.head : 0);
                for_each_score_of_row(x, second, [&](float& s, int key) {
                    const int distance = row.position + segment.s.diagonal - (first + key);
                    s = fmaf(-slope, fabsf(static_cast<float>(distance)), s);
                });
            }
            if (!cut) continue;
            const SeenKeys seen(g, segment, row, block * BLOCK_N);
            for_each_score_of_row(x, second, [&](float& s, int key) {
                if (!seen.has(first + key, block * BLOCK_N)) s = -INFINITY;
            });
        }
    }
    // Calls f(score, its key from the thread's first) for one of the thread's two rows.
    template <class F>
    static __device__ __forceinline__ void for_each_score_of_row(Scores& x, int second, F f) {
#pragma unroll
        for (int i = 0; i < 2; ++i) f(x[2 * i + second], 8 * i);
    }
    // Of the tokens of this thread's scores.
    __device__ __forceinline__ void scale_keys(Scores& x, float factor) const {
        const float* const scales = shared.scales[at.stage].of_tokens + first_key() + laneid() / 4;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float scale =
                factor * arch::load_shared<float>(arch::shared_address(scales + 8 * i));
            x[2 * i] *= scale, x[2 * i + 1] *= scale;
        }
    }
    // As scale_weights of few rows.
    __device__ __forceinline__ void scale_weights(Scores& x, Output& o, int& exponent) const {
        const float* const scales = shared.scales[at.stage].of_tokens + first_key() + laneid() / 4;
        float largest = 0.0f;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            largest = fmaxf(largest,
                            fabsf(arch::load_shared<float>(arch::shared_address(scales + 8 * i))));
        }
        largest =
            TransposedSoftmax::over_keys(largest, [](float a, float b) { return fmaxf(a, b); });
        const int needed = exponent_of(largest);
        if (needed > exponent) {
            const float factor = power_of_two(exponent - needed);
            scale_output(o, {factor, factor});
            exponent = needed;
        }
        scale_keys(x, power_of_two(-exponent));
    }
    static __device__ __forceinline__ void scale_output(Output& o, float2 factor) {
#pragma unroll
        for (int i = 0; i < 4 * columns; ++i) o[i / 4][i % 4] *= i % 2 == 0 ? factor.x : factor.y;
    }

    template <CacheFormat format>
    __device__ __forceinline__ void run_segment(Segments& segment) {
        keep_segment<Kernel>(shared, segment);
        if (segment.last > segment.first) {
            typename Base::Query unused;
            this->load_query(segment, unused);
        }
        int v_exponent = -126;
        TransposedSoftmax softmax;
        Output o = {};
        const int first_block = segment.first;
        for (int block = segment.last - 1; block >= first_block; --block) {
            Scores x;
            wait(shared.full[at.stage], at.phase);
            score_keys<format>(x);
            if constexpr (Kernel::token_scales) {
                if (g.k_scale.tokens) scale_keys(x, 1.0f);
            }
            release();
            const auto factors =
                arch::load_shared<float2>(arch::shared_address(&shared.factors[own_row()]));
#pragma unroll
            for (int i = 0; i < 4; ++i) x[i] *= i % 2 == 0 ? factors.x : factors.y;
            modify(x, segment, block);
            float2 rescale = {1.0f, 1.0f};
            if (softmax.update(x, g.score_mod.unit_log2, rescale)) scale_output(o, rescale);
            wait(shared.full[at.stage], at.phase);
            if constexpr (Kernel::token_scales) {
                if (g.v_scale.tokens) scale_weights(x, o, v_exponent);
            }
            add_values<format>(o, x);
            release();
        }
        restore_segment<Kernel>(shared, segment);
        if constexpr (has_infinities<Kernel::portable, format>) {
#pragma unroll
            for (int i = 0; i < 4 * columns; ++i) o[i / 4][i % 4] = no_infinity(o[i / 4][i % 4]);
        }
        const float v_scale =
            scale_of_head(g.v_scale, segment.b(), segment.item.kv_head) *
            (!Kernel::nvfp4 && g.v_scale.tokens ? power_of_two(v_exponent) : 1.0f) *
            unit_of<Kernel>(format);
        scale_output(o, {v_scale, v_scale});
        softmax.reduce_sum();
        if (segment.stale) softmax.sum = {NAN, NAN};
        leave(o, softmax);
        this->add_up(segment, 0);
    }
    // What this warp has, relative to bases of its own.
    __device__ __forceinline__ void leave(const Output& o, const OnlineSoftmax& softmax) {
        const int warp = warpgroup::warpid();
        warpgroup::sync(1);  // what was there has been read
        const auto store = [](auto& to, const auto& value) {
            arch::store_shared(arch::shared_address(&to), value);
        };
        if (laneid() < 4) {
            store(reinterpret_cast<float2&>(shared.base[warp][own_row()]), softmax.base);
            store(reinterpret_cast<float2&>(shared.sum[warp][own_row()]), softmax.sum);
        }
#pragma unroll
        for (int second = 0; second < 2; ++second) {
            const int row = own_row() + second;
            if (row >= g.results.slot_rows) break;
            auto* const to = shared.out[warp][row];
#pragma unroll
            for (int j = 0; j < columns; j += Kernel::packed) {
                if constexpr (Kernel::nvfp4) {
                    store(to[4 * j + laneid() / 4], float4{o[j][second], o[j][second + 2],
                                                           o[j + 1][second], o[j + 1][second + 2]});
                } else {
                    store(reinterpret_cast<float2*>(to + 4 * j)[laneid() / 4],
                          float2{o[j][second], o[j][second + 2]});
                }
            }
        }
        warpgroup::sync(1);
    }
};

// Blocks start in their order. Those of NVFP4 that read the same keys, of one head each, follow
// each other: so a line with scales of several heads is still in L2 when the next head needs it.
template <class Kernel>
__device__ __forceinline__ int part_of_block(const Globals<Kernel>& g) {
    const int block = static_cast<int>(blockIdx.x);
    if constexpr (Kernel::nvfp4) {
        const int heads = g.work.kv_heads, of_head = g.schedule.parts_of_head();
        const int index = block / heads;
        if (index < of_head && of_head * int64_t{heads} <= gridDim.x)
            return (block - index * heads) * of_head + index;
    }
    return block;
}

template <class Kernel>
__global__ __launch_bounds__(Kernel::threads, Kernel::blocks_per_sm) void few_rows_kernel(
    const __grid_constant__ Globals<Kernel> g) {
    shared_allocator<Kernel::portable ? 128 : 1024> allocator(shared_memory());
    auto& shared = allocator.template allocate<Shared<Kernel>>();
    if (threadIdx.x == 0) {
        for (int i = 0; i < Kernel::slots; ++i) {
            init_semaphore(shared.full[i], Kernel::slot_arrivals);
            init_semaphore(shared.empty[i], decode::rows_apart(g)
                                                ? CONSUMER_WARPS
                                                : PartOfBlock<Kernel>::block_parts);
        }
        arch::mbarrier_init_fence();
    }
    arch::sync_block();
    arch::wait_for_dependencies();
    arch::launch_dependents();
    Segments segments(g.work, g.schedule, part_of_block(g));
    if (!g.schedule.is_of(g.work)) return poison(g);
    if (arch::warp_uniform(warpgroup::groupid()) == 0) {
        if constexpr (Kernel::reallocates) {
            warpgroup::increase_registers<Kernel::consumer_registers>();
        }
        if constexpr (Kernel::operand_rows == FEW_ROWS)
            FewRowsConsumer<Kernel>{{}, g, shared}.run(segments);
        else
            EightRowsConsumer<Kernel>{{{}, g, shared}}.run(segments);
    } else {
        if constexpr (Kernel::reallocates) {
            warpgroup::decrease_registers<Kernel::producer_registers>();
        }
        Producer<Kernel>{g, shared}.run(segments);
    }
}

}  // namespace thunderkittens::attention::decode
