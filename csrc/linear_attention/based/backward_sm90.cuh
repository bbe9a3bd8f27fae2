// Based backward for Hopper, in two kernels of the forward's form (forward_sm90.cuh). With
// p(s) = 1 + s + s^2 / 2, p'(s) = 1 + s, w_i the reciprocal of row i's denominator (1 without), and
// d_i the gradient of that denominator:
//   queries  forwards over the chunks, with the state S of the keys before:
//            dQ_i = sum over j <= i of p'(s_ij) (w_i dO_i . v_j + d_i) k_j / 4
//                   + the features' gradient w_i S dO_i, and the denominator's
//   keys     backwards, with the state R = sum of phi(q_i) w_i dO_i^T of the queries behind:
//            dV_j = sum over i >= j of p(s_ij) w_i dO_i + phi(k_j) R
//            dK_j = sum over i >= j of p'(s_ij) (w_i dO_i . v_j + d_i) q_i / 4
//                   + the features' gradient R v_j, and the denominator's
// A block has 64 columns of the values; with more of them dQ and dK are sums of several blocks'
// parts, which a last kernel adds in order. Nothing is added atomically: reruns are bit-equal.
#pragma once

#include "csrc/linear_attention/based/forward_sm90.cuh"

namespace thunderkittens::linear_attention {

constexpr int BACKWARD_STAGES = 3;

template <class T>
struct BackwardGlobals {
    ElementLayout<T> q, k;
    ValueLayout<T> v, grad_out, dv;
    WeightLayout weights;
    Segments segments;
    StateView initial, final;
    T* elements;     // dq or dk, (batch_heads, length, 16), where there is one slice
    float* partial;  // else (slices, batch_heads, length, 16)
};

template <class T>
struct BackwardShared {
    struct Stage {
        value_tile<T> v, grad_out;
        element_tile<T> q, k;
        TokenWeights weights;
    } stages[BACKWARD_STAGES];
    state_tile<T> state;
    value_tile<T> dv;
    Transposed<T> transposed, scaled;
    sv<float, 16> scratch;
    semaphore full[BACKWARD_STAGES];
};

template <class T, bool weighted>
__device__ __forceinline__ void load_backward_chunk(const BackwardGlobals<T>& g,
                                                    BackwardShared<T>& shared,
                                                    const Segments::WorkTile& work, int chunk,
                                                    int i) {
    auto& stage = shared.stages[i % BACKWARD_STAGES];
    semaphore& full = shared.full[i % BACKWARD_STAGES];
    const int row = chunk * CHUNK, column = work.first_column();
    if constexpr (weighted)
        tma::expect(full, stage.q, stage.k, stage.v, stage.grad_out, stage.weights);
    else
        tma::expect(full, stage.q, stage.k, stage.v, stage.grad_out);
    tma::load_async(stage.k, g.k, elements(work.b, work.head, row, 0), full);
    tma::load_async(stage.q, g.q, elements(work.b, work.head, row, 0), full);
    tma::load_async(stage.v, g.v, elements(work.b, work.head, row, column), full);
    tma::load_async(stage.grad_out, g.grad_out, elements(work.b, work.head, row, column), full);
    if constexpr (weighted) {
        tma::load_async(stage.weights.values, g.weights, {0, 0, work.batch_head, chunk}, full);
        tma::load_async(stage.weights.denominator, g.weights, {0, 1, work.batch_head, chunk}, full);
    }
}

// The prologue, with the loads of the first chunks.
template <class T, class Load>
__device__ __forceinline__ void start_backward(BackwardShared<T>& shared,
                                               const Segments::WorkTile& work,
                                               const Load& load_chunk) {
    if (first_thread()) {
        for (int s = 0; s < BACKWARD_STAGES; ++s) init_semaphore(shared.full[s], 1);
        arch::mbarrier_init_fence();
    }
    shared.transposed.fill_constants();
    shared.scaled.fill_constants();
    arch::wait_for_dependencies();
    if (first_thread()) {
        for (int i = 0; i < BACKWARD_STAGES - 1 && i < work.chunks(); ++i) load_chunk(i);
    }
}

// Gradients of elements 4c to 4c + 3 of the lane's two rows.
template <class Globals>
__device__ __forceinline__ void store_elements(const Globals& g, const Segments::WorkTile& work,
                                               int chunk, const float4 (&rows)[2]) {
    using T = std::remove_pointer_t<decltype(g.elements)>;
    const int first = chunk * CHUNK + 16 * warpgroup::warpid() + laneid() / 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = first + 8 * r;
        if (row >= g.segments.length) continue;
        const int64_t at =
            (int64_t(work.batch_head) * g.segments.length + row) * ELEMENTS + 4 * (laneid() % 4);
        const float4& x = rows[r];
        if (g.partial != nullptr) {
            const int64_t rows = int64_t(g.segments.batch_heads) * g.segments.length;
            float* to = g.partial + work.slice * rows * ELEMENTS + at;
            arch::store_global(reinterpret_cast<float4*>(to), x);
        } else {
            const uint2 word = {arch::bit_cast<uint32_t>(pack_pair<T>(x.x, x.y)),
                                arch::bit_cast<uint32_t>(pack_pair<T>(x.z, x.w))};
            arch::store_global(reinterpret_cast<uint2*>(g.elements + at), word);
        }
    }
}

