// What Based's backward does token by token, before and after its main kernels: the weights of the
// tokens, which the denominator gives, and the sum of the parts of dQ and dK. The portable kernels
// are these, under names of their own.
#pragma once

#include "csrc/linear_attention/based/segments.cuh"

namespace thunderkittens::linear_attention {

constexpr int ROW_THREADS = 256;

template <class T>
struct RowWeightGlobals {
    StridedRows<const T> out, grad_out;
    const float*
        denominators;  // (batch_heads, length), or null: no weights but those of the padding
    float* weights;    // (2, batch_heads, padded length)
    int heads, length, padded, value_dim;
    int64_t batch_heads;
    unsigned
        blocks;  // of a batch_head; all are in one dimension of the grid, the others end at 65535
};

// w = 1 / denominator, and the denominator's gradient -(dO . O) / denominator. Eight lanes share a
// row; rows behind the last get zeros.
template <class T, bool portable>
__global__ __launch_bounds__(ROW_THREADS) void based_preprocess_kernel(
    const __grid_constant__ RowWeightGlobals<T> g) {
    constexpr int lanes = 8;
    const int64_t batch_head = blockIdx.x / g.blocks;
    const int row = (int(blockIdx.x % g.blocks) * ROW_THREADS + int(threadIdx.x)) / lanes;
    const int lane = threadIdx.x % lanes;
    const bool exists = row < g.length;
    float sum = 0.0f;
    if (exists && g.denominators != nullptr) {
        const int head = static_cast<int>(batch_head % g.heads),
                  b = static_cast<int>(batch_head / g.heads);
        for (int column = 8 * lane; column < g.value_dim; column += 8 * lanes) {
            const uint4 x =
                arch::load_global(reinterpret_cast<const uint4*>(g.out.at(b, head, row, column)));
            const uint4 y = arch::load_global(
                reinterpret_cast<const uint4*>(g.grad_out.at(b, head, row, column)));
            const auto* xs = reinterpret_cast<const packed_type<T>*>(&x);
            const auto* ys = reinterpret_cast<const packed_type<T>*>(&y);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 p = unpack_pair<T>(xs[i]), q = unpack_pair<T>(ys[i]);
                sum = fmaf(p.x, q.x, fmaf(p.y, q.y, sum));
            }
        }
    }
#pragma unroll
    for (int distance = lanes / 2; distance > 0; distance /= 2)
        sum += arch::shuffle_xor(sum, distance);
    if (lane != 0 || row >= g.padded) return;
    float w = exists ? 1.0f : 0.0f;
    if (exists && g.denominators != nullptr)
        w = 1.0f / arch::load_global(g.denominators + batch_head * g.length + row);
    float* to = g.weights + batch_head * g.padded + row;
    arch::store_global(to, w);
    arch::store_global(to + g.batch_heads * g.padded, -w * sum);
}

template <class T>
void launch_preprocess(void (*kernel)(RowWeightGlobals<T>), const BasedBackwardParams& params,
                       float* weights, Stream stream) {
    const BasedProblem& p = params.forward.problem;
    const int64_t padded = padded_length(p), batch_heads = p.batch * p.heads;
    const RowWeightGlobals<T> globals{
        .out = params.forward.out,
        .grad_out = params.grad_out,
        .denominators = params.row_denominators,
        .weights = weights,
        .heads = int(p.heads),
        .length = int(p.length),
        .padded = int(padded),
        .value_dim = int(p.value_dim),
        .batch_heads = batch_heads,
        .blocks = unsigned((padded * 8 + ROW_THREADS - 1) / ROW_THREADS)};
    kittens::launch(kernel, dim3(unsigned(batch_heads * globals.blocks)), dim3(ROW_THREADS),
                    dim3(1), 0, stream, globals);
}
template <DType dtype>
void launch_based_preprocess(const BasedBackwardParams& params, float* weights, Stream stream) {
    launch_preprocess(based_preprocess_kernel<type_of<dtype>, false>, params, weights, stream);
}

template <class T>
struct CombineGlobals {
    const float* parts[2];  // of dq and dk, (slices, count)
    T* results[2];          // null: not wanted
    int slices;
    int64_t count;
};

template <class T, bool portable>
__global__ __launch_bounds__(ROW_THREADS) void based_reduce_partials_kernel(
    const __grid_constant__ CombineGlobals<T> g) {
    const int which = blockIdx.y;
    const int64_t at = 4 * (int64_t(blockIdx.x) * ROW_THREADS + threadIdx.x);
    if (g.results[which] == nullptr || at >= g.count) return;
    float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int slice = 0; slice < g.slices; ++slice) {
        const float4 part = arch::load_global(
            reinterpret_cast<const float4*>(g.parts[which] + slice * g.count + at));
        sum = {sum.x + part.x, sum.y + part.y, sum.z + part.z, sum.w + part.w};
    }
    const uint2 word = {arch::bit_cast<uint32_t>(pack_pair<T>(sum.x, sum.y)),
                        arch::bit_cast<uint32_t>(pack_pair<T>(sum.z, sum.w))};
    arch::store_global(reinterpret_cast<uint2*>(g.results[which] + at), word);
}

template <class T>
void launch_reduce_partials(void (*kernel)(CombineGlobals<T>), const BasedBackwardParams& params,
                            const BackwardKernelParams& parts, Stream stream) {
    const BasedProblem& p = params.forward.problem;
    const auto target = [](const Operand& x) { return static_cast<T*>(const_cast<void*>(x.data)); };
    const CombineGlobals<T> globals{{parts.partial_dq, parts.partial_dk},
                                    {target(params.dq), target(params.dk)},
                                    int(slices_of(p)),
                                    p.batch * p.heads * p.length * ELEMENTS};
    kittens::launch(kernel,
                    dim3(unsigned((globals.count + 4 * ROW_THREADS - 1) / (4 * ROW_THREADS)), 2),
                    dim3(ROW_THREADS), dim3(1), 0, stream, globals);
}

template <DType dtype>
void launch_based_reduce_partials(const BasedBackwardParams& params,
                                  const BackwardKernelParams& kernel, Stream stream) {
    launch_reduce_partials(based_reduce_partials_kernel<type_of<dtype>, false>, params, kernel,
                           stream);
}

}  // namespace thunderkittens::linear_attention
