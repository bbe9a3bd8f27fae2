// Scratch memory through which the blocks of a call exchange sums: how they know its flags from
// those that an earlier call has left there. Host C++ only.
#pragma once

#include <atomic>
#include <cstdint>

namespace thunderkittens::gemm {

// A number that no call of this process has had: by it a block knows that sums in the scratch are
// of this call, which nobody has to clear therefore.
inline uint64_t new_mark() {
    // Odd steps come back to a number after 2^64 calls, and unlike small ones are not what memory
    // has from others.
    static std::atomic<uint64_t> last{0};
    return last += 0x9e3779b97f4a7c15u;
}

}  // namespace thunderkittens::gemm
