// The workspace through which the blocks of a call exchange partial sums: the epoch that marks its
// flags. Host C++ only.
#pragma once

#include <atomic>
#include <cstdint>

namespace thunderkittens::gemm {

// A per-call epoch: a flag is raised by writing the epoch of the call, so that what an earlier call
// has left in the workspace needs no memset.
inline uint64_t new_epoch() {
    // An odd step visits every number before it repeats one, after 2^64 calls, and unlike a count
    // it does not make small numbers, which memory often holds.
    static std::atomic<uint64_t> last{0};
    return last += 0x9e3779b97f4a7c15u;
}

}  // namespace thunderkittens::gemm
