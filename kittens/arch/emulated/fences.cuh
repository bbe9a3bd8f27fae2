// Memory fences, above all between the generic proxy and the async proxy.
#pragma once

#include "calls.h"

namespace kittens::inline on_cpu {
namespace arch {

inline void fence_async_shared() {
    emulated::fence_proxy_shared();
    emulated::fence_initialized_barriers();
}
inline void fence_async() {
    fence_async_shared();
    emulated::fence_proxy_global();
}
inline void fence_cluster() { emulated::fence_initialized_barriers(); }
inline void fence_gpu() {
    fence_cluster();
    emulated::fence_acquire();
    emulated::fence_release();
}

inline void fence_async_global() { emulated::fence_proxy_global(); }
inline void fence_release_gpu() { emulated::fence_release(); }
inline void fence_acquire_gpu() { emulated::fence_acquire(); }

}  // namespace arch
}  // namespace kittens::inline on_cpu
