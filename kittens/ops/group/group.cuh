// Scopes: group<N> for N warps, with `warp` and `warpgroup` as names for 1 and 4.
#pragma once

#include "conversions.cuh"
#include "identity.cuh"
#include "maps.cuh"
#include "masks.cuh"
#include "memory.cuh"
#include "mma_sync.cuh"
#include "operands.cuh"
#include "reductions.cuh"
#include "shared_register.cuh"
#include "thread_verbs.cuh"
#include "wgmma.cuh"

namespace kittens::inline KITTENS_BACKEND {

template <int WARPS>
struct group : group_identity<WARPS>,
               shared_register_ops<WARPS>,
               memory_ops<WARPS>,
               map_ops<WARPS>,
               reduction_ops<WARPS>,
               mask_ops<WARPS>,
               conversion_ops<WARPS>,
               mma_sync_ops<WARPS>,
               wgmma_ops<WARPS>,
               thread_verbs<WARPS> {
    // Names that two of them have.
    using group_identity<WARPS>::arrive;
    using thread_verbs<WARPS>::arrive;
    using shared_register_ops<WARPS>::load;
    using memory_ops<WARPS>::load;
    using shared_register_ops<WARPS>::store;
    using memory_ops<WARPS>::store;
    using map_ops<WARPS>::max;
    using reduction_ops<WARPS>::max;
    using map_ops<WARPS>::min;
    using reduction_ops<WARPS>::min;
};

using warp = group<1>;
using warpgroup = group<WARPGROUP_WARPS>;

}  // namespace kittens::inline KITTENS_BACKEND
