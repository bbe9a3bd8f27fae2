// Merges attention over parts of the keys, each with its LSE, into attention over all of them: a
// warp has a row. Weights are exp(lse - the LSE of all); what has seen no key, whose LSE is
// infinite of either sign, counts for nothing.
#pragma once

#include "csrc/attention/common/layouts.cuh"
#include "csrc/attention/decode/append.h"

namespace thunderkittens::attention::decode {

constexpr int MERGE_WARPS = 4, MERGE_THREADS = MERGE_WARPS * 32;

template <class T>
struct MergeGlobals {
    struct Part {
        const T* out;
        int64_t out_strides[3];
        const float* lse;
        int64_t lse_strides[3];
    };
    Part parts[MOST_MERGED];
    T* out;
    int64_t out_strides[3];
    float* lse;
    int64_t rows;
    int count, heads, length, dim;
};

// (Two kernels of one body: with a function for it, the machine code for Hopper changes.)
template <class T, bool PORTABLE>
__global__ __launch_bounds__(MERGE_THREADS) void merge_kernel(
    const __grid_constant__ MergeGlobals<T> g) {
    arch::wait_for_dependencies();
    arch::launch_dependents();
    const int lane = laneid();
    const int64_t row = int64_t{blockIdx.x} * MERGE_WARPS + warpid();
    if (row >= g.rows) return;
    const int position = static_cast<int>(row % g.length);
    const int head = static_cast<int>(row / g.length % g.heads);
    const int64_t b = row / g.length / g.heads;
    const auto at = [&](const int64_t(&strides)[3]) {
        return b * strides[0] + head * strides[1] + position * strides[2];
    };
    // A lane for each part.
    float mine = -INFINITY;
    if (lane < g.count) {
        const auto& part = g.parts[lane];
        mine = arch::load_global(part.lse + at(part.lse_strides));
        if (mine == INFINITY) mine = -INFINITY;
    }
    float top = mine;
#pragma unroll
    for (int d = WARP_THREADS / 2; d > 0; d /= 2) top = fmaxf(top, arch::shuffle_xor(top, d));
    const float base = top == -INFINITY ? 0.0f : top;
    const float weight = arch::exp2_approx((mine - base) * 1.4426950408889634f);
    float sum = weight;
#pragma unroll
    for (int d = WARP_THREADS / 2; d > 0; d /= 2) sum += arch::shuffle_xor(sum, d);
    const float reciprocal = sum == 0.0f ? 0.0f : 1.0f / sum;
    for (int first = 0; first < g.dim; first += 2 * WARP_THREADS) {
        const int column = first + 2 * lane;
        float2 o = {0.0f, 0.0f};
        for (int i = 0; i < g.count; ++i) {
            const float factor = arch::shuffle(weight, i);
            if (factor == 0.0f || column >= g.dim) continue;
            const T* const from = g.parts[i].out + at(g.parts[i].out_strides) + column;
            const float2 x =
                unpack_pair<T>(arch::load_global(reinterpret_cast<const packed_type<T>*>(from)));
            o = {fmaf(factor, x.x, o.x), fmaf(factor, x.y, o.y)};
        }
        if (column >= g.dim) continue;
        arch::store_global(reinterpret_cast<packed_type<T>*>(g.out + at(g.out_strides) + column),
                           pack_pair<T>(o.x * reciprocal, o.y * reciprocal));
    }
    if (lane == 0) {
        arch::store_global(g.lse + row, sum == 0.0f ? -INFINITY : base + logf(sum));
    }
}

template <DType dtype, bool PORTABLE>
void launch_merge_kernel(const MergeParams& params, Stream stream) {
    using T = std::conditional_t<dtype == DType::bf16, bf16, half>;
    MergeGlobals<T> globals{
        .out = static_cast<T*>(const_cast<void*>(params.out.data)),
        .out_strides = {params.out.batch_stride, params.out.head_stride, params.out.row_stride},
        .lse = params.lse,
        .rows = params.batch * params.heads * params.length,
        .count = params.count,
        .heads = static_cast<int>(params.heads),
        .length = static_cast<int>(params.length),
        .dim = static_cast<int>(params.dim)};
    for (int i = 0; i < params.count; ++i) {
        const Operand& part = params.parts[i];
        globals.parts[i] = {
            static_cast<const T*>(part.data),
            {part.batch_stride, part.head_stride, part.row_stride},
            params.lses[i],
            {params.lse_strides[i][0], params.lse_strides[i][1], params.lse_strides[i][2]}};
    }
    const int64_t blocks = ceil_div(globals.rows, MERGE_WARPS);
    kittens::launch({.dependent = !PORTABLE}, merge_kernel<T, PORTABLE>, dim3(unsigned(blocks)),
                    dim3(MERGE_THREADS), dim3(1), 0, stream, globals);
}

template <DType dtype>
void launch_merge(const MergeParams& params, Stream stream) {
    launch_merge_kernel<dtype, false>(params, stream);
}

}  // namespace thunderkittens::attention::decode
