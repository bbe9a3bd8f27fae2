// Memory fences, above all between the generic proxy and the async proxy.
#pragma once

#include "barriers.h"

namespace kittens::inline on_cpu {
namespace arch {

inline void fence_async_shared() {
    emulated::fence_proxy(emulated::self());
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

}  // namespace arch
}  // namespace kittens::inline on_cpu
