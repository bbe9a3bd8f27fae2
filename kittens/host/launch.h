// Launches a kernel on a stream: grid, block, cluster, dynamic shared memory. Nothing is
// synchronised; errors throw. The emulated back end has no streams: a launch returns when the
// kernel has ended.
#pragma once

#include <utility>

#include "../arch/arch.cuh"

namespace kittens::inline KITTENS_BACKEND {
namespace host {

using arch::check;

}  // namespace host

struct LaunchOptions {
    // Start before the previous kernel of the stream has finished; the kernel must wait for it
    // itself.
    bool dependent = false;
    // What the kernel's __launch_bounds__ says, if more than one. The compiler divides a
    // multiprocessor's registers by it, and so does the emulator, which cannot see it there.
    int blocks_per_sm = 1;
};

template <class... Parameters, class... Arguments>
void launch(const LaunchOptions& options, void (*kernel)(Parameters...), dim3 grid, dim3 block,
            dim3 cluster, size_t shared_bytes, cudaStream_t stream, Arguments&&... arguments) {
    arch::launch(options.dependent, options.blocks_per_sm, kernel, grid, block, cluster,
                 shared_bytes, stream, std::forward<Arguments>(arguments)...);
}

template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, dim3 cluster, size_t shared_bytes,
            cudaStream_t stream, Arguments&&... arguments) {
    launch(LaunchOptions{}, kernel, grid, block, cluster, shared_bytes, stream,
           std::forward<Arguments>(arguments)...);
}

}  // namespace kittens::inline KITTENS_BACKEND
