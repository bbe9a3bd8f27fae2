// LoLCATS forward for Hopper (Zhang et al., "LoLCATs: On low-rank linearizing of large language
// models", 2024). A block walks over the chunks of 64 tokens of one head. Four warpgroups:
//   features  alpha Phi(Q) of a chunk and Phi(K) of the one before, by products with the maps and
//             both softmaxes in registers, into shared memory
//   linear    the sums of Phi(K)^T V and Phi(K) over the chunks before the window, fp32 in
//             registers. For each chunk it leaves a copy of the sums in shared memory, in 16 bits,
//             of those of Phi(K) in twice 16
//   window    scores of the chunk with itself and the chunk before, their maximum and weights; the
//             output, alpha Phi(Q) times the sums plus weights times V, over the denominator
//   producer  one thread, which brings Q, K and V by TMA
// Where there are too few heads to fill the GPU, the chunks are split into segments: a first kernel
// sums each segment's state (segment_states_sm90.cuh), and of many a second makes prefix sums.
#pragma once

#include "csrc/linear_attention/lolcats/feature_map.cuh"
#include "csrc/linear_attention/lolcats/running_state.cuh"

namespace thunderkittens::linear_attention {

constexpr int LOLCATS_THREADS = 4 * WARPGROUP_THREADS;
constexpr int LOLCATS_FEATURE_REGISTERS = 128, LOLCATS_PRODUCER_REGISTERS = 24;
// Of 512 together.
template <class K>
constexpr int LOLCATS_LINEAR_REGISTERS = K::features == 64 ? 168 : 144;
template <class K>
constexpr int LOLCATS_WINDOW_REGISTERS = K::features == 64 ? 192 : 216;
constexpr int LINEAR_BARRIER = 1, WINDOW_BARRIER = 2;

template <class K>
struct LolcatsGlobals {
    typename K::token_layout q, out;
    KeysAndValues<K> kv;
    typename K::map_layout q_map, k_map;
    const float *alpha, *beta;
    LolcatsStatePointers initial, final;
    const float* segment_states;  // before each segment; null: there is one
    float *maxima, *denominators;
    int heads, length, segments;

    __device__ __forceinline__ LolcatsWorkTile work_tile() const {
        return LolcatsWorkTile(int(blockIdx.x), int(blockIdx.y), heads, segments, initial.lengths,
                               length);
    }
};

template <class K>
struct LolcatsShared {
    static constexpr int stages = K::head_dim == 128 ? 3 : 4, query_stages = 2;
    typename K::map_tile q_map, k_map;
    typename K::token_tile q[query_stages];  // later the chunk's output
    struct Stage {
        typename K::token_tile k, v;
    } stage[stages];
    typename K::feature_tile q_features[K::groups], k_features[K::groups];
    typename K::state_tile state[K::groups];
    // Of the state, as the high and the low part of 16-bit operands; then zeros. The pitch has rows
    // in different banks.
    static constexpr int pitch = 2 * K::features + 8;
    sv<typename K::T, 3 * pitch> denominator;
    sv<float, 16> scratch;
    semaphore maps, q_full[query_stages], q_empty[query_stages];
    semaphore full[stages], empty[stages];
    semaphore q_features_full, q_features_empty, k_features_full, k_features_empty;
    semaphore linear_full, linear_empty;

