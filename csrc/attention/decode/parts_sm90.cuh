// Attention of few rows over a cache, what each of its warps and threads has of a block of keys.
#pragma once

#include <cstddef>

#include "csrc/attention/decode/decode_types_sm90.cuh"

namespace thunderkittens::attention::decode {

// What a thread multiplies of a tile's row: chunks of 16 bytes, of which the four threads of a key
// have neighbouring ones, so that their loads meet no bank twice.
template <class Tile>
struct RowChunks {
    static constexpr int columns = 16 / int(sizeof(typename Tile::dtype));  // of a chunk
    static constexpr int row_of_stripe = Tile::stripe_cols / columns;       // of all threads
    static constexpr int of_stripe = row_of_stripe / 4;
    static constexpr int count = Tile::cols / columns / 4;

    static __device__ __forceinline__ int column(int chunk) {
        return chunk / of_stripe * Tile::stripe_cols +
               columns * (of_stripe * (laneid() % 4) + chunk % of_stripe);
    }
};
// From a row to the next, within a stripe.
template <class Tile>
constexpr int row_bytes = Tile::stripe_cols * int(sizeof(typename Tile::dtype));
// The address of the i-th chunk of 16 bytes behind the one at `address`, which is a multiple of as
// many within its stripe: a swizzle exchanges the chunks of a row.
template <class Tile>
__device__ __forceinline__ uint32_t chunk_behind(uint32_t address, int i) {
    constexpr int of_stripe = RowChunks<Tile>::row_of_stripe;
    return (address ^ static_cast<uint32_t>(16 * (i % of_stripe))) +
           static_cast<uint32_t>(i / of_stripe * Tile::stripe_bytes);
}

// Calls f.operator()<format>() for the format of a call's cache.
template <class Kernel, class F>
__device__ __forceinline__ void with_format(const Globals<Kernel>& g, F f) {
    if constexpr (!Kernel::codes)
        f.template operator()<CacheFormat::same>();
    else if constexpr (Kernel::nvfp4)
        f.template operator()<CacheFormat::nvfp4>();
    else if (g.format == CacheFormat::e4m3)
        f.template operator()<CacheFormat::e4m3>();
    else if (g.format == CacheFormat::e5m2)
        f.template operator()<CacheFormat::e5m2>();
    else
        f.template operator()<CacheFormat::int8>();
}

// Into how many times 16 rows the warps divide a tile: as many as it has, to the next power of two.
// Those that have the same rows share the keys of a block.
template <class Kernel>
__device__ __forceinline__ int row_groups(const Globals<Kernel>& g) {
    if (!Kernel::any_rows || g.results.slot_rows <= FEW_ROWS) return 1;
    return g.results.slot_rows <= 2 * FEW_ROWS ? 2 : CONSUMER_WARPS;
}
template <class Kernel>
__device__ __forceinline__ bool rows_apart(const Globals<Kernel>& g) {
    return row_groups(g) > 1;
}

// The part of a block's keys that a warp has: its own.
template <class Kernel, bool any_rows = Kernel::any_rows>
struct PartOfBlock {
    // Conversions of NVFP4 are long chains, of which two are better on their way at a time. Of 8
    // rows there are other warps for that.
    static constexpr int warp_keys = Kernel::nvfp4 && Kernel::operand_rows == FEW_ROWS ? 32 : 16;
    static constexpr int block_parts = BLOCK_N / warp_keys;
    static constexpr int turns = CONSUMER_WARPS / block_parts;  // of the warps: each n-th block

    static __device__ __forceinline__ int own_part() { return warpgroup::warpid() % block_parts; }
    static __device__ __forceinline__ int own_turn() { return warpgroup::warpid() / block_parts; }
    static __device__ __forceinline__ int first_key() {
        return warp_keys * (warpgroup::warpid() % block_parts);
    }
    // Of what a thread reads first.
    static __device__ __forceinline__ int base_key() { return first_key(); }
};
// Where warps have rows to themselves, one part after the other.
template <class Kernel>
struct PartOfBlock<Kernel, true> : PartOfBlock<Kernel, false> {
    int part = 0;

    __device__ __forceinline__ int first_key() const {
        return PartOfBlock<Kernel, false>::warp_keys * part;
    }
    static __device__ __forceinline__ int base_key() { return 0; }
};

// What is seldom needed of a segment: of portable kernels, whose registers are few, in shared
// memory while its keys are walked over.
struct Kept {
    Position at;
    Lengths s;
    Item item;
    int first, last, whole, stale;
    int none[3];
};
static_assert(sizeof(Kept) == sizeof(KeptSegment));
constexpr int KEPT_VECTORS = sizeof(KeptSegment) / sizeof(int4);
template <class Kernel>
__device__ __forceinline__ uint32_t place_of_segment(const Shared<Kernel>& shared, int vector = 0) {
    return arch::shared_address(&shared.segment) + static_cast<uint32_t>(vector * sizeof(int4));
}
// The last one is not needed any more: every warp has left its results.
template <class Kernel>
__device__ __forceinline__ void keep_segment(Shared<Kernel>& shared, const Segments& x) {
    if constexpr (Kernel::portable) {
        const auto kept = arch::bit_cast<KeptSegment>(
            Kept{x.at, x.s, x.item, x.first, x.last, int(x.whole), int(x.stale), {}});
        if (warpgroup::laneid() == 0) {
#pragma unroll
            for (int i = 0; i < KEPT_VECTORS; ++i)
                arch::store_shared(place_of_segment<Kernel>(shared, i), kept.vectors[i]);
        }
        warpgroup::sync(1);
    }
}
template <class Kernel>
__device__ __forceinline__ void restore_segment(const Shared<Kernel>& shared, Segments& x) {
    if constexpr (Kernel::portable) {
        KeptSegment kept;
#pragma unroll
        for (int i = 0; i < KEPT_VECTORS; ++i)
            kept.vectors[i] = arch::load_shared<int4>(place_of_segment<Kernel>(shared, i));
        const auto from = arch::bit_cast<Kept>(kept);
        x.at = from.at, x.s = from.s, x.item = from.item;
        x.first = from.first, x.last = from.last;
        x.whole = from.whole != 0, x.stale = from.stale != 0;
    }
}
template <class Kernel>
__device__ __forceinline__ Segments restored(const Shared<Kernel>& shared, const Segments& x) {
    Segments result = x;
    restore_segment<Kernel>(shared, result);
    return result;
}
// Whether not every row sees all keys of a block.
template <class Kernel>
__device__ __forceinline__ bool is_cut(const Shared<Kernel>& shared, const Segments& segment,
                                       int block) {
    int begin = segment.item.keys.unmasked_begin, end = segment.item.keys.unmasked_end;
    if constexpr (Kernel::portable) {
        constexpr int place =
            int(offsetof(Kept, item) + offsetof(Item, keys) + offsetof(KeyBlocks, unmasked_begin));
        const uint32_t from = place_of_segment<Kernel>(shared) + place;
        begin = arch::load_shared<int>(from), end = arch::load_shared<int>(from + 4);
    }
    return block >= end || block < begin;
}

}  // namespace thunderkittens::attention::decode
