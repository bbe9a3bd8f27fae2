// Based backward for every GPU from compute capability 8.0 on: the two kernels of
// backward_sm90.cuh, in the form of forward_sm80.cuh. A chunk of a kernel has two parts:
//   products   scores, weights and their gradients, 16 columns at a time, so that no tile of 64 is
//              in registers; what the chunk adds to the state
//   features   the gradient of the features, from the state, and through them
// The first part reads all operands, of which the second has what it needs in registers: the next
// chunk comes during the second, into the same memory. So a block takes 45 KB, and two share a
// multiprocessor of any GPU.
#pragma once

#include "csrc/linear_attention/based/backward_sm90.cuh"
#include "csrc/linear_attention/based/products_sm80.cuh"

namespace thunderkittens::linear_attention {
namespace sm80 {

template <class T>
struct BackwardGlobals {
    StridedRows<T> q, k, v, grad_out, dv;
    const float* weights;
    Segments segments;
    StateView initial, final;
    T* elements;     // dq or dk, (batch_heads, length, 16), where there is one slice
    float* partial;  // else (slices, batch_heads, length, 16)
};

template <class T>
struct BackwardShared {
    value_tile<T> v, grad_out;
    element_tile<T> q, k;
    state_tile<T> state;
    TokenWeights weights;
    Transposed<T> transposed, scaled;
    sv<float, 16> scratch;
};

template <class T, bool weighted>
__device__ __forceinline__ void load_chunk(const BackwardGlobals<T>& g, BackwardShared<T>& shared,
                                           const Segments::WorkTile& work, int chunk) {
    const ChunkCopies<T> copies{g.segments, work};
    copies.elements(shared.q, g.q, chunk);
    copies.elements(shared.k, g.k, chunk);
    copies.values(shared.v, g.v, chunk);
    copies.values(shared.grad_out, g.grad_out, chunk);
    if constexpr (weighted) copies.weights(shared.weights, g.weights, chunk);
    arch::cp_async_commit();
}

// This warp's rows of values or of their gradient, as operands.
template <class T>
struct ValueRows {
    operand_a<T> blocks[VALUE_BLOCKS];