    __device__ __forceinline__ void init() {
        init_semaphore(maps, 1);
        for (int s = 0; s < query_stages; ++s) {
            init_semaphore(q_full[s], 1);
            init_semaphore(q_empty[s], 1);
        }
        for (int s = 0; s < stages; ++s) {
            init_semaphore(full[s], 1);
            init_semaphore(empty[s], 2);
        }
        for (semaphore* s : {&q_features_full, &q_features_empty, &k_features_full,
                             &k_features_empty, &linear_full, &linear_empty})
            init_semaphore(*s, WARPGROUP_WARPS);
        arch::mbarrier_init_fence();
    }
};

// Step n is chunk begin + n. The n-th slot of the ring holds the chunk before it.
template <class K>
__device__ __forceinline__ void lolcats_produce(const LolcatsGlobals<K>& g,
                                                LolcatsShared<K>& shared,
                                                const LolcatsWorkTile& work) {
    using Shared = LolcatsShared<K>;
    tma::expect(shared.maps, shared.q_map, shared.k_map);
    tma::load_async(shared.q_map, g.q_map, elements(0, work.head, 0, 0), shared.maps);
    tma::load_async(shared.k_map, g.k_map, elements(0, work.head, 0, 0), shared.maps);
    pipeline_state<Shared::stages> at;
    pipeline_state<Shared::query_stages> q_at;
    for (int n = 0; n <= work.end - work.begin; ++n) {
        if (n > 0) {
            const int chunk = work.begin + n - 1;
            wait(shared.q_empty[q_at.stage], q_at.phase ^ 1);
            auto& q = shared.q[q_at.stage];
            tma::expect(shared.q_full[q_at.stage], q);
            tma::load_async(q, g.q, elements(work.b, work.head, work.terrace.row(chunk), 0),
                            shared.q_full[q_at.stage]);
            q_at.advance();
        }
        // Before the first chunk there is none; any will do, with a weight of zero.
        const int chunk = ::max(work.begin + n - 1, 0);
        wait(shared.empty[at.stage], at.phase ^ 1);
        auto& stage = shared.stage[at.stage];
        g.kv.load(stage.k, stage.v, work, chunk, g.initial.keys != nullptr, shared.full[at.stage]);
        at.advance();
    }
}

// Whether the sums of the chunk before that of step n are needed: by the next step, since it is
// before that one's window, or by the state after the last token.
template <class K>
__device__ __forceinline__ bool adds_chunk(const LolcatsGlobals<K>& g, const LolcatsWorkTile& work,
                                           int n) {
    const int before = work.begin + n - 1;
    if (before < 0) return false;
    return before + 2 < work.end ||
           (work.last() && g.final.numerator != nullptr && before < work.terrace.folded());
}

template <class K>
struct FeatureRole {
    using Shared = LolcatsShared<K>;
    const LolcatsGlobals<K>& g;
    Shared& shared;
    const LolcatsWorkTile& work;

    // The n-th tile of its kind.
    __device__ __forceinline__ void make(typename K::feature_tile (&to)[K::groups],
                                         const typename K::token_tile& tokens,
                                         const typename K::map_tile& map, float scale,
                                         semaphore& full, semaphore& empty, int n) const {
        typename K::projection z;
        typename K::Features features;
        warpgroup::mm_AB(z, tokens, map);
        warpgroup::mma_async_wait<0>(z);
        make_scaled_features<K>(features, z, scale);
        if (n > 0) wait(empty, (n - 1) % 2);
        store_feature_rows<K>(to, features);
        arch::fence_async_shared();
        signal_by_warp(full);
    }
    __device__ __forceinline__ void run() {
        const float alpha = arch::load_global_readonly(g.alpha + work.head);
        wait(shared.maps, 0);
        pipeline_state<Shared::stages> at;
        pipeline_state<Shared::query_stages> q_at;
        int made = 0;
#pragma unroll 1
        for (int n = 0; n < work.end - work.begin; ++n) {
            auto& shared = rematerialized(this->shared);
            wait(shared.q_full[q_at.stage], q_at.phase);
            make(shared.q_features, shared.q[q_at.stage], shared.q_map, alpha,
                 shared.q_features_full, shared.q_features_empty, n);
            if (adds_chunk(g, work, n)) {
                wait(shared.full[at.stage], at.phase);
                make(shared.k_features, shared.stage[at.stage].k, shared.k_map, 1.0f,
                     shared.k_features_full, shared.k_features_empty, made++);
            }
            at.advance();
            q_at.advance();
        }
    }
};

template <class K>
struct LinearRole {
    using T = typename K::T;
    using Shared = LolcatsShared<K>;
    const LolcatsGlobals<K>& g;
    Shared& shared;
    const LolcatsWorkTile& work;
    LolcatsRunningState<K> sums;

