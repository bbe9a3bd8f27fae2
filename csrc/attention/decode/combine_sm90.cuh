// Adds up the partial results of items whose keys were cut, in the order of the keys. A warp has a
// row: its lanes have the columns, and go through the slots of the item.
#pragma once

#include "csrc/attention/decode/decode_sm90.cuh"

namespace thunderkittens::attention::decode {

constexpr int COMBINE_WARPS = 4, COMBINE_THREADS = COMBINE_WARPS * WARP_THREADS;
constexpr int MOST_VALUE_DIM = 256;

template <class T>
struct CombineGlobals {
    Results<T> results;
    Work work;
    Schedule schedule;
};

// A row of a split item.
template <class T>
__device__ __forceinline__ void combine_row(const CombineGlobals<T>& g, const int4& entry,
                                            const Lengths& s, const Row& row, int in_slot) {
    constexpr int pairs = MOST_VALUE_DIM / 2 / WARP_THREADS;
    const auto& r = g.results;
    const int lane = laneid();
    const float* const lse = r.partial_lse + int64_t(entry.z) * r.slot_rows + in_slot;
    float top = r.sink == nullptr ? -INFINITY : arch::load_global_readonly(r.sink + row.head);
    for (int i = lane; i < entry.w; i += WARP_THREADS) {
        top = fmaxf(top, arch::load_global(lse + int64_t(i) * r.slot_rows));
    }
#pragma unroll
    for (int d = WARP_THREADS / 2; d > 0; d /= 2) top = fmaxf(top, arch::shuffle_xor(top, d));
    const float base = top == -INFINITY ? 0.0f : top;
    float sum =
        r.sink == nullptr
            ? 0.0f
            : arch::exp2_approx((arch::load_global_readonly(r.sink + row.head) - base) * LOG2_E);
    float2 o[pairs];
#pragma unroll
    for (float2& x : o) x = {0.0f, 0.0f};
#pragma unroll 4
    for (int i = 0; i < entry.w; ++i) {
        const float part = arch::load_global(lse + int64_t(i) * r.slot_rows);
        const float weight = arch::exp2_approx((part - base) * LOG2_E);
        sum += weight;
        const float* const from =
            r.partial_out + ((int64_t(entry.z) + i) * r.slot_rows + in_slot) * r.value_dim;
#pragma unroll
        for (int j = 0; j < pairs; ++j) {
            const int column = 2 * (j * WARP_THREADS + lane);
            if (column >= r.value_dim) break;
            const float2 x = arch::load_global(reinterpret_cast<const float2*>(from + column));
            o[j] = {fmaf(weight, x.x, o[j].x), fmaf(weight, x.y, o[j].y)};
        }
    }
    const float reciprocal = sum == 0.0f ? 0.0f : 1.0f / sum;
    const int position = s.q_begin + row.position;
    T* const to = r.out.at(entry.x, row.head, position, 0);
#pragma unroll
    for (int j = 0; j < pairs; ++j) {
        const int column = 2 * (j * WARP_THREADS + lane);
        if (column >= r.value_dim) break;
        arch::store_global(reinterpret_cast<packed_type<T>*>(to + column),
                           pack_pair<T>(o[j].x * reciprocal, o[j].y * reciprocal));
    }
    if (r.lse != nullptr && lane == 0) {
        arch::store_global(r.lse + r.lse_row(entry.x, row.head, position),
                           sum == 0.0f ? -INFINITY : base + logf(sum));
    }
}

template <class T>
__global__ __launch_bounds__(COMBINE_THREADS) void combine_kernel(
    const __grid_constant__ CombineGlobals<T> g) {
    arch::wait_for_dependencies();
    arch::launch_dependents();
    if (!g.schedule.is_of(g.work)) return;
    const int items = g.schedule.split_items(), rows = g.results.slot_rows;
    const int warps = static_cast<int>(gridDim.x) * COMBINE_WARPS;
    for (int64_t i = int64_t{blockIdx.x} * COMBINE_WARPS + warpid(); i < int64_t{items} * rows;
         i += warps) {
        const int index = static_cast<int>(i / rows), in_slot = static_cast<int>(i % rows);
        const int* const from = g.schedule.data + g.schedule.list + 4 * int64_t{index};
        const int4 entry = {arch::load_global(from), arch::load_global(from + 1),
                            arch::load_global(from + 2), arch::load_global(from + 3)};
        const int2 known = g.schedule.lengths_of(entry.x);
        const Lengths s = g.work.lengths(entry.x, ::min(known.x, g.work.most_keys),
                                         ::min(known.y, g.work.q_length));
        const Row row(g.work, s, g.work.item(s, entry.y), in_slot);
        if (row.exists) combine_row(g, entry, s, row, in_slot);
    }
}

template <DType dtype>
void launch_combine(const Params& params, Stream stream) {
    using T = std::conditional_t<dtype == DType::bf16, bf16, half>;
    const ScheduleShape shape = schedule_shape(params.problem, params.parts);
    const CombineGlobals<T> globals{Results<T>(params), Work(params),
                                    Schedule(params.schedule, shape)};
    const int64_t rows = shape.items * params.problem.tile_rows();
    const int64_t blocks = std::clamp<int64_t>(ceil_div(rows, COMBINE_WARPS), 1, 4 * params.parts);
    kittens::launch({.dependent = true}, combine_kernel<T>, dim3(unsigned(blocks)),
                    dim3(COMBINE_THREADS), dim3(1), 0, stream, globals);
}

}  // namespace thunderkittens::attention::decode
