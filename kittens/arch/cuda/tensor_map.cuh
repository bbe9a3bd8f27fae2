// The driver's function that encodes tensor maps, resolved at run time, so that nothing links to
// libcuda.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <stdexcept>

namespace kittens::inline on_gpu {
namespace arch {

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*,
                                 const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                                 const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                 CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

inline EncodeTiled encode_tiled() {
    static const EncodeTiled function = [] {
        void* entry = nullptr;
        cudaDriverEntryPointQueryResult found{};
        const cudaError_t error = cudaGetDriverEntryPointByVersion(
            "cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
        if (error != cudaSuccess || found != cudaDriverEntryPointSuccess || entry == nullptr) {
            throw std::runtime_error(
                "kittens: the CUDA driver has no cuTensorMapEncodeTiled; a driver for CUDA 12.0 or "
                "newer is needed");
        }
        return reinterpret_cast<EncodeTiled>(entry);
    }();
    return function;
}

// Makes the primary context of the thread's device its current one. The driver's functions need a
// current context, which a thread has only after its first call of the runtime that uses a device.
// Unlike cudaFree(nullptr), cudaSetDevice is allowed while another thread captures a graph.
inline void make_context_current() {
    int device = 0;
    if (cudaGetDevice(&device) != cudaSuccess || cudaSetDevice(device) != cudaSuccess) {
        cudaGetLastError();  // the caller's next call of the driver reports what is wrong
    }
}

}  // namespace arch
}  // namespace kittens::inline on_gpu