    __device__ __forceinline__ void sync() const { warpgroup::sync(LINEAR_BARRIER); }
    // A power of two, that numerator and denominator of the chunk are multiplied by: sums in half
    // must not overflow. Steps alternate between two places for the warps' maxima, so that a warp
    // that is a step ahead does not write over what another has yet to read.
    __device__ __forceinline__ float unit(int n) {
        if constexpr (std::is_same_v<T, bf16>) {
            return 1.0f;
        } else {
            float most = fmaxf(sums.largest(), fmaxf(sums.denominator.x, sums.denominator.y));
#pragma unroll
            for (int distance = 16; distance > 0; distance /= 2)
                most = fmaxf(most, arch::shuffle_xor(most, distance));
            const int first = n % 2 * WARPGROUP_WARPS;
            if (laneid() == 0) shared.scratch.set(first + warpgroup::warpid(), most);
            sync();
#pragma unroll
            for (int w = 0; w < WARPGROUP_WARPS; ++w)
                most = fmaxf(most, shared.scratch.get(first + w));
            const int exponent = int(arch::bit_cast<uint32_t>(most) >> 23) - 127;
            if (exponent < 14 || exponent > 127) return 1.0f;
            return arch::bit_cast<float>(uint32_t(127 + 13 - exponent) << 23);
        }
    }

    __device__ __forceinline__ void run() {
        const int64_t floats = int64_t(2 * K::features) * K::head_dim;
        sums.clear();
        for (int i = 2 * Shared::pitch + warpgroup::laneid(); i < 3 * Shared::pitch;
             i += WARPGROUP_THREADS)
            shared.denominator.set(i, T(0.0f));
        if (g.initial.numerator != nullptr) {
            sums.add(g.initial.numerator + work.batch_head * floats,
                     g.initial.denominator + int64_t(work.batch_head) * 2 * K::features);
        }
        if (g.segment_states != nullptr) {
            add_segments_before(sums, g.segment_states, work, g.segments,
                                arch::shared_address(&shared.state[0]));
            sync();
        }
        int added = 0;
        pipeline_state<Shared::stages> at;
#pragma unroll 1
        for (int n = 0; n < work.end - work.begin; ++n) {
            const float scale = unit(n);
            if (n > 0) wait(shared.linear_empty, (n - 1) % 2);
            sums.store_operand(shared.state, scale);
            if (laneid() < LolcatsRunningState<K>::warp_pairs) {
                const float2 x = {scale * sums.denominator.x, scale * sums.denominator.y};
                const packed_type<T> high = pack_pair<T>(x.x, x.y);
                const float2 whole = unpack_pair<T>(high);
                const int feature = LolcatsRunningState<K>::own_feature();
                arch::store_shared(shared.denominator.address_of(feature), high);
                arch::store_shared(shared.denominator.address_of(Shared::pitch + feature),
                                   pack_pair<T>(x.x - whole.x, x.y - whole.y));
            }
            if constexpr (!std::is_same_v<T, bf16>) {
                if (warpgroup::laneid() == 0) shared.scratch.set(8, scale);
            }
            arch::fence_async_shared();
            signal_by_warp(shared.linear_full);
            if (adds_chunk(g, work, n)) {
                wait(shared.full[at.stage], at.phase);
                wait(shared.k_features_full, added++ % 2);
                sums.issue(shared.k_features, shared.stage[at.stage].v);
                count_features(sums, shared.k_features);
                sums.wait();
                signal_by_warp(shared.k_features_empty);
            }
            signal(shared.empty[at.stage]);
            at.advance();
        }
        if (work.last() && g.final.numerator != nullptr) {
            sums.store(g.final.numerator + work.batch_head * floats,
                       g.final.denominator + int64_t(work.batch_head) * 2 * K::features);
        }
    }
};

template <class K>
struct WindowRole {
    using T = typename K::T;
    using Shared = LolcatsShared<K>;
    using scores = rt_fl<16, CHUNK>;
    const LolcatsGlobals<K>& g;
    Shared& shared;
    const LolcatsWorkTile& work;