    __device__ __forceinline__ explicit ValueRows(const value_tile<T>& tile) {
        const a_walker<value_tile<T>> walker(tile, warp_row(), 0);
#pragma unroll
        for (int j = 0; j < VALUE_BLOCKS; ++j) walker.load(blocks[j], 0, 16 * j, 0);
    }
    // The products with 16 rows of another tile.
    __device__ __forceinline__ void multiply(rt_fl<16, 16>& products,
                                             const b_walker<value_tile<T>>& rows, int block) const {
        zero(products);
#pragma unroll
        for (int j = 0; j < VALUE_BLOCKS; ++j) {
            operand_b<T> b;
            rows.load(b, 16 * block, 16 * j, 0);
            mma_operands(products, blocks[j], b);
        }
    }
};

// The features' gradients, the products of values and the state, `blocks` blocks at a time.
template <int blocks, int first = 0, class T>
__device__ __forceinline__ void add_features(ElementGradient<T>& gradient,
                                             const ValueRows<T>& values,
                                             const b_walker<state_tile<T>>& state) {
    if constexpr (first < FEATURE_BLOCKS) {
        rt_fl<16, 16 * blocks> features;
        zero(features);
#pragma unroll
        for (int j = 0; j < VALUE_BLOCKS; ++j) {
#pragma unroll
            for (int n = 0; n < blocks; ++n) {
                operand_b<T> b;
                state.load(b, 16 * (first + n), 16 * j, 0);
                mma_operands(block_of(features, n), values.blocks[j], b);
            }
        }
        gradient.template add<first>(features);
        add_features<blocks, first + blocks>(gradient, values, state);
    }
}

template <class T, bool weighted>
__global__ __launch_bounds__(
    PORTABLE_THREADS,
    PORTABLE_BLOCKS_PER_SM) void based_portable_query_gradient_kernel(const __grid_constant__
                                                                          BackwardGlobals<T>
                                                                              g) {
    auto& shared = *reinterpret_cast<BackwardShared<T>*>(shared_memory());
    const Segments::WorkTile work = g.segments.work_tile();
    if (work.chunks() > 0) load_chunk<T, weighted>(g, shared, work, work.begin);
    shared.transposed.fill_constants();
    RunningState<T, false> state;
    RunningDenominator<T> running_denominator;
    const StateView initial = g.initial.at(g.segments.state(work));
    state.load(initial, work.first_column());
    if constexpr (weighted) running_denominator.template load<false>(initial);
    const FeatureRows<T> feature_rows(shared.transposed, shared.transposed);

#pragma unroll 1
    for (int i = 0; i < work.chunks(); ++i) {
        const int chunk = work.begin + i, warp = own_warp();
        arch::cp_async_wait<0>();
        arch::sync_block();  // the chunk is there, and all are done with the state
        transpose<T, false>(shared.transposed, shared.transposed, shared.k, nullptr);
        const float scale = store_operand(state, shared.state, shared.scratch);
        float2 w = {1.0f, 1.0f}, d = {0.0f, 0.0f};
        if constexpr (weighted) {
            const int row = warp_row() + laneid() / 4;
            w = {shared.weights.values.get(row), shared.weights.values.get(row + 8)};
            // Once, whatever the number of slices.
            if (work.slice == 0)
                d = {shared.weights.denominator.get(row), shared.weights.denominator.get(row + 8)};
        }
        rt_fl<16, 16> within;
        zero(within);
        if constexpr (weighted) {
            if (work.slice == 0) {
                rt<T, 16, 16> q;
                warp::load(q, shared.q.template subtile<16, 16>({warp, 0}));
                running_denominator.add_gradient(within, q, d);
            }
            running_denominator.add(shared.k, g.segments.tokens(chunk));
        }
        const ValueRows<T> grad_out(shared.grad_out);
        const operand_a<T> query = ElementRows<T>(shared.q).a(warp);
        arch::sync_block();  // the state and the transposed keys are there

        const b_walker<value_tile<T>> values(shared.v, 0, 0);
        const ElementRows<T> keys(shared.k);
        accumulate(state, feature_rows, shared.v, [&](int k, const auto&) {
            if (k > warp) return;
            rt_fl<16, 16> scores, products;
            zero(scores);
            mma_operands(scores, query, keys.columns(k));
            grad_out.multiply(products, values, k);
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                const float2 s = scores.tiles[0][0].data[n];
                float2& p = products.tiles[0][0].data[n];
                const float wr = n % 2 ? w.y : w.x, dr = n % 2 ? d.y : d.x;
                p = {fmaf(s.x, 1.0f / 16, 0.25f) * fmaf(p.x, wr, dr),
                     fmaf(s.y, 1.0f / 16, 0.25f) * fmaf(p.y, wr, dr)};
            }
            if (k == warp) {
                for_each_pair(products, [](float2& x, int row, int column) {
                    x = {column <= row ? x.x : 0.0f, column + 1 <= row ? x.y : 0.0f};
                });
            }
            mma_operands(within, to_operand_a<T>(products), keys.rows(k));
        });
        RotatedRows<T> rows;
        rows.load(shared.q);
        arch::sync_block();  // all are done with the chunk
        if (i + 1 < work.chunks()) load_chunk<T, weighted>(g, shared, work, chunk + 1);

        ElementGradient<T> gradient(rows);
        add_features<2>(gradient, grad_out, b_walker<state_tile<T>>(shared.state, 0, 0));
        float4 result[2];
        sum_elements(result, gradient, within, {0.25f * scale * w.x, 0.25f * scale * w.y});
        store_elements(g, work, chunk, result);
    }
}

template <class T, bool weighted>
__global__
__launch_bounds__(PORTABLE_THREADS, PORTABLE_BLOCKS_PER_SM) void based_portable_key_gradient_kernel(
    const __grid_constant__ BackwardGlobals<T> g) {
    auto& block = *reinterpret_cast<BackwardShared<T>*>(shared_memory());
    const Segments::WorkTile work = g.segments.work_tile();
    if (work.chunks() > 0) load_chunk<T, weighted>(g, block, work, work.end - 1);
    block.transposed.fill_constants();
    if constexpr (weighted) block.scaled.fill_constants();
    RunningState<T, weighted> state;
    RunningDenominator<T> running_denominator;
    const StateView initial = g.initial.at(g.segments.state(work));
    state.load(initial, work.first_column());
    if constexpr (weighted) running_denominator.template load<true>(initial);
    const FeatureRows<T> feature_rows(block.transposed, weighted ? block.scaled : block.transposed);

#pragma unroll 1
    for (int i = 0; i < work.chunks(); ++i) {
        auto& shared = rematerialized(block);
        const int chunk = work.end - 1 - i, warp = own_warp();
        arch::cp_async_wait<0>();
        arch::sync_block();  // the chunk is there, and all are done with the state
        transpose<T, weighted>(shared.transposed, shared.scaled, shared.q, &shared.weights);
        const float scale = store_operand(state, shared.state, shared.scratch);
        rt_fl<16, 16> within;
        zero(within);
        if constexpr (weighted) {
            if (work.slice == 0) {
                rt<T, 16, 16> k;
                warp::load(k, shared.k.template subtile<16, 16>({warp, 0}));
                running_denominator.add_gradient(within, k, {1.0f, 1.0f});
            }
            running_denominator.add(shared.q, shared.weights);
        }
        arch::sync_block();  // the state and the transposed queries are there

        rt_fl<16, VALUES> dv;
        zero(dv);
        RotatedRows<T> rows;
        rows.load(shared.k);
        add_state(dv, rows, shared.state);
        if constexpr (std::is_same_v<T, half>) scale_rows(dv, {scale, scale});
        const ValueRows<T> values(shared.v);
        const operand_a<T> key = ElementRows<T>(shared.k).a(warp);
        const b_walker<value_tile<T>> grad_out(shared.grad_out, 0, 0);
        const ElementRows<T> queries(shared.q);
        const auto use = [&](int k, const operand_b<T>(&gradients)[VALUE_BLOCKS]) {
            if (k < warp) return;
            rt_fl<16, 16> scores, products;  // transposed: keys are rows
            zero(scores);
            mma_operands(scores, key, queries.columns(k));
            values.multiply(products, grad_out, k);
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                float2 w = {1.0f, 1.0f}, d = {0.0f, 0.0f};
                if constexpr (weighted) {
                    const int column = 16 * k + 8 * (n / 2) + 2 * (laneid() % 4);
                    w = TokenWeights::pair(shared.weights.values, column);
                    if (work.slice == 0) d = TokenWeights::pair(shared.weights.denominator, column);
                }
                float2 &s = scores.tiles[0][0].data[n], &p = products.tiles[0][0].data[n];
                p = {fmaf(s.x, 1.0f / 16, 0.25f) * fmaf(p.x, w.x, d.x),
                     fmaf(s.y, 1.0f / 16, 0.25f) * fmaf(p.y, w.y, d.y)};
                s = {w.x * polynomial(s.x), w.y * polynomial(s.y)};
            }
            if (k == warp) {
                const auto mask = [](float2& x, int row, int column) {
                    x = {row <= column ? x.x : 0.0f, row <= column + 1 ? x.y : 0.0f};
                };
                for_each_pair(scores, mask);
                for_each_pair(products, mask);
            }
            const operand_a<T> weights = to_operand_a<T>(scores);
#pragma unroll
            for (int j = 0; j < VALUE_BLOCKS; ++j)
                mma_operands(block_of(dv, j), weights, gradients[j]);
            mma_operands(within, to_operand_a<T>(products), queries.rows(k));
        };
        accumulate(state, feature_rows, shared.grad_out, use);
        rows.load(shared.k);  // again, rather than to keep them
        arch::sync_block();   // all are done with the chunk
        ChunkCopies<T>{g.segments, work}.store_values(g.dv, chunk, dv);
        if (i + 1 < work.chunks()) load_chunk<T, weighted>(g, shared, work, chunk - 1);
        ElementGradient<T> gradient(rows);
        add_features<2>(gradient, values, b_walker<state_tile<T>>(shared.state, 0, 0));
        float4 result[2];
        sum_elements(result, gradient, within, {0.25f * scale, 0.25f * scale});
        store_elements(g, work, chunk, result);
    }
    store_state(g.final.at(work.batch_head), work, state, running_denominator);
}

