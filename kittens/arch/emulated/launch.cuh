// Launches: the kernel has run when the call returns.
#pragma once

#include <tuple>
#include <utility>

#include "calls.h"

namespace kittens::inline on_cpu {
namespace arch {

inline void check(cudaError_t error, const char* what) {
    if (error != cudaSuccess) emulated::throw_cuda_error(error, what);
}

// __cluster_dims__ is lost on a host compiler: the launch says it.
constexpr unsigned cluster_of_launch(int blocks) { return static_cast<unsigned>(blocks); }

template <class... Parameters, class... Arguments>
void launch(bool dependent, int blocks_per_sm, void (*kernel)(Parameters...), dim3 grid, dim3 block,
            dim3 cluster, size_t shared_bytes, cudaStream_t, Arguments&&... arguments) {
    struct Call {
        void (*kernel)(Parameters...);
        std::tuple<Parameters...> arguments;
    };
    const Call call{kernel, {Parameters(std::forward<Arguments>(arguments))...}};
    const auto run = [](const void* pointer) {
        const auto& made = *static_cast<const Call*>(pointer);
        std::apply(made.kernel, made.arguments);
    };
    emulated::launch({reinterpret_cast<const void*>(kernel), run, &call}, dependent, blocks_per_sm,
                     grid, block, cluster, shared_bytes);
}

template <class... Parameters, class... Arguments>
bool launch_cooperative(dim3 together, bool dependent, void (*kernel)(Parameters...), dim3 grid,
                        dim3 block, size_t shared_bytes, cudaStream_t stream,
                        Arguments&&... arguments) {
    launch(dependent, 1, kernel, grid, block, together, shared_bytes, stream,
           std::forward<Arguments>(arguments)...);
    return true;
}

}  // namespace arch
}  // namespace kittens::inline on_cpu