    // -inf for the tokens after a query, in its own chunk.
    static __device__ __forceinline__ void mask(scores& s) {
        const int band = arch::warp_uniform(warpgroup::warpid());
        const bool even = 2 * (laneid() % 4) > laneid() / 4;
        const bool odd = 2 * (laneid() % 4) + 1 > laneid() / 4;
        constexpr float2 nothing = {-INFINITY, -INFINITY};
#pragma unroll
        for (int j = 0; j < scores::width; ++j) {
            auto& block = s.tiles[0][j].data;
            if (j > band) {
#pragma unroll
                for (int i = 0; i < 4; ++i) block[i] = nothing;
            } else if (j == band) {
                block[0] = {even ? -INFINITY : block[0].x, odd ? -INFINITY : block[0].y};
                block[2] = nothing;
                block[3] = {even ? -INFINITY : block[3].x, odd ? -INFINITY : block[3].y};
            }
        }
    }
    static __device__ __forceinline__ void find_maximum(scores& s, float2& top) {
        for_each_element(s, [&](float& x, int, bool low) {
            float& t = low ? top.y : top.x;
            t = fmaxf(t, x);
        });
    }
    // exp2(s unit - shift), rounded to an operand; their sums are added up.
    static __device__ __forceinline__ void weigh(rt<T, 16, CHUNK>& weights, scores& s, float unit,
                                                 float2 shift, float2& sum) {
        for_each_element(s, [&](float& x, int, bool low) {
            x = arch::exp2_approx(fmaf(x, unit, low ? -shift.y : -shift.x));
            (low ? sum.y : sum.x) += x;
        });
#pragma unroll
        for (int j = 0; j < scores::width; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 pair = s.tiles[0][j].data[i];
                weights.tiles[0][j].data[i] = pack_pair<T>(pair.x, pair.y);
            }
        }
    }
    // alpha phi(q) . denominator of the lane's two rows; each lane of the quad has a part of it. On
    // the tensor cores: one column for the high parts, one for the low ones.
    static __device__ __forceinline__ float2 dot(const Shared& shared) {
        constexpr int tile_bytes = int(sizeof(shared.q_features[0]));
        const MatrixRows<typename K::feature_tile> rows(shared.q_features[0],
                                                        16 * warpgroup::warpid());
        // ldmatrix: 8 columns, of which two differ from 0, of 8 features.
        const uint32_t place = shared.denominator.address_of(
            ::min(laneid() % 8, 2) * Shared::pitch + 8 * (laneid() / 8));
        float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int block = 0; block < 2 * K::features / 16; block += 2) {
            uint32_t columns[4];
            arch::load_matrix_x4(columns[0], columns[1], columns[2], columns[3],
                                 place + uint32_t(32 * block));
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                uint32_t words[4];
                arch::load_matrix_x4(words[0], words[1], words[2], words[3],
                                     rows.at((block + i) % 4, block / 4 * tile_bytes));
                const uint32_t pair[2] = {columns[2 * i], columns[2 * i + 1]};
                const float before[4] = {sum[0], sum[1], sum[2], sum[3]};
                arch::mma_sync<T, T>::fma(sum, words, pair, before);
            }
        }
        return {sum[0] + sum[1], sum[2] + sum[3]};
    }
    __device__ __forceinline__ void store_row(float* rows, int row, float x) const {
        if (rows == nullptr || row < 0 || row >= g.length) return;
        arch::store_global(rows + int64_t(work.batch_head) * g.length + row, x);
    }

    // A chunk that begins in the caches, which TMA cannot store: its coordinates are not negative.
    __device__ __forceinline__ void store_new_rows(rt_fl<16, K::head_dim>& out, int row) const {
        T* to = g.out.raw_ptr + int64_t(work.batch_head) * g.length * K::head_dim;
#pragma unroll
        for (int j = 0; j < K::head_dim / 16; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int at = row + 8 * (i % 2),
                          column = 16 * j + 8 * (i / 2) + 2 * (laneid() % 4);
                if (at < 0 || at >= g.length) continue;
                const float2 pair = out.tiles[0][j].data[i];
                arch::store_global(
                    reinterpret_cast<packed_type<T>*>(to + int64_t(at) * K::head_dim + column),
                    pack_pair<T>(pair.x, pair.y));
            }
        }
    }

    // Stores rows from `first_row` on, by TMA from the query's slot; `row` is the lane's first one.
    __device__ __forceinline__ void store_chunk(rt_fl<16, K::head_dim>& out,
                                                typename K::token_tile& q, int first_row, int row) {
        if (first_row >= 0) {
            MatrixRows<typename K::token_tile>(q, 16 * warpgroup::warpid()).store(out);
            warpgroup::sync(WINDOW_BARRIER);
            if (warpgroup::laneid() == 0)
                tma::store_async(g.out, q, elements(work.b, work.head, first_row, 0));
        } else {
            store_new_rows(out, first_row + row);
        }
    }

    __device__ __forceinline__ void run() {
        constexpr float scale = K::head_dim == 128 ? 0.08838834764831845f : 0.125f;
        constexpr float unit = scale * LOG2_E;
        const float beta = arch::load_global_readonly(g.beta + work.head);
        const int count = work.end - work.begin, row = lane_row();
        wait(shared.full[0], 0);
        pipeline_state<Shared::stages> before, own;
        pipeline_state<Shared::query_stages> q_at;
        own.advance();
        int last_query = 0;
#pragma unroll 1
        for (int n = 0; n < count; ++n) {
            auto& shared = rematerialized(this->shared);
            auto& q = shared.q[q_at.stage];
            scores prior, diagonal;
            wait(shared.q_full[q_at.stage], q_at.phase);
            warpgroup::mm_ABt(prior, q, shared.stage[before.stage].k);
            wait(shared.full[own.stage], own.phase);
            warpgroup::mm_ABt(diagonal, q, shared.stage[own.stage].k);
            if (n > 0 && warpgroup::laneid() == 0) {
                // The output of the step before has left its query's slot.
                tma::store_async_read_wait();
                arrive(shared.q_empty[last_query]);
            }
            rt_fl<16, K::head_dim> out;
            float factor = beta, inverse_unit = 1.0f;
            if constexpr (!std::is_same_v<T, bf16>) {
                wait(shared.linear_full, n % 2);
                const float common = shared.scratch.get(8);
                factor *= common;
                inverse_unit = 1.0f / common;
            }
            warpgroup::mma_async_wait<0>(prior);
            pin(diagonal);
            if (work.begin + n == 0)
                for_each_element(prior, [](float& x, int, bool) { x = -INFINITY; });
            mask(diagonal);
            float2 top = {-INFINITY, -INFINITY};
            find_maximum(prior, top);
            find_maximum(diagonal, top);
            top = {quad_maximum(top.x), quad_maximum(top.y)};
            const float log_factor = arch::log2_approx(factor);
            const float2 shift = {fmaf(top.x, unit, -log_factor), fmaf(top.y, unit, -log_factor)};
            rt<T, 16, CHUNK> prior_weights, diagonal_weights;
            float2 sum = {0.0f, 0.0f};
            weigh(prior_weights, prior, unit, shift, sum);
            weigh(diagonal_weights, diagonal, unit, shift, sum);
            wait(shared.q_features_full, n % 2);
            if constexpr (std::is_same_v<T, bf16>) wait(shared.linear_full, n % 2);
#pragma unroll
            for (int t = 0; t < K::groups; ++t) {
                if (t == 0)
                    warpgroup::mm_AB(out, shared.q_features[t], shared.state[t]);
                else
                    warpgroup::mma_AB(out, shared.q_features[t], shared.state[t]);
            }
            const int prior_stage = before.stage;
            last_query = q_at.stage;
            warpgroup::mma_AB(out, prior_weights, shared.stage[before.stage].v);
            warpgroup::mma_AB(out, diagonal_weights, shared.stage[own.stage].v);
            before.advance();
            own.advance();
            q_at.advance();
            const float2 linear = dot(shared);
            sum = {quad_sum(sum.x + linear.x), quad_sum(sum.y + linear.y)};
            warpgroup::mma_async_wait<2>();
            signal_by_warp(shared.q_features_empty);
            signal_by_warp(shared.linear_empty);
            if (laneid() % 4 == 0) {
                const int first = work.terrace.row(work.begin + n) + row;
                store_row(g.maxima, first, scale * top.x);
                store_row(g.maxima, first + 8, scale * top.y);
                store_row(g.denominators, first, inverse_unit * sum.x);
                store_row(g.denominators, first + 8, inverse_unit * sum.y);
            }
            const float2 reciprocal = {arch::reciprocal_approx(sum.x),
                                       arch::reciprocal_approx(sum.y)};
            warpgroup::mma_async_wait<0>(out);
            signal(shared.empty[prior_stage]);
            for_each_element(
                out, [&](float& x, int, bool low) { x *= low ? reciprocal.y : reciprocal.x; });
            const int first_row = work.terrace.row(work.begin + n);
            store_chunk(out, q, first_row, row);
        }
        if (warpgroup::laneid() == 0) tma::store_async_wait();
    }
};

