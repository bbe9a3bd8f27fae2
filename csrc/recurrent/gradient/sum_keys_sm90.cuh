// Sums the gradients of q and k over the splits of a group's heads, in their order.
#pragma once

#include "csrc/recurrent/gradient/types_sm90.cuh"

namespace thunderkittens::recurrent {

constexpr int SUM_THREADS = 256;

struct SumKeysGlobals {
    const float* partial;  // (2, splits, slots, groups, 64, padded keys)
    Operand dq, dk;
    const SlotTokens* table;
    int slots, groups, splits, key_dim, padded_keys;
    bool packed;
};

// A thread has eight neighbouring elements of a row.
template <class T, bool portable>
__global__ __launch_bounds__(SUM_THREADS) void gradient_sum_keys_kernel(
    const __grid_constant__ SumKeysGlobals g) {
    arch::launch_dependents();
    arch::wait_for_dependencies();
    const int words = CHUNK * g.padded_keys / 8, blocks = words / SUM_THREADS;
    int index = int(blockIdx.x);
    const int word = index % blocks * SUM_THREADS + int(threadIdx.x);
    index /= blocks;
    const int which = index % 2, group = index / 2 % g.groups, slot = index / 2 / g.groups;
    const SlotTokens at = load_slot(g.table, slot);
    const int token = word * 8 / g.padded_keys, column = word * 8 % g.padded_keys;
    const int row = at.chunk * CHUNK + token;
    if (at.sequence < 0 || row >= at.length || column >= g.key_dim) return;
    const int64_t tile = int64_t(CHUNK) * g.padded_keys;
    const int64_t step = int64_t(g.slots) * g.groups * tile;
    const float* from =
        g.partial + which * g.splits * step + (int64_t(slot) * g.groups + group) * tile + word * 8;
    float sum[8] = {};
    for (int i = 0; i < g.splits; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float4 x =
                arch::load_global(reinterpret_cast<const float4*>(from + i * step) + half);
            sum[4 * half] += x.x;
            sum[4 * half + 1] += x.y;
            sum[4 * half + 2] += x.z;
            sum[4 * half + 3] += x.w;
        }
    }
    uint4 packed_words;
    packed_words.x = arch::bit_cast<uint32_t>(pack_pair<T>(sum[0], sum[1]));
    packed_words.y = arch::bit_cast<uint32_t>(pack_pair<T>(sum[2], sum[3]));
    packed_words.z = arch::bit_cast<uint32_t>(pack_pair<T>(sum[4], sum[5]));
    packed_words.w = arch::bit_cast<uint32_t>(pack_pair<T>(sum[6], sum[7]));
    const Operand& to = which == 0 ? g.dq : g.dk;
    T* data = static_cast<T*>(const_cast<void*>(to.data)) +
              ((g.packed ? 0 : at.sequence) * to.batch_stride + group * to.head_stride +
               (at.begin + row) * to.row_stride + column);
    arch::store_global(reinterpret_cast<uint4*>(data), packed_words);
}

template <DType dtype, bool portable>
void launch_gradient_sum_keys(const GradientParams& params, const GradientWorkspace& w,
                              Stream stream) {
    const RecurrentProblem& p = params.forward.problem;
    const SumKeysGlobals globals{.partial = w.partial,
                                 .dq = params.dq,
                                 .dk = params.dk,
                                 .table = w.table,
                                 .slots = int(slots_of(p)),
                                 .groups = int(p.groups),
                                 .splits = params.splits,
                                 .key_dim = int(p.key_dim),
                                 .padded_keys = params.key_dim,
                                 .packed = p.sequences > 0};
    const int64_t blocks =
        slots_of(p) * p.groups * 2 * (CHUNK * params.key_dim / (8 * SUM_THREADS));
    kittens::launch({.dependent = !portable}, gradient_sum_keys_kernel<type_of<dtype>, portable>,
                    dim3(unsigned(blocks)), dim3(SUM_THREADS), dim3(1), 0, stream, globals);
}

}  // namespace thunderkittens::recurrent
