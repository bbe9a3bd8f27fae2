// Thread block clusters: rank, barrier, addresses of the other blocks' shared memory.
#pragma once

#include "calls.h"

namespace kittens::inline on_cpu {
namespace arch {

inline uint32_t cluster_rank() { return emulated::cluster_rank(); }
inline uint32_t cluster_size() { return emulated::cluster_size(); }
inline void cluster_arrive() { emulated::arrive_at_cluster(true); }
inline void cluster_arrive_relaxed() { emulated::arrive_at_cluster(false); }
inline void cluster_wait() { emulated::wait_for_cluster(); }
inline uint32_t map_shared_rank(uint32_t address, uint32_t rank) {
    return emulated::map_shared_rank(address, rank);
}

}  // namespace arch
}  // namespace kittens::inline on_cpu
