// Launches of blocks that wait for each other: all of them run at a time, or none. Not in the
// umbrella arch.cuh.
#pragma once

#include "arch.cuh"

namespace kittens::inline KITTENS_BACKEND {
namespace arch {

// As launch(); false where the GPU, or the part of it that the stream's context has, does not have
// room for all blocks at a time. The emulator runs those of a cluster at a time, which the GPU need
// not know: `together` of them.
template <class... Parameters, class... Arguments>
bool launch_cooperative([[maybe_unused]] dim3 together, bool dependent,
                        void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
                        cudaStream_t stream, Arguments&&... arguments) {
#if defined(__CUDACC__)
    allow_shared_bytes(reinterpret_cast<const void*>(kernel), shared_bytes);
    cudaLaunchAttribute attributes[2];
    attributes[0].id = cudaLaunchAttributeCooperative;
    attributes[0].val.cooperative = 1;
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = dependent ? 2 : 1;
    const cudaError_t error =
        cudaLaunchKernelEx(&config, kernel, Parameters(std::forward<Arguments>(arguments))...);
    if (error == cudaErrorCooperativeLaunchTooLarge) {
        cudaGetLastError();  // else the next caller that asks the runtime takes it for its own
        return false;
    }
    check(error, "kernel launch");
#else
    launch(dependent, kernel, grid, block, together, shared_bytes, stream,
           std::forward<Arguments>(arguments)...);
#endif
    return true;
}

}  // namespace arch
}  // namespace kittens::inline KITTENS_BACKEND
