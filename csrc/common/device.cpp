// Properties of the CUDA devices, read once each.
#include "csrc/common/device.h"

#include <cuda_runtime_api.h>

#include <array>
#include <mutex>

namespace thunderkittens {
namespace {

int attribute(cudaDeviceAttr which, int index) {
    int value = 0;
    const cudaError_t error = cudaDeviceGetAttribute(&value, which, index);
    TK_CHECK(error == cudaSuccess, "thunderkittens: cannot read the properties of CUDA device ",
             index, ": ", cudaGetErrorString(error));
    return value;
}

DeviceProperties read_properties(int index) {
    return restricted({
        .sm_count = attribute(cudaDevAttrMultiProcessorCount, index),
        .shared_bytes_per_block = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, index),
        .l2_bytes = attribute(cudaDevAttrL2CacheSize, index),
        .major = attribute(cudaDevAttrComputeCapabilityMajor, index),
        .minor = attribute(cudaDevAttrComputeCapabilityMinor, index),
    });
}

}  // namespace

const DeviceProperties& device_properties(int index) {
    constexpr int max_devices = 64;
    static std::array<DeviceProperties, max_devices> properties;
    static std::array<std::once_flag, max_devices> once;
    TK_CHECK(index >= 0 && index < max_devices, "thunderkittens: CUDA device index ", index,
             " is not in [0, ", max_devices, ")");
    std::call_once(once[index], [index] { properties[index] = read_properties(index); });
    return properties[index];
}

}  // namespace thunderkittens
