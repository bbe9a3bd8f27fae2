// Launches on the GPU, through the CUDA runtime.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>
#include <utility>

namespace kittens::inline on_gpu {
namespace arch {

inline void check(cudaError_t error, const char* what) {
    if (error != cudaSuccess) {
        cudaGetLastError();  // else the next caller that asks the runtime takes it for its own
        throw std::runtime_error(std::string("kittens: ") + what + ": " +
                                 cudaGetErrorString(error));
    }
}

// A kernel and a device whose limit of dynamic shared memory has been raised, in a list that only
// grows.
struct RaisedLimit {
    const void* kernel;
    int device;
    const RaisedLimit* next;
};

// Raises the limit once per kernel and device; threads that do it at the same time do the same. The
// lists are read without a lock at every launch. (This is in all files with a kernel, and <mutex>
// and <set>, or <atomic>, would cost each some tenths of a second to compile.)
inline void allow_shared_bytes(const void* kernel, size_t bytes) {
    if (bytes <= 48 * 1024) return;
    static const RaisedLimit* lists[64] = {};
    int device = 0;
    check(cudaGetDevice(&device), "cudaGetDevice");
    const RaisedLimit*& list = lists[(reinterpret_cast<size_t>(kernel) / 16) % 64];
    const RaisedLimit* const first = __atomic_load_n(&list, __ATOMIC_ACQUIRE);
    for (const RaisedLimit* at = first; at != nullptr; at = at->next) {
        if (at->kernel == kernel && at->device == device) return;
    }
    int limit = 0;
    check(cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
          "cudaDeviceGetAttribute");
    cudaFuncAttributes attributes{};
    check(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes");
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               limit - static_cast<int>(attributes.sharedSizeBytes)),
          "cudaFuncSetAttribute");
    auto* const raised = new RaisedLimit{kernel, device, first};
    while (!__atomic_compare_exchange_n(&list, &raised->next, raised, false, __ATOMIC_RELEASE,
                                        __ATOMIC_RELAXED)) {
    }
}

// What a launch must say of the cluster of a kernel that has __cluster_dims__: nothing.
constexpr unsigned cluster_of_launch(int) { return 1; }

template <class... Parameters, class... Arguments>
void launch(bool dependent, int /*blocks_per_sm*/, void (*kernel)(Parameters...), dim3 grid,
            dim3 block, dim3 cluster, size_t shared_bytes, cudaStream_t stream,
            Arguments&&... arguments) {
    allow_shared_bytes(reinterpret_cast<const void*>(kernel), shared_bytes);
    cudaLaunchAttribute attributes[2];
    unsigned count = 0;
    if (cluster.x * cluster.y * cluster.z > 1) {
        attributes[count].id = cudaLaunchAttributeClusterDimension;
        attributes[count].val.clusterDim = {cluster.x, cluster.y, cluster.z};
        ++count;
    }
    if (dependent) {
        attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[count].val.programmaticStreamSerializationAllowed = 1;
        ++count;
    }
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = count;
    check(cudaLaunchKernelEx(&config, kernel, Parameters(std::forward<Arguments>(arguments))...),
          "kernel launch");
}

// As launch(), of blocks that wait for each other: all of them run at a time, or none. False where
// the GPU, or the part of it that the stream's context has, does not have room for all blocks. The
// emulator runs those of a cluster at a time, which the GPU need not know: `together` of them.
template <class... Parameters, class... Arguments>
bool launch_cooperative(dim3 /*together*/, bool dependent, void (*kernel)(Parameters...), dim3 grid,
                        dim3 block, size_t shared_bytes, cudaStream_t stream,
                        Arguments&&... arguments) {
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
    return true;
}

}  // namespace arch
}  // namespace kittens::inline on_gpu