template <class K>
__global__ __launch_bounds__(LOLCATS_THREADS, 1) void lolcats_forward_kernel(
    const __grid_constant__ LolcatsGlobals<K> g) {
    shared_allocator<> allocator(shared_memory());
    auto& shared = allocator.template allocate<LolcatsShared<K>>();
    if (threadIdx.x == 0) shared.init();
    arch::sync_block();
    const int role = arch::warp_uniform(warpgroup::groupid());
    // The other roles use nothing that the kernels before this one make, but first rows, for which
    // the kernel that sums segments has waited.
    if (role == 0 || g.segment_states == nullptr)
        arch::wait_for_dependencies();
    else
        arch::skip_dependencies();
    const LolcatsWorkTile work = g.work_tile();
    if (role == 3) {
        warpgroup::decrease_registers<LOLCATS_PRODUCER_REGISTERS>();
        if (warpgroup::elect_leader() && work.begin < work.end) lolcats_produce(g, shared, work);
    } else if (role == 2) {
        warpgroup::decrease_registers<LOLCATS_FEATURE_REGISTERS>();
        if (work.begin < work.end) FeatureRole<K>{g, shared, work}.run();
    } else if (role == 1) {
        warpgroup::increase_registers<LOLCATS_WINDOW_REGISTERS<K>>();
        if (work.begin < work.end) WindowRole<K>{g, shared, work}.run();
    } else {
        warpgroup::increase_registers<LOLCATS_LINEAR_REGISTERS<K>>();
        if (work.begin < work.end) LinearRole<K>{g, shared, work, {}}.run();
    }
}

