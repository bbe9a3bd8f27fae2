// cp.async: 4, 8 or 16 bytes from global to shared memory without passing through registers.
#pragma once

#include "calls.h"

namespace kittens::inline on_cpu {
namespace arch {

template <int BYTES>
inline void cp_async_partial(uint32_t destination, const void* source, int read_bytes) {
    static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp.async copies 4, 8 or 16 bytes");
    emulated::issue_small_copy(destination, source, BYTES, read_bytes);
}
template <int BYTES>
inline void cp_async(uint32_t destination, const void* source, bool valid = true) {
    cp_async_partial<BYTES>(destination, source, valid ? BYTES : 0);
}
inline void cp_async_commit() { emulated::commit_small_copies(); }
template <int PENDING>
inline void cp_async_wait() {
    emulated::wait_for_small_copies(PENDING);
}
inline void cp_async_mbarrier_arrive(uint32_t barrier) {
    emulated::arrive_after_small_copies(barrier);
}

}  // namespace arch
}  // namespace kittens::inline on_cpu
