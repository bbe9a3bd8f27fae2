// One token of Based per sequence, in one pass over the states: state += phi(k) v^T, o = phi(q)
// state, in fp32, optionally over the product of phi(q) with the denominator's state.
//
// The state is all that takes time. A block has one head's; a thread has four neighbouring columns
// of every so many rows, and keeps AHEAD of its loads in flight while it adds, stores, and sums its
// part of the output. The features are made meanwhile, one or two per thread. The portable kernel
// does the same.
#pragma once

#include "csrc/linear_attention/based/based_decode.h"
#include "csrc/linear_attention/based/segments.cuh"

namespace thunderkittens::linear_attention {

constexpr int MAX_BASED_DECODE_THREADS = 512, BASED_DECODE_AHEAD = 4;

// A token's elements of a head.
template <class T>
struct TokenView {
    const T* data;
    int64_t batch_stride, head_stride, column_stride;

    TokenView(const Token& x)
        : data(static_cast<const T*>(x.data)),
          batch_stride(x.batch_stride),
          head_stride(x.head_stride),
          column_stride(x.column_stride) {}
    __device__ __forceinline__ float at(int b, int head, int column) const {
        const T* from = data + (b * batch_stride + head * head_stride + column * column_stride);
        return convert<float>(arch::load_global(from));
    }
};

template <class T>
struct BasedDecodeGlobals {
    TokenView<T> q, k, v;
    StateOperand numerator, denominator;
    T* out;
    int heads, value_dim;
    bool normalize;
    float eps;
};

struct BasedDecodeShared {
    sv<float, 160> query, key;  // features
    sv<float, MAX_BASED_DECODE_THREADS / 32> totals;
    sv<float, 4 * MAX_BASED_DECODE_THREADS> parts;  // of the output
};

// The two elements whose product is the feature in a row of a state in memory.
__device__ __forceinline__ FeaturePair pair_of_row(int row) {
    if (row == 0) return {ONE, ONE};
    if (row <= 16) return {row - 1, ONE};
    if (row <= 32) return {row - 17, row - 17};
    int a = 0, place = row - 33;
    for (; place >= 15 - a; ++a) place -= 15 - a;
    return {a, a + 1 + place};
}

__device__ __forceinline__ void add_product(float4& sum, float factor, const float4& x) {
    sum = {fmaf(factor, x.x, sum.x), fmaf(factor, x.y, sum.y), fmaf(factor, x.z, sum.z),
           fmaf(factor, x.w, sum.w)};
}

template <class T>
__device__ __forceinline__ void decode_token(const BasedDecodeGlobals<T>& g) {
    shared_allocator<> allocator(shared_memory());
    auto& shared = allocator.template allocate<BasedDecodeShared>();
    const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
    const int batch_head = static_cast<int>(blockIdx.x), head = batch_head % g.heads,
              b = batch_head / g.heads;
    const int words = g.value_dim / 4, stride = threads / words;
    const int column = 4 * (thread % words),
              first = thread < stride * words ? thread / words : FEATURES;
    float* state =
        g.numerator.data + b * g.numerator.batch_stride + head * g.numerator.head_stride + column;
    const auto place = [&](int row) {
        return reinterpret_cast<float4*>(state + row * g.value_dim);
    };
    float4 ahead[BASED_DECODE_AHEAD];
#pragma unroll
    for (int i = 0; i < BASED_DECODE_AHEAD; ++i) {
        const int row = first + i * stride;
        if (row < FEATURES) ahead[i] = arch::load_global(place(row));
    }
    const float4 v = {g.v.at(b, head, column), g.v.at(b, head, column + 1),
                      g.v.at(b, head, column + 2), g.v.at(b, head, column + 3)};

    float total = 0.0f;
    float* denominator =
        g.denominator.data + b * g.denominator.batch_stride + head * g.denominator.head_stride;
    for (int row = thread; row < FEATURES; row += threads) {
        const FeaturePair pair = pair_of_row(row);
        const float before = arch::load_global(denominator + row);
        float query = state_row_of(pair.a, pair.b).weight, key = query;
        if (pair.a != ONE) {
            query *= g.q.at(b, head, pair.a);
            key *= g.k.at(b, head, pair.a);
        }
        if (pair.b != ONE) {
            query *= g.q.at(b, head, pair.b);
            key *= g.k.at(b, head, pair.b);
        }
        shared.query.set(row, query);
        shared.key.set(row, key);
        arch::store_global(denominator + row, before + key);
        total = fmaf(query, before + key, total);
    }
    total = warp_sum(total);
    if (thread % 32 == 0) shared.totals.set(thread / 32, total);
    arch::sync_block();

    float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int start = first; start < FEATURES; start += BASED_DECODE_AHEAD * stride) {
#pragma unroll
        for (int i = 0; i < BASED_DECODE_AHEAD; ++i) {
            const int row = start + i * stride, later = row + BASED_DECODE_AHEAD * stride;
            if (row >= FEATURES) break;
            float4 x = ahead[i];
            if (later < FEATURES) ahead[i] = arch::load_global(place(later));
            add_product(x, shared.key.get(row), v);
            arch::store_global(place(row), x);
            add_product(sum, shared.query.get(row), x);
        }
    }
    arch::store_shared(shared.parts.address_of(4 * thread), sum);
    arch::sync_block();
    if (thread >= words) return;
    for (int part = 1; part < stride; ++part) {
        const int from = 4 * (part * words + thread);
        add_product(sum, 1.0f, arch::load_shared<float4>(shared.parts.address_of(from)));
    }
    if (g.normalize) {
        total = g.eps;
        for (int warp = 0; warp < threads / 32; ++warp) total += shared.totals.get(warp);
        const float factor = 1.0f / total;
        sum = {factor * sum.x, factor * sum.y, factor * sum.z, factor * sum.w};
    }
    const uint2 word = {arch::bit_cast<uint32_t>(pack_pair<T>(sum.x, sum.y)),
                        arch::bit_cast<uint32_t>(pack_pair<T>(sum.z, sum.w))};
    arch::store_global(reinterpret_cast<uint2*>(g.out + int64_t(batch_head) * g.value_dim + column),
                       word);
}

template <class T>
__global__ __launch_bounds__(MAX_BASED_DECODE_THREADS) void based_decode_kernel(
    const __grid_constant__ BasedDecodeGlobals<T> g) {
    decode_token(g);
}

template <class T>
void launch_decode(void (*kernel)(BasedDecodeGlobals<T>), const BasedDecodeParams& params,
                   Stream stream) {
    const BasedDecodeProblem& p = params.problem;
    const BasedDecodeGlobals<T> globals{.q = params.q,
                                        .k = params.k,
                                        .v = params.v,
                                        .numerator = params.numerator,
                                        .denominator = params.denominator,
                                        .out = static_cast<T*>(params.out),
                                        .heads = int(p.heads),
                                        .value_dim = int(p.value_dim),
                                        .normalize = p.normalize,
                                        .eps = params.eps};
    static_assert(sizeof(BasedDecodeShared) + 1024 <= BASED_DECODE_BYTES);
    kittens::launch(kernel, dim3(unsigned(p.batch * p.heads)), dim3(unsigned(params.threads)),
                    dim3(1), BASED_DECODE_BYTES, stream, globals);
}
template <DType dtype>
void launch_based_decode(const BasedDecodeParams& params, Stream stream) {
    launch_decode(based_decode_kernel<type_of<dtype>>, params, stream);
}

}  // namespace thunderkittens::linear_attention
