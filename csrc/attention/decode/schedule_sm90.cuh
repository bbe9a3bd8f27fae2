// Cuts the work of attention over a cache into parts of equal cost: one block, once per step of a
// model, for all its layers. Nothing of it is read by the host, so a CUDA graph replays with
// whatever lengths there are. The parts depend on nothing but these: reruns are bit-equal.
//
// An item costs its key blocks, and ITEM_COST for what it takes to begin and to end one. The items
// of all sequences lie behind each other, head by head, and each part has as much of the whole as
// any other. Where there are as many parts for each head, within a sixteenth, the same keys of all
// heads are read at the same time: heads that lie inside of a token may share lines of memory, and
// the scales of their blocks do. With a split size cuts move back to a multiple of it, so that a
// sequence's splits are its own.
#pragma once

#include "csrc/attention/decode/work_sm90.cuh"

namespace thunderkittens::attention::decode {

constexpr int ITEM_COST = 3;  // in key blocks

// Of one key head, before an item, or of all.
struct WorkSums {
    int64_t cost, slots, split_items;  // the last two with a split size alone
    int64_t unequal;                   // sequences that cost another number than the first one

    __device__ __forceinline__ WorkSums operator+(const WorkSums& other) const {
        return {cost + other.cost, slots + other.slots, split_items + other.split_items,
                unequal + other.unequal};
    }
};

struct ScheduleShared {
    WorkSums sums[SCHEDULE_THREADS];
    int splits_before[SCHEDULE_THREADS];
    Position positions[MOST_PARTS + 1];
};

struct ScheduleGlobals {
    Work work;
    Schedule schedule;
    int items;  // that the list has room for
};

// The sums of all threads before this one; the last entry of `shared` is that of all.
template <class T>
__device__ __forceinline__ T sum_before(T (&shared)[SCHEDULE_THREADS], const T& mine) {
    const int thread = static_cast<int>(threadIdx.x);
    shared[thread] = mine;
    arch::sync_block();
    for (int distance = 1; distance < SCHEDULE_THREADS; distance *= 2) {
        T sum = shared[thread];
        if (thread >= distance) sum = sum + shared[thread - distance];
        arch::sync_block();
        shared[thread] = sum;
        arch::sync_block();
    }
    return thread > 0 ? shared[thread - 1] : T{};
}

// Of one key head of a sequence, to a tile, or of all tiles.
__device__ __forceinline__ WorkSums sums_of_head(const Work& work, const Lengths& s, int tiles) {
    WorkSums sums{};
    for (int tile = 0; tile < tiles; ++tile) {
        const KeyBlocks keys = work.blocks_of(s, tile);
        const int splits = work.splits(keys);
        sums.cost += ITEM_COST + keys.end - keys.begin;
        if (splits > 1) {
            sums.slots += splits;
            ++sums.split_items;
        }
    }
    return sums;
}

// Of so many items that cost the same, which are to be cut rarely: a few parts less.
__device__ __forceinline__ int64_t even_parts(int64_t parts, int64_t items, int64_t least) {
    if (items <= 0) return parts;
    if (items < parts) {
        const int64_t even = parts / items * items;
        return even >= least ? even : parts;
    }
    for (int64_t even = parts; even >= least; --even) {
        if (items % even == 0) return even;
    }
    return parts;
}

struct Scheduler {
    const ScheduleGlobals& g;
    ScheduleShared& shared;
    const Work& work = g.work;
    int64_t* const before = reinterpret_cast<int64_t*>(g.schedule.data + g.schedule.scratch);

    __device__ __forceinline__ Lengths lengths(int b) const {
        return work.lengths(b, work.keys_of(b), work.queries_of(b));
    }
    __device__ __forceinline__ WorkSums of_sequence(int b) const {
        const Lengths s = lengths(b);
        return sums_of_head(work, s, work.tiles(s.q_length));
    }