template <DType dtype, int head_dim, int features>
void launch_lolcats_forward(const LolcatsParams& params, const LolcatsWorkspace& workspace,
                            Stream stream) {
    using K = LolcatsKernel<dtype, head_dim, features>;
    static_assert(sizeof(LolcatsShared<K>) + 1024 <= LOLCATS_FORWARD_BYTES);
    const LolcatsProblem& p = params.problem;
    const LolcatsGlobals<K> globals{
        .q = token_layout_of<typename K::token_layout>(params.q, p, p.heads, p.length),
        .out = token_layout_of<typename K::token_layout>(params.out, p, p.heads, p.length),
        .kv = KeysAndValues<K>(params, workspace),
        .q_map = map_layout_of<typename K::map_layout>(params.q_map, p.heads),
        .k_map = map_layout_of<typename K::map_layout>(params.k_map, p.heads),
        .alpha = params.alpha,
        .beta = params.beta,
        .initial = params.initial,
        .final = params.final,
        .segment_states = workspace.segment_states,
        .maxima = params.maxima,
        .denominators = params.denominators,
        .heads = int(p.heads),
        .length = int(p.length),
        .segments = params.segments};
    kittens::launch({.dependent = params.segments > 1}, lolcats_forward_kernel<K>,
                    dim3(unsigned(p.batch * p.heads), unsigned(params.segments)),
                    dim3(LOLCATS_THREADS), dim3(1), LOLCATS_FORWARD_BYTES, stream, globals);
}

}  // namespace thunderkittens::linear_attention
