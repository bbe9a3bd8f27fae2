// Thread block clusters: rank, barrier, addresses of the other blocks' shared memory.
#pragma once

#include "barriers.h"

namespace kittens::inline on_cpu {
namespace arch {

inline uint32_t cluster_rank() { return static_cast<uint32_t>(emulated::self().block->rank); }
inline uint32_t cluster_size() { return static_cast<uint32_t>(emulated::machine->blocks.size()); }
inline void cluster_arrive() { emulated::arrive_at_cluster(true); }
inline void cluster_arrive_relaxed() { emulated::arrive_at_cluster(false); }
inline void cluster_wait() { emulated::wait_for_cluster(); }
inline uint32_t map_shared_rank(uint32_t address, uint32_t rank) {
    if (rank >= cluster_size()) {
        emulated::fail("map_shared_rank to block " + std::to_string(rank) + " of a cluster of " +
                       std::to_string(cluster_size()));
    }
    return address % emulated::SHARED_WINDOW + emulated::SHARED_WINDOW * (rank + 1);
}

}  // namespace arch
}  // namespace kittens::inline on_cpu