    // The sums before each sequence go to memory.
    __device__ __forceinline__ void add_up() const {
        const int each = (work.batch + SCHEDULE_THREADS - 1) / SCHEDULE_THREADS;
        const int from = ::min(static_cast<int>(threadIdx.x) * each, work.batch);
        const int to = ::min(from + each, work.batch);
        WorkSums mine{};
        const int64_t first = work.batch > 0 ? of_sequence(0).cost : 0;
        for (int b = from; b < to; ++b) {
            const WorkSums sums = of_sequence(b);
            mine = mine + sums;
            mine.unequal += sums.cost == first ? 0 : 1;
        }
        WorkSums sums = sum_before(shared.sums, mine);
        for (int b = from; b < to; ++b) {
            store(b, sums);
            sums = sums + of_sequence(b);
            arch::store_global(reinterpret_cast<int2*>(g.schedule.data + g.schedule.lengths) + b,
                               int2{work.keys_of(b), work.queries_of(b)});
        }
        if (threadIdx.x == 0) store(work.batch, shared.sums[SCHEDULE_THREADS - 1]);
        arch::sync_block();
    }
    __device__ __forceinline__ void store(int b, const WorkSums& sums) const {
        arch::store_global(before + 3 * b, sums.cost);
        arch::store_global(before + 3 * b + 1, sums.slots);
        arch::store_global(before + 3 * b + 2, sums.split_items);
    }
    __device__ __forceinline__ int64_t load(int b, int what) const {
        return arch::load_global(before + 3 * b + what);
    }

    __device__ __forceinline__ Position end() const { return {work.lines(), 0, 0, 0}; }
    // The place with so much of the whole cost before it.
    __device__ __forceinline__ Position place(int64_t cost) const {
        const int64_t head_cost = load(work.batch, 0);
        const int kv_head = head_cost == 0 ? 0 : static_cast<int>(cost / head_cost);
        if (kv_head >= work.kv_heads || work.batch == 0) return end();
        int64_t rest = cost - kv_head * head_cost;
        int low = 0, high = work.batch;  // the sequence is in [low, high)
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            (load(middle, 0) <= rest ? low : high) = middle;
        }
        const Lengths s = lengths(low);
        const int tiles = work.tiles(s.q_length);
        rest -= load(low, 0);
        int tile = 0, block = 0;
        for (;; ++tile) {
            const KeyBlocks keys = work.blocks_of(s, tile);
            const int cost_of_tile = ITEM_COST + keys.end - keys.begin;
            if (rest >= cost_of_tile && tile + 1 < tiles) {
                rest -= cost_of_tile;
                continue;
            }
            block = keys.begin + ::max(static_cast<int>(rest) - ITEM_COST, 0);
            if (work.split_blocks > 0) block = block / work.split_blocks * work.split_blocks;
            if (block <= keys.begin) block = 0;
            break;
        }
        Position at{kv_head * work.batch + low, tile, block, 0};
        if (work.split_blocks > 0) {
            const WorkSums in_head = sums_of_head(work, s, tile);
            const KeyBlocks keys = work.blocks_of(s, tile);
            at.slot =
                static_cast<int>(kv_head * load(work.batch, 1) + load(low, 1) + in_head.slots);
            if (block > 0) at.slot += block / work.split_blocks - keys.begin / work.split_blocks;
        }
        return at;
    }

    __device__ __forceinline__ void cut() const {
        const int64_t heads = work.kv_heads, total = heads * load(work.batch, 0);
        // A part has a block at least: so no two cuts are in the same place of an item.
        int64_t parts = ::min(static_cast<int64_t>(work.parts), total), of_each = 0;
        if (work.split_blocks == 0) {
            const bool equal = work.batch > 0 && shared.sums[SCHEDULE_THREADS - 1].unequal == 0;
            const int64_t items = equal ? int64_t{work.batch} * work.tiles(work.queries_of(0)) : 0;
            const int64_t of_head = parts / heads, least = parts - parts / 16;
            if (of_head * heads >= least) {
                of_each = even_parts(of_head, items, (least + heads - 1) / heads);
                parts = heads * of_each;
            } else {
                parts = even_parts(parts, items * heads, least);
            }
        }
        if (threadIdx.x == 0) arch::store_global(g.schedule.data + 2, static_cast<int>(of_each));
        for (int p = static_cast<int>(threadIdx.x); p <= work.parts; p += SCHEDULE_THREADS) {
            shared.positions[p] = p < parts ? place(total * p / parts) : end();
        }
        arch::sync_block();
    }