// The features' gradients, `blocks` blocks of them at a time, from `first` on.
template <int blocks, int first, class T>
__device__ __forceinline__ void add_features(ElementGradient<T>& gradient,
                                             const value_tile<T>& values, state_tile<T>& state) {
    if constexpr (first < FEATURE_BLOCKS) {
        rt_fl<16, 16 * blocks> features;
        warpgroup::mm_ABt(features, values,
                          state.template subtile<16 * blocks, VALUES>({first / blocks, 0}));
        warpgroup::mma_async_wait<0>(features);
        gradient.template add<first>(features);
        add_features<blocks, first + blocks>(gradient, values, state);
    }
}

// The gradient of a chunk's elements: through the features, times the rows' factors, and what
// `within` has been added up to.
template <class T>
__device__ __forceinline__ void sum_elements(float4 (&result)[2],
                                             const ElementGradient<T>& gradient,
                                             const rt_fl<16, 16>& within, float2 factor) {
    float4 before[2];
    gradient.finish(before, factor);
    own_elements(result, within);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        result[r] = {result[r].x + before[r].x, result[r].y + before[r].y,
                     result[r].z + before[r].z, result[r].w + before[r].w};
        // Now, before the next products take their registers.
        arch::pin_register(result[r].x);
        arch::pin_register(result[r].y);
        arch::pin_register(result[r].z);
        arch::pin_register(result[r].w);
    }
}
// The same, where the features' gradient is the product of `values` and the published state.
template <int blocks, class T>
__device__ __forceinline__ void finish_elements(float4 (&result)[2], ElementGradient<T>& gradient,
                                                const value_tile<T>& values, state_tile<T>& state,
                                                const rt_fl<16, 16>& within, float2 factor) {
    add_features<blocks, 0>(gradient, values, state);
    sum_elements(result, gradient, within, factor);
}

