// What LoLCATS's gradient does outside its main kernels: dO . O of each row before them; after them
// the sums of parts, all in a fixed order: of the maps', of the factors', and of the keys' and
// values' gradients over the heads that share them.
#pragma once

#include "csrc/linear_attention/lolcats_backward.h"
#include "kittens/kittens.cuh"

namespace thunderkittens::linear_attention {

using namespace kittens;

constexpr int LOLCATS_ROW_THREADS = 256;

template <class T>
struct DeltaGlobals {
    Operand out, grad_out;
    float* delta;              // (lines, length)
    int heads, length, words;  // words of 16 bytes of a row
};

// As many lanes as a row has words share it.
template <class T>
__global__ __launch_bounds__(LOLCATS_ROW_THREADS) void lolcats_delta_kernel(
    const __grid_constant__ DeltaGlobals<T> g) {
    const int index = int(blockIdx.x) * LOLCATS_ROW_THREADS + int(threadIdx.x);
    const int row = index / g.words, word = index % g.words;
    const int64_t line = blockIdx.y;
    const int head = int(line % g.heads), b = int(line / g.heads);
    float sum = 0.0f;
    if (row < g.length) {
        const auto load = [&](const Operand& x) {
            return arch::load_global(reinterpret_cast<const uint4*>(
                static_cast<const T*>(x.data) + b * x.batch_stride + head * x.head_stride +
                row * x.row_stride + 8 * word));
        };
        const uint4 x = load(g.out), y = load(g.grad_out);
        const auto* xs = reinterpret_cast<const packed_type<T>*>(&x);
        const auto* ys = reinterpret_cast<const packed_type<T>*>(&y);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 p = unpack_pair<T>(xs[i]), q = unpack_pair<T>(ys[i]);
            sum = fmaf(p.x, q.x, fmaf(p.y, q.y, sum));
        }
    }
    for (int distance = g.words / 2; distance > 0; distance /= 2)
        sum += arch::shuffle_xor(sum, distance);
    if (word == 0 && row < g.length) arch::store_global(g.delta + line * g.length + row, sum);
}

template <DType dtype>
void launch_lolcats_delta(const LolcatsBackwardParams& params, const LolcatsBackwardWorkspace& w,
                          Stream stream) {
    using T = std::conditional_t<dtype == DType::bf16, bf16, half>;
    const LolcatsProblem& p = params.forward.problem;
    const DeltaGlobals<T> globals{.out = params.forward.out,
                                  .grad_out = params.grad_out,
                                  .delta = w.delta,
                                  .heads = int(p.heads),
                                  .length = int(p.length),
                                  .words = int(p.head_dim / 8)};
    const int64_t threads = p.length * globals.words;
    kittens::launch(lolcats_delta_kernel<T>,
                    dim3(unsigned((threads + LOLCATS_ROW_THREADS - 1) / LOLCATS_ROW_THREADS),
                         unsigned(p.batch * p.heads)),
                    dim3(LOLCATS_ROW_THREADS), dim3(1), 0, stream, globals);
}

// result[a][i] = the sum over b and c of parts[b][a][c][i].
template <class T>
struct PartsGlobals {
    const float* parts;
    T* result;
    int outer, middle, inner;  // of b, a, c
    int64_t size;              // of i
};

template <class T>
__global__ __launch_bounds__(LOLCATS_ROW_THREADS) void lolcats_parts_kernel(
    const __grid_constant__ PartsGlobals<T> g) {
    arch::wait_for_dependencies();
    const int64_t at = int64_t(blockIdx.x) * LOLCATS_ROW_THREADS + threadIdx.x;
    if (at >= g.size * g.middle) return;
    const int64_t a = at / g.size, i = at % g.size;
    float sum = 0.0f;
    for (int b = 0; b < g.outer; ++b) {
        const float* from = g.parts + (b * int64_t(g.middle) + a) * g.inner * g.size + i;
        for (int c = 0; c < g.inner; ++c) sum += arch::load_global(from + c * g.size);
    }
    arch::store_global(g.result + at, convert<T>(sum));
}

template <class T>
void launch_lolcats_parts(const float* parts, void* result, int64_t outer, int64_t middle,
                          int64_t inner, int64_t size, Stream stream) {
    if (result == nullptr) return;
    const PartsGlobals<T> globals{
        parts, static_cast<T*>(result), int(outer), int(middle), int(inner), size};
    const int64_t blocks = (middle * size + LOLCATS_ROW_THREADS - 1) / LOLCATS_ROW_THREADS;
    kittens::launch({.dependent = true}, lolcats_parts_kernel<T>, dim3(unsigned(blocks)),
                    dim3(LOLCATS_ROW_THREADS), dim3(1), 0, stream, globals);
}

template <DType dtype>
void launch_lolcats_combine(const LolcatsBackwardParams& params, const LolcatsBackwardWorkspace& w,
                            Stream stream) {
    using T = std::conditional_t<dtype == DType::bf16, bf16, half>;
    const LolcatsProblem& p = params.forward.problem;
    const int64_t lines = p.batch * p.heads, segments = params.forward.segments;
    const int64_t map = p.head_dim * p.features;
    launch_lolcats_parts<T>(w.map_parts, params.dq_map, p.batch, p.heads, params.map_parts, map,
                            stream);
    launch_lolcats_parts<T>(w.map_parts + lines * params.map_parts * map, params.dk_map, p.batch,
                            p.heads, params.map_parts, map, stream);
    launch_lolcats_parts<float>(w.factor_parts, params.grad_alpha, p.batch, p.heads, segments, 1,
                                stream);
    launch_lolcats_parts<float>(w.factor_parts + lines * segments, params.grad_beta, p.batch,
                                p.heads, segments, 1, stream);
    if (w.dk_parts == nullptr) return;
    const int64_t groups = p.batch * p.kv_heads, rows = p.length * p.head_dim;
    launch_lolcats_parts<T>(w.dk_parts, const_cast<void*>(params.dk.data), 1, groups,
                            p.heads / p.kv_heads, rows, stream);
    launch_lolcats_parts<T>(w.dv_parts, const_cast<void*>(params.dv.data), 1, groups,
                            p.heads / p.kv_heads, rows, stream);
}

}  // namespace thunderkittens::linear_attention
