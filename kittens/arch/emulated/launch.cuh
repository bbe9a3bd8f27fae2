// Launches: the kernel has run when the call returns.
#pragma once

#include "run.h"

namespace kittens::inline on_cpu {
namespace arch {

// The CUDA runtime is not part of this back end; what calls it fails as it would without a GPU.
inline void check(cudaError_t error, const char* what) {
    if (error != cudaSuccess) {
        throw std::runtime_error(std::string("kittens: ") + what + ": CUDA error " +
                                 std::to_string(static_cast<int>(error)));
    }
}

// __cluster_dims__ is lost on a host compiler: the launch says it.
constexpr unsigned cluster_of_launch(int blocks) { return static_cast<unsigned>(blocks); }

template <class... Parameters, class... Arguments>
void launch(bool dependent, void (*kernel)(Parameters...), dim3 grid, dim3 block, dim3 cluster,
            size_t shared_bytes, cudaStream_t, Arguments&&... arguments) {
    const std::tuple<Parameters...> values(Parameters(std::forward<Arguments>(arguments))...);
    const std::function<void()> body = [&] { std::apply(kernel, values); };
    const emulated::Options chosen = emulated::chosen_options();
    emulated::Grid g;
    g.grid = grid;
    g.block = block;
    g.cluster = cluster;
    g.shared_bytes = static_cast<uint32_t>(std::min<size_t>(shared_bytes, ~0u));
    g.dependent = dependent;
    g.name = chosen.kernel.empty() ? emulated::symbol_name(reinterpret_cast<const void*>(kernel))
                                   : chosen.kernel;
    g.body = &body;
    g.options = &chosen;
    emulated::run_grid(g);
}

template <class... Parameters, class... Arguments>
bool launch_cooperative(dim3 together, bool dependent, void (*kernel)(Parameters...), dim3 grid,
                        dim3 block, size_t shared_bytes, cudaStream_t stream,
                        Arguments&&... arguments) {
    launch(dependent, kernel, grid, block, together, shared_bytes, stream,
           std::forward<Arguments>(arguments)...);
    return true;
}

}  // namespace arch
}  // namespace kittens::inline on_cpu