template <class T, bool weighted>
__global__ __launch_bounds__(WARPGROUP_THREADS, BLOCKS_PER_SM) void based_query_gradient_kernel(
    const __grid_constant__ BackwardGlobals<T> g) {
    shared_allocator<> allocator(shared_memory());
    auto& block = allocator.template allocate<BackwardShared<T>>();
    const Segments::WorkTile work = g.segments.work_tile();
    const auto load_chunk = [&](int i) {
        load_backward_chunk<T, weighted>(g, block, work, work.begin + i, i);
    };
    start_backward(block, work, load_chunk);
    RunningState<T, false> state;
    RunningDenominator<T> running_denominator;
    const StateView initial = g.initial.at(g.segments.state(work));
    state.load(initial, work.first_column());
    if constexpr (weighted) running_denominator.template load<false>(initial);
    arch::sync_block();
    const FeatureRows<T> feature_rows(block.transposed, block.transposed);

#pragma unroll 1
    for (int i = 0; i < work.chunks(); ++i) {
        auto& shared = rematerialized(block);
        auto& stage = shared.stages[i % BACKWARD_STAGES];
        wait(shared.full[i % BACKWARD_STAGES], i / BACKWARD_STAGES % 2);
        transpose_chunk(shared.transposed, stage.k);
        const float scale = state.store_operand(shared.state, shared.scratch);
        // Not before, when registers of the state are read: ptxas would wait for the products.
        rt_fl<16, CHUNK> scores, products;
        warpgroup::mm_ABt(scores, stage.q, stage.k);
        warpgroup::mm_ABt(products, stage.grad_out, stage.v);
        arch::fence_async_shared();
        warpgroup::sync(1);
        if (first_thread() && i + BACKWARD_STAGES - 1 < work.chunks())
            load_chunk(i + BACKWARD_STAGES - 1);

        float2 w = {1.0f, 1.0f}, d = {0.0f, 0.0f};
        if constexpr (weighted) {
            const int row = 16 * warpgroup::warpid() + laneid() / 4;
            w = {stage.weights.values.get(row), stage.weights.values.get(row + 8)};
            // Once, whatever the number of slices.
            if (work.slice == 0)
                d = {stage.weights.denominator.get(row), stage.weights.denominator.get(row + 8)};
        }
        warpgroup::mma_async_wait<0>(products);
        pin(scores);
        const int upper = 16 * warpgroup::warpid() + laneid() / 4;
        rt<T, 16, CHUNK> weights;
#pragma unroll
        for (int j = 0; j < CHUNK / 16; ++j) {
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                const int row = upper + 8 * (n % 2),
                          column = 16 * j + 8 * (n / 2) + 2 * (laneid() % 4);
                const float wr = n % 2 ? w.y : w.x, dr = n % 2 ? d.y : d.x;
                const float2 s = scores.tiles[0][j].data[n], p = products.tiles[0][j].data[n];
                const float x = fmaf(s.x, 1.0f / 16, 0.25f) * fmaf(p.x, wr, dr);
                const float y = fmaf(s.y, 1.0f / 16, 0.25f) * fmaf(p.y, wr, dr);
                weights.tiles[0][j].data[n] =
                    pack_pair<T>(column <= row ? x : 0.0f, column + 1 <= row ? y : 0.0f);
            }
        }
        rt_fl<16, 16> within;
        warpgroup::mm_AB(within, weights, stage.k);
        RotatedRows<T> rows;
        rows.load(stage.q);
        ElementGradient<T> gradient(rows);
        warpgroup::mma_async_wait<0>(within);
        if constexpr (weighted) {
            if (work.slice == 0) {
                rt<T, 16, 16> q;
                warpgroup::load(q, stage.q);
                running_denominator.add_gradient(within, q, d);
            }
            running_denominator.add(stage.k, g.segments.tokens(work.begin + i));
        }
        float4 result[2];
        finish_elements<5>(result, gradient, stage.grad_out, shared.state, within,
                           {0.25f * scale * w.x, 0.25f * scale * w.y});
        typename RunningState<T, false>::Operands key_features;
        state.add_most(key_features, feature_rows, stage.v);
        state.add_rest(key_features, feature_rows, stage.v);
        store_elements(g, work, work.begin + i, result);
        state.wait();
        warpgroup::sync(1);  // the state and the transposed tile are free
    }
}

// Each call is by all threads; the tile is free again when the next chunk's barrier is behind.
template <class T>
__device__ __forceinline__ void store_value_gradient(const BackwardGlobals<T>& g,
                                                     BackwardShared<T>& shared,
                                                     const Segments::WorkTile& work, int chunk,
                                                     const rt_fl<16, VALUES>& dv) {
    warpgroup::store(shared.dv, dv);
    arch::fence_async_shared();
    warpgroup::sync(1);
    if (first_thread()) {
        tma::store_async(g.dv, shared.dv,
                         elements(work.b, work.head, chunk * CHUNK, work.first_column()));
    }
}

// The gradient of the initial state, where there is one segment.
template <class T, bool weighted>
__device__ __forceinline__ void store_state(const StateView& to, const Segments::WorkTile& work,
                                            RunningState<T, weighted>& state,
                                            RunningDenominator<T>& running_denominator) {
    state.store(to, work.first_column());
    if constexpr (weighted) {
        if (work.slice == 0 && warpgroup::warpid() == 0)
            running_denominator.template store<true>(to);
    }
}

template <class T, bool weighted>
__device__ __forceinline__ void transpose_queries(BackwardShared<T>& shared,
                                                  typename BackwardShared<T>::Stage& stage) {
    if constexpr (weighted)
        transpose_chunk(shared.transposed, shared.scaled, stage.q, stage.weights);
    else
        transpose_chunk(shared.transposed, stage.q);
}