template <class T>
BackwardGlobals<T> backward_globals(const BasedBackwardParams& params,
                                    const BackwardKernelParams& kernel,
                                    const StatePointers& initial, const StatePointers& final,
                                    const Operand& elements, float* partial) {
    const BasedProblem& p = params.forward.problem;
    static_assert(sizeof(BackwardShared<T>) <= PORTABLE_BACKWARD_BYTES);
    return {.q = params.forward.q,
            .k = params.forward.k,
            .v = params.forward.v,
            .grad_out = params.grad_out,
            .dv = params.dv,
            .weights = kernel.weights,
            .segments = Segments(p, params.forward.segments),
            .initial = {initial.numerator, initial.denominator, int(p.value_dim)},
            .final = {final.numerator, final.denominator, int(p.value_dim)},
            .elements = static_cast<T*>(const_cast<void*>(elements.data)),
            .partial = partial};
}
template <class T>
void launch_backward(void (*kernel)(BackwardGlobals<T>), const BasedBackwardParams& params,
                     const BackwardGlobals<T>& globals, Stream stream) {
    kittens::launch({.blocks_per_sm = PORTABLE_BLOCKS_PER_SM}, kernel,
                    dim3(unsigned(globals.segments.blocks(params.forward.problem.batch))),
                    dim3(PORTABLE_THREADS), dim3(1), PORTABLE_BACKWARD_BYTES, stream, globals);
}

}  // namespace sm80

template <DType dtype>
void launch_portable_based_query_gradient(const BasedBackwardParams& params,
                                          const BackwardKernelParams& kernel, Stream stream) {
    using T = type_of<dtype>;
    const auto globals =
        sm80::backward_globals<T>(params, kernel, kernel.before, {}, params.dq, kernel.partial_dq);
    sm80::launch_backward<T>(params.forward.problem.denominator
                                 ? sm80::based_portable_query_gradient_kernel<T, true>
                                 : sm80::based_portable_query_gradient_kernel<T, false>,
                             params, globals, stream);
}

template <DType dtype>
void launch_portable_based_key_gradient(const BasedBackwardParams& params,
                                        const BackwardKernelParams& kernel, Stream stream) {
    using T = type_of<dtype>;
    const auto globals = sm80::backward_globals<T>(
        params, kernel, kernel.after, kernel.grad_initial, params.dk, kernel.partial_dk);
    sm80::launch_backward<T>(params.forward.problem.denominator
                                 ? sm80::based_portable_key_gradient_kernel<T, true>
                                 : sm80::based_portable_key_gradient_kernel<T, false>,
                             params, globals, stream);
}

}  // namespace thunderkittens::linear_attention