    // Where cuts are in the middle of an item, the parts beside it leave partial results in slots:
    // that of part p is p, and one more for each split item before.
    __device__ __forceinline__ bool cut_inside(int p) const {
        return p > 0 && shared.positions[p].block > 0;
    }
    __device__ __forceinline__ bool first_cut(int p) const {
        return cut_inside(p) &&
               !(cut_inside(p - 1) && shared.positions[p - 1].same_item(shared.positions[p]));
    }
    __device__ __forceinline__ void number_cuts() const {
        const int each = (work.parts + SCHEDULE_THREADS) / SCHEDULE_THREADS;
        const int from = ::min(static_cast<int>(threadIdx.x) * each, work.parts + 1);
        const int to = ::min(from + each, work.parts + 1);
        int mine = 0;
        for (int p = from; p < to; ++p) mine += first_cut(p) ? 1 : 0;
        int splits = sum_before(shared.splits_before, mine);
        const int all = shared.splits_before[SCHEDULE_THREADS - 1];
        for (int p = from; p < to; ++p) {
            // Items that are split before the one that the cut is in, or is before.
            if (first_cut(p)) list_split_item(p, splits);
            splits += first_cut(p) ? 1 : 0;
            const int before_item = splits - (cut_inside(p) ? 1 : 0);
            Position at = shared.positions[p];
            at.slot = p + before_item;
            store_part(p, at);
        }
        if (threadIdx.x == 0) arch::store_global(g.schedule.data + 1, all);
    }
    __device__ __forceinline__ void list_split_item(int p, int index) const {
        int end = p + 1;  // of the parts that have some of it
        while (end <= work.parts && cut_inside(end) &&
               shared.positions[end].same_item(shared.positions[p]))
            ++end;
        const Position& at = shared.positions[p];
        if (index < g.items) list(index, {at.line, at.tile, p - 1 + index, end - p + 1});
    }
    __device__ __forceinline__ void list(int64_t index, const int4& entry) const {
        int* const to = g.schedule.data + g.schedule.list + 4 * index;
        arch::store_global(to, entry.x);
        arch::store_global(to + 1, entry.y);
        arch::store_global(to + 2, entry.z);
        arch::store_global(to + 3, entry.w);
    }
    __device__ __forceinline__ void store_part(int p, const Position& at) const {
        arch::store_global(reinterpret_cast<int4*>(g.schedule.data + g.schedule.positions) + p,
                           arch::bit_cast<int4>(at));
    }

    // With a split size: every item that has several splits.
    __device__ __forceinline__ void list_splits() const {
        for (int p = static_cast<int>(threadIdx.x); p <= work.parts; p += SCHEDULE_THREADS) {
            store_part(p, shared.positions[p]);
        }
        for (int b = static_cast<int>(threadIdx.x); b < work.batch; b += SCHEDULE_THREADS) {
            const Lengths s = lengths(b);
            const int tiles = work.tiles(s.q_length);
            for (int head = 0; head < work.kv_heads; ++head) {
                int64_t index = head * load(work.batch, 2) + load(b, 2);
                int64_t slot = head * load(work.batch, 1) + load(b, 1);
                for (int tile = 0; tile < tiles; ++tile) {
                    const int splits = work.splits(work.blocks_of(s, tile));
                    if (splits == 1) continue;
                    if (index < g.items) {
                        list(index, {head * work.batch + b, tile, static_cast<int>(slot), splits});
                    }
                    ++index;
                    slot += splits;
                }
            }
        }
        if (threadIdx.x == 0) {
            const auto count = static_cast<int>(work.kv_heads * load(work.batch, 2));
            arch::store_global(g.schedule.data + 1, ::min(count, g.items));
        }
    }
};

__device__ __forceinline__ void write_schedule(const ScheduleGlobals& g) {
    auto& shared = arch::static_shared<ScheduleShared>();
    arch::wait_for_dependencies();
    arch::launch_dependents();
    const Scheduler scheduler{g, shared};
    scheduler.add_up();
    scheduler.cut();
    if (g.work.split_blocks > 0)
        scheduler.list_splits();
    else
        scheduler.number_cuts();
    if (threadIdx.x == 0) arch::store_global(g.schedule.data, static_cast<int>(g.work.hash));
}

template <int THREADS>  // a template, so that the kernel is where it is instantiated
__global__ __launch_bounds__(THREADS) void schedule_kernel(
    const __grid_constant__ ScheduleGlobals g) {
    write_schedule(g);
}

inline void launch_schedule_by(void (*kernel)(ScheduleGlobals), bool dependent,
                               const Params& params, Stream stream) {
    const ScheduleShape shape = schedule_shape(params.problem, params.parts);
    const ScheduleGlobals globals{Work(params), Schedule(params.schedule, shape),
                                  static_cast<int>(shape.items)};
    kittens::launch({.dependent = dependent}, kernel, dim3(1), dim3(SCHEDULE_THREADS), dim3(1), 0,
                    stream, globals);
}
template <int threads>
void launch_schedule(const Params& params, Stream stream) {
    static_assert(threads == SCHEDULE_THREADS);
    launch_schedule_by(schedule_kernel<threads>, true, params, stream);
}

}  // namespace thunderkittens::attention::decode
