// The order in which the blocks of a persistent grid go through the work, and the rings that a
// producer and its consumers share.
#pragma once

#include "kittens/kittens.cuh"
#include "kittens/pipeline/ring.cuh"

namespace thunderkittens::attention {

using namespace kittens;

// Division of numbers below 2^31 by one that the host knows, as a product. The multiplier is
// rounded up by less than `by` units, too little to reach the next quotient (Granlund and
// Montgomery, "Division by invariant integers using multiplication", 1994).
struct Divisor {
    uint32_t multiplier;
    int shift = 0;

    explicit Divisor(int by) {
        by = by < 1 ? 1 : by;
        while ((int64_t{1} << shift) < by) ++shift;
        multiplier = static_cast<uint32_t>(((uint64_t{1} << (31 + shift)) + by - 1) / by);
    }
    __device__ __forceinline__ int quotient(int n) const {
        const uint64_t product = uint64_t{2 * static_cast<uint32_t>(n)} * multiplier;
        return static_cast<int>(static_cast<uint32_t>(product >> 32) >> shift);
    }
};

// A work tile is one block of queries (of keys, in the backward) of one head of one batch. Work
// tiles come in sections of heads, a swizzle for L2, inside a section longest first (level 0).
struct TileScheduler {
    int blocks, heads, batch;
    int section_heads;  // of all batches; see Choice

    struct WorkTile {
        int level, head, batch;
    };
    __host__ __device__ int work_tiles() const { return blocks * heads * batch; }

    __device__ __forceinline__ WorkTile work_tile(int index) const {
        const int section = index / (blocks * section_heads);
        const int rest = index - section * blocks * section_heads;
        const int first_head = section * section_heads;
        const int here = ::min(section_heads, heads * batch - first_head);
        const int head = first_head + rest % here;  // of all heads of all batches
        return {rest / here, head % heads, head / heads};
    }
};

// A position in a ring of stages, with the parity of its current pass.
template <int STAGES>
using RingPosition = pipeline_state<STAGES>;

}  // namespace thunderkittens::attention