template <class T, bool weighted>
__global__ __launch_bounds__(WARPGROUP_THREADS, BLOCKS_PER_SM) void based_key_gradient_kernel(
    const __grid_constant__ BackwardGlobals<T> g) {
    shared_allocator<> allocator(shared_memory());
    auto& block = allocator.template allocate<BackwardShared<T>>();
    const Segments::WorkTile work = g.segments.work_tile();
    const auto load_chunk = [&](int i) {
        load_backward_chunk<T, weighted>(g, block, work, work.end - 1 - i, i);
    };
    start_backward(block, work, load_chunk);
    RunningState<T, weighted> state;
    RunningDenominator<T> running_denominator;
    const StateView initial = g.initial.at(g.segments.state(work));
    state.load(initial, work.first_column());
    if constexpr (weighted) running_denominator.template load<true>(initial);
    arch::sync_block();
    const FeatureRows<T> feature_rows(block.transposed, weighted ? block.scaled : block.transposed);

#pragma unroll 1
    for (int i = 0; i < work.chunks(); ++i) {
        auto& shared = rematerialized(block);
        const int chunk = work.end - 1 - i;
        auto& stage = shared.stages[i % BACKWARD_STAGES];
        wait(shared.full[i % BACKWARD_STAGES], i / BACKWARD_STAGES % 2);
        transpose_queries<T, weighted>(shared, stage);
        // In bf16 the scale is not needed, but without it ptxas overlaps more than registers hold.
        const float scale = state.template store_operand<true>(shared.state, shared.scratch);
        arch::fence_async_shared();
        if (first_thread()) tma::store_async_read_wait();
        warpgroup::sync(1);
        if (first_thread() && i + BACKWARD_STAGES - 1 < work.chunks())
            load_chunk(i + BACKWARD_STAGES - 1);

        rt_fl<16, CHUNK> scores, products;  // transposed: keys are rows
        warpgroup::mm_ABt(scores, stage.k, stage.q);
        warpgroup::mm_ABt(products, stage.v, stage.grad_out);
        warpgroup::mma_async_wait<0>(products);
        pin(scores);
        const int upper = 16 * warpgroup::warpid() + laneid() / 4;
        rt<T, 16, CHUNK> weights, grad_weights;
#pragma unroll
        for (int j = 0; j < CHUNK / 16; ++j) {
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                const int row = upper + 8 * (n % 2),
                          column = 16 * j + 8 * (n / 2) + 2 * (laneid() % 4);
                float2 w = {1.0f, 1.0f}, d = {0.0f, 0.0f};
                if constexpr (weighted) {
                    w = TokenWeights::pair(stage.weights.values, column);
                    if (work.slice == 0) d = TokenWeights::pair(stage.weights.denominator, column);
                }
                const bool seen[] = {row <= column, row <= column + 1};
                const float2 s = scores.tiles[0][j].data[n], p = products.tiles[0][j].data[n];
                const auto polynomial = [](float x) {
                    return fmaf(x, fmaf(x, 1.0f / 32, 0.25f), 1.0f);
                };
                weights.tiles[0][j].data[n] = pack_pair<T>(seen[0] ? w.x * polynomial(s.x) : 0.0f,
                                                           seen[1] ? w.y * polynomial(s.y) : 0.0f);
                const float x = fmaf(s.x, 1.0f / 16, 0.25f) * fmaf(p.x, w.x, d.x);
                const float y = fmaf(s.y, 1.0f / 16, 0.25f) * fmaf(p.y, w.y, d.y);
                grad_weights.tiles[0][j].data[n] =
                    pack_pair<T>(seen[0] ? x : 0.0f, seen[1] ? y : 0.0f);
            }
        }
        rt_fl<16, 16> within;
        warpgroup::mm_AB(within, grad_weights, stage.q);
        rt_fl<16, VALUES> dv;
        warpgroup::mm_AB(dv, weights, stage.grad_out);
        warpgroup::mma_async_wait<0>(dv);
        pin(within);
        RotatedRows<T> rows;
        rows.load(stage.k);
        rt<T, 16, FEATURE_ROWS> features;
        rows.make(features);
        scale_rows(dv, {1.0f / scale, 1.0f / scale});
        warpgroup::mma_AB(dv, features, shared.state);
        warpgroup::mma_async_wait<0>(dv);
        scale_rows(dv, {scale, scale});
        store_value_gradient(g, shared, work, chunk, dv);
        if constexpr (weighted) {
            if (work.slice == 0) {
                rt<T, 16, 16> k;
                warpgroup::load(k, stage.k);
                running_denominator.add_gradient(within, k, {1.0f, 1.0f});
            }
            running_denominator.add(stage.q, stage.weights);
        }
        ElementGradient<T> gradient(rows);
        float4 result[2];
        finish_elements<2>(result, gradient, stage.v, shared.state, within,
                           {0.25f * scale, 0.25f * scale});
        typename RunningState<T, weighted>::Operands query_features;
        state.add_most(query_features, feature_rows, stage.grad_out);
        state.add_rest(query_features, feature_rows, stage.grad_out);
        store_elements(g, work, chunk, result);
        state.wait();
        warpgroup::sync(1);  // the state and the transposed tiles are free
    }
    store_state(g.final.at(work.batch_head), work, state, running_denominator);
    if (first_thread()) tma::store_async_wait();
}

