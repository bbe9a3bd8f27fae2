// What the tiled products on Hopper share: the position in the ring of stages, the position of a
// block in its multicast cluster, the release of stages, and the copy of a staging buffer to rows
// that TMA cannot store.
#pragma once

#include "kittens/kittens.cuh"
#include "kittens/pipeline/ring.cuh"

namespace thunderkittens::gemm {
namespace sm90 {

using namespace kittens;

// The named barrier at which the semaphores are initialised. The barriers of the consumers have the
// numbers after it.
constexpr int READY = 1;

// A position in the ring of stages, and the parity of the round.
template <int stages>
using Ring = pipeline_state<stages>;

// Initialises the semaphores of a ring, for so many arrivals that fill and that release a stage.
template <int stages, class Shared>
__device__ __forceinline__ void init_stages(Shared& shared, int filling, int releasing) {
    for (int i = 0; i < stages; ++i) {
        init_semaphore(shared.full[i], filling);
        init_semaphore(shared.empty[i], releasing);
    }
}

// Releases a stage, by a consumer that has read it. One arrival stands for the warpgroup, because
// wgmma reads shared memory for all of it.
__device__ __forceinline__ void release_stage(semaphore& empty) {
    if (warpgroup::laneid() == 0) arrive(empty);
}

// One arrival of a warp all of whose lanes have come.
__device__ __forceinline__ void arrive_by_warp(semaphore& semaphore) {
    arch::sync_warp();
    if (laneid() == 0) arrive(semaphore);
}

// The position of this block in its multicast cluster, which has one or two by one or two blocks.
struct ClusterPosition {
    uint32_t in_m, in_n;

    template <class Globals>
    __device__ __forceinline__ explicit ClusterPosition(const Globals& g) {
        const uint32_t rank = g.cluster_m * g.cluster_n > 1 ? arch::cluster_rank() : 0;
        in_m = g.cluster_n == 2 ? rank / 2 : rank;
        in_n = g.cluster_n == 2 ? rank % 2 : 0;
    }
    // Blocks in the same row of the cluster share a's tile, those in the same column b's.
    template <class Globals>
    __device__ __forceinline__ uint16_t a_blocks(const Globals& g) const {
        return static_cast<uint16_t>(((1u << g.cluster_n) - 1) << (in_m * g.cluster_n));
    }
    template <class Globals>
    __device__ __forceinline__ uint16_t b_blocks(const Globals& g) const {
        return static_cast<uint16_t>((g.cluster_m == 2 ? 1u | 1u << g.cluster_n : 1u) << in_n);
    }
};

// Releases a stage to the blocks of the cluster that fill it: warp i of a consumer arrives at block
// i. One arrival stands for the warpgroup, because wgmma reads shared memory for all of it.
struct ClusterRelease {
    bool own, alone;
    uint32_t peer;

    template <class Globals>
    __device__ __forceinline__ ClusterRelease(const Globals& g, const ClusterPosition place)
        : alone(g.cluster_m * g.cluster_n == 1), peer(warpgroup::warpid()) {
        const uint32_t peer_m = g.cluster_n == 2 ? peer / 2 : peer,
                       peer_n = g.cluster_n == 2 ? peer % 2 : 0;
        own = laneid() == 0 && peer < g.cluster_m * g.cluster_n &&
              (peer_m == place.in_m || peer_n == place.in_n);
    }
    __device__ __forceinline__ void operator()(semaphore& empty) const {
        if (!own) return;
        if (alone)
            arrive(empty);
        else
            arrive_remote_relaxed(empty, peer);
    }
};

// Copies the rows in a warp's staging buffer to rows that TMA cannot store: neighbouring lanes
// write neighbouring words.
template <class Word, class Staging>
__device__ __forceinline__ void copy_rows(const Staging& staging, Word* out, int64_t row_words,
                                          uint32_t rows, uint32_t words) {
    constexpr int per_word = int(sizeof(Word) / sizeof(typename Staging::T));
    constexpr int width = Staging::cols / per_word;
#pragma unroll 1
    for (int row = 0; row < Staging::rows && row < int(rows); ++row) {
#pragma unroll
        for (int i = 0; i < width; i += WARP_THREADS) {
            const int word = i + laneid();
            if (word < int(words)) {
                arch::store_global(
                    out + row * row_words + word,
                    arch::load_shared<Word>(staging.address_of(row, word * per_word)));
            }
        }
    }
}

}  // namespace sm90
}  // namespace thunderkittens::gemm
