// What a kernel's choice depends on of the GPU, as a plain struct that a test can fill in for any
// device, and the cached properties of the real ones. Host C++ only.
#pragma once

#include <string>
#include <string_view>

#include "csrc/common/check.h"

// The opaque type behind cudaStream_t, so that launch declarations need no CUDA header.
struct CUstream_st;

namespace thunderkittens {

using Stream = CUstream_st*;

struct DeviceProperties {
    int sm_count = 0;
    int shared_bytes_per_block = 0;  // the opt-in maximum of dynamic shared memory
    int l2_bytes = 0;
    int major = 0;  // compute capability
    int minor = 0;

    bool operator==(const DeviceProperties&) const = default;
};

// Properties of a CUDA device, read once per device; safe to call from several threads. Needs the
// CUDA runtime: defined in device.cpp, which only _cuda.so holds.
const DeviceProperties& device_properties(int index);

// The architectures that this build holds kernels for, as THUNDERKITTENS_CUDA_ARCHS names them
// ("90a;100a"), or "".
inline std::string_view built_architectures() { return THUNDERKITTENS_ARCHS; }

// Empty when this build holds code for the device's architecture, else the reason in a sentence. An
// architecture with the suffix "a" runs on exactly its own compute capability.
inline std::string no_code_for(const DeviceProperties& device) {
    if (built_architectures().empty()) {
        return "this build of thunderkittens holds no CUDA kernels (THUNDERKITTENS_CUDA=OFF); "
               "install "
               "it again without that "
               "option: pip install --force-reinstall --no-deps .";
    }
    const std::string wanted = concat(device.major, device.minor, 'a');
    std::string_view rest = built_architectures();
    while (!rest.empty()) {
        const auto end = rest.find(';');
        if (rest.substr(0, end) == wanted) return "";
        rest = end == rest.npos ? std::string_view() : rest.substr(end + 1);
    }
    return concat("this build of thunderkittens holds kernels for sm_", built_architectures(),
                  ", this GPU is sm_", device.major, device.minor,
                  "; move the tensors to the CPU, or use a GPU of that architecture");
}

}  // namespace thunderkittens
