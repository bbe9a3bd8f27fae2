// Adds up the partial results of items whose keys were cut. Some warps have a row: each adds up
// every n-th of the item's slots, its lanes have the columns, and the first of them adds up what
// the others have. Reruns are bit-equal.
#pragma once

#include "csrc/attention/decode/decode_sm90.cuh"

namespace thunderkittens::attention::decode {

constexpr int COMBINE_THREADS = COMBINE_WARPS * WARP_THREADS;

template <class T>
struct CombineGlobals {
    Results<T> results;
    Work work;
    Schedule schedule;
    int row_warps;  // 1, 2, 4 or 8
};

// A row, or of some of its slots, relative to 2^base.
struct CombinedRow {
    static constexpr int pairs = MOST_VALUE_DIM / 2 / WARP_THREADS;
    float2 o[pairs];
    float sum;
};

struct CombineShared {
    float2 o[COMBINE_WARPS][MOST_VALUE_DIM / 2];
    float sums[COMBINE_WARPS];
};
static_assert(sizeof(CombineShared) + 1024 <= COMBINE_SHARED_BYTES);

// Of an item whose partial results are `count` slots from `first` on.
struct Slots {
    int first, count, row;

    template <class T>
    __device__ __forceinline__ const float* lse(const Results<T>& r, int i) const {
        return r.partial_lse + (int64_t(first) + i) * r.slot_rows + row;
    }
    template <class T>
    __device__ __forceinline__ const float* out(const Results<T>& r, int i) const {
        return r.partial_out + ((int64_t(first) + i) * r.slot_rows + row) * r.value_dim;
    }
};

// The largest LSE of all slots and the sink, 0 where there is none.
template <class T>
__device__ __forceinline__ float combined_base(const Results<T>& r, const Slots& slots, int head) {
    float top = r.sink == nullptr ? -INFINITY : arch::load_global_readonly(r.sink + head);
    for (int i = laneid(); i < slots.count; i += WARP_THREADS) {
        top = fmaxf(top, arch::load_global(slots.lse(r, i)));
    }
#pragma unroll
    for (int d = WARP_THREADS / 2; d > 0; d /= 2) top = fmaxf(top, arch::shuffle_xor(top, d));
    return top == -INFINITY ? 0.0f : top;
}

// Slots begin, begin + step, and so on.
template <class T>
__device__ __forceinline__ CombinedRow combined_slots(const Results<T>& r, const Slots& slots,
                                                      float base, int begin, int step) {
    CombinedRow row{};
#pragma unroll 4
    for (int i = begin; i < slots.count; i += step) {
        const float weight =
            arch::exp2_approx((arch::load_global(slots.lse(r, i)) - base) * LOG2_E);
        row.sum += weight;
        const float* const from = slots.out(r, i);
#pragma unroll
        for (int j = 0; j < CombinedRow::pairs; ++j) {
            const int column = 2 * (j * WARP_THREADS + laneid());
            if (column >= r.value_dim) break;
            const float2 x = arch::load_global(reinterpret_cast<const float2*>(from + column));
            row.o[j] = {fmaf(weight, x.x, row.o[j].x), fmaf(weight, x.y, row.o[j].y)};
        }
    }
    return row;
}

template <class T>
__device__ __forceinline__ void store_combined(const Results<T>& r, const CombinedRow& x,
                                               float base, int b, int head, int position) {
    float sum = x.sum;
    if (r.sink != nullptr) {
        sum += arch::exp2_approx((arch::load_global_readonly(r.sink + head) - base) * LOG2_E);
    }
    const float reciprocal = sum == 0.0f ? 0.0f : 1.0f / sum;
    T* const to = r.out.at(b, head, position, 0);
#pragma unroll
    for (int j = 0; j < CombinedRow::pairs; ++j) {
        const int column = 2 * (j * WARP_THREADS + laneid());
        if (column >= r.value_dim) break;
        arch::store_global(reinterpret_cast<packed_type<T>*>(to + column),
                           pack_pair<T>(x.o[j].x * reciprocal, x.o[j].y * reciprocal));
    }
    if (r.lse != nullptr && laneid() == 0) {
        arch::store_global(r.lse + r.lse_row(b, head, position),
                           sum == 0.0f ? -INFINITY : base + logf(sum));
    }
}

template <class T>
__device__ __forceinline__ void combine(const CombineGlobals<T>& g) {
    shared_allocator allocator(shared_memory());
    auto& shared = allocator.template allocate<CombineShared>();
    const int warp = warpid(), member = warp % g.row_warps;
    arch::wait_for_dependencies();
    arch::launch_dependents();
    if (!g.schedule.is_of(g.work)) return;
    const auto& r = g.results;
    const int64_t rows = int64_t{g.schedule.split_items()} * r.slot_rows;
    const int block_rows = COMBINE_WARPS / g.row_warps;
    for (int64_t first = int64_t{blockIdx.x} * block_rows; first < rows;
         first += int64_t{gridDim.x} * block_rows) {
        const int64_t i = first + warp / g.row_warps;
        const int index = static_cast<int>(::min(i, rows - 1) / r.slot_rows);
        const int in_slot = static_cast<int>(i % r.slot_rows);
        const int* const from = g.schedule.data + g.schedule.list + 4 * int64_t{index};
        const int4 entry = {arch::load_global(from), arch::load_global(from + 1),
                            arch::load_global(from + 2), arch::load_global(from + 3)};
        const int kv_head = entry.x / g.work.batch, b = entry.x - kv_head * g.work.batch;
        const int2 known = g.schedule.lengths_of(b);
        const Lengths s =
            g.work.lengths(b, ::min(known.x, g.work.most_keys), ::min(known.y, g.work.q_length));
        const Row row(g.work, s, g.work.item(s, kv_head, entry.y), in_slot);
        const bool exists = i < rows && row.exists;
        const Slots slots{entry.z, entry.w, in_slot};
        CombinedRow mine{};
        float base = 0.0f;
        if (exists) {
            base = combined_base(r, slots, row.head);
            mine = combined_slots(r, slots, base, member, g.row_warps);
        }
        if (g.row_warps > 1) {
            arch::sync_block();  // what was there has been read
#pragma unroll
            for (int j = 0; j < CombinedRow::pairs; ++j) {
                arch::store_shared(
                    arch::shared_address(&shared.o[warp][j * WARP_THREADS + laneid()]), mine.o[j]);
            }
            if (laneid() == 0)
                arch::store_shared(arch::shared_address(&shared.sums[warp]), mine.sum);
            arch::sync_block();
        }
        if (!exists || member > 0) continue;
        for (int other = warp + 1; other < warp + g.row_warps; ++other) {
            mine.sum += arch::load_shared<float>(arch::shared_address(&shared.sums[other]));
#pragma unroll
            for (int j = 0; j < CombinedRow::pairs; ++j) {
                const auto x = arch::load_shared<float2>(
                    arch::shared_address(&shared.o[other][j * WARP_THREADS + laneid()]));
                mine.o[j] = {mine.o[j].x + x.x, mine.o[j].y + x.y};
            }
        }
        store_combined(r, mine, base, b, row.head, s.q_begin + row.position);
    }
}

template <class T>
__global__ __launch_bounds__(COMBINE_THREADS) void combine_kernel(
    const __grid_constant__ CombineGlobals<T> g) {
    combine(g);
}

template <class T>
void launch_combine_by(void (*kernel)(CombineGlobals<T>), bool dependent, const Params& params,
                       Stream stream) {
    const Problem& p = params.problem;
    const ScheduleShape shape = schedule_shape(p, params.parts);
    const int64_t all_items = p.batch * p.kv_heads * p.tiles();
    // A warp for each four of the slots that an item may be expected to have.
    const int64_t slots = p.split_size > 0 ? ceil_div(p.k_length, p.split_size)
                                           : ceil_div(params.parts, all_items) + 1;
    const int row_warps = slots > 16 ? 8 : slots > 8 ? 4 : slots > 4 ? 2 : 1;
    const CombineGlobals<T> globals{Results<T>(params), Work(params),
                                    Schedule(params.schedule, shape), row_warps};
    const int64_t rows = std::min(shape.items, all_items) * p.tile_rows();
    const int64_t blocks =
        std::clamp<int64_t>(ceil_div(rows * row_warps, COMBINE_WARPS), 1, 4 * params.parts);
    kittens::launch({.dependent = dependent}, kernel, dim3(unsigned(blocks)), dim3(COMBINE_THREADS),
                    dim3(1), COMBINE_SHARED_BYTES, stream, globals);
}

template <DType dtype>
void launch_combine(const Params& params, Stream stream) {
    using T = std::conditional_t<dtype == DType::bf16, bf16, half>;
    launch_combine_by<T>(combine_kernel<T>, true, params, stream);
}

}  // namespace thunderkittens::attention::decode
