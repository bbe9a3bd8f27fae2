// Named barriers: 16 per block, number 0 is __syncthreads.
#pragma once

#include "calls.h"

namespace kittens::inline on_cpu {
namespace arch {

inline void named_barrier_sync(int id, int threads) {
    emulated::use_named_barrier(id, threads, true);
}
inline void block_barrier_sync(int id) { emulated::use_block_barrier(id); }
inline void named_barrier_arrive(int id, int threads) {
    emulated::use_named_barrier(id, threads, false);
}

}  // namespace arch
}  // namespace kittens::inline on_cpu