template <class T>
BackwardGlobals<T> backward_globals(const BasedBackwardParams& params,
                                    const BackwardKernelParams& kernel,
                                    const StatePointers& initial, const StatePointers& final,
                                    const Operand& elements, float* partial) {
    const BasedProblem& p = params.forward.problem;
    static_assert(sizeof(BackwardShared<T>) + 1024 <= BACKWARD_BYTES);
    return {.q = layout_of<ElementLayout<T>>(params.forward.q, p, ELEMENTS),
            .k = layout_of<ElementLayout<T>>(params.forward.k, p, ELEMENTS),
            .v = layout_of<ValueLayout<T>>(params.forward.v, p, p.value_dim),
            .grad_out = layout_of<ValueLayout<T>>(params.grad_out, p, p.value_dim),
            // A tensor map needs an address, also where nothing goes through it.
            .dv = layout_of<ValueLayout<T>>(params.dv.data ? params.dv : params.forward.v, p,
                                            p.value_dim),
            .weights = weight_layout(
                p.denominator ? kernel.weights
                              : static_cast<float*>(const_cast<void*>(params.forward.q.data)),
                p),
            .segments = Segments(p, params.forward.segments),
            .initial = {initial.numerator, initial.denominator, int(p.value_dim)},
            .final = {final.numerator, final.denominator, int(p.value_dim)},
            .elements = static_cast<T*>(const_cast<void*>(elements.data)),
            .partial = partial};
}
template <class T>
void launch_backward_kernel(void (*kernel)(BackwardGlobals<T>), const BasedBackwardParams& params,
                            const BackwardGlobals<T>& globals, Stream stream) {
    kittens::launch(
        {.dependent = params.forward.problem.denominator || params.forward.segments > 1}, kernel,
        dim3(unsigned(globals.segments.blocks(params.forward.problem.batch))),
        dim3(WARPGROUP_THREADS), dim3(1), BACKWARD_BYTES, stream, globals);
}

template <DType dtype>
void launch_based_query_gradient(const BasedBackwardParams& params,
                                 const BackwardKernelParams& kernel, Stream stream) {
    using T = type_of<dtype>;
    const auto globals =
        backward_globals<T>(params, kernel, kernel.before, {}, params.dq, kernel.partial_dq);
    launch_backward_kernel<T>(params.forward.problem.denominator
                                  ? based_query_gradient_kernel<T, true>
                                  : based_query_gradient_kernel<T, false>,
                              params, globals, stream);
}

template <DType dtype>
void launch_based_key_gradient(const BasedBackwardParams& params,
                               const BackwardKernelParams& kernel, Stream stream) {
    using T = type_of<dtype>;
    const auto globals = backward_globals<T>(params, kernel, kernel.after, kernel.grad_initial,
                                             params.dk, kernel.partial_dk);
    launch_backward_kernel<T>(params.forward.problem.denominator
                                  ? based_key_gradient_kernel<T, true>
                                  : based_key_gradient_kernel<T, false>,
                              params, globals, stream);
}

}  // namespace thunderkittens::linear_attention
