// The unit tests on a GPU.
#include "device_memory.h"

#include <cuda_runtime.h>

#include <chrono>
#include <string>

namespace unit::device {
namespace {

void check(cudaError_t error, const char* what) {
    if (error != cudaSuccess) {
        throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
    }
}

}  // namespace

uint8_t* arena() {
    static uint8_t* memory = [] {
        void* p = nullptr;
        check(cudaMalloc(&p, arena_bytes), "cudaMalloc");
        return static_cast<uint8_t*>(p);
    }();
    return memory;
}
void upload(const std::vector<uint8_t>& bytes) {
    check(cudaMemcpy(arena(), bytes.data(), bytes.size(), cudaMemcpyHostToDevice), "upload");
}
void download(std::vector<uint8_t>& bytes) {
    check(cudaMemcpy(bytes.data(), arena(), bytes.size(), cudaMemcpyDeviceToHost), "download");
}
void wait() {
    check(cudaGetLastError(), "launch");
    const auto start = std::chrono::steady_clock::now();
    cudaError_t state;
    while ((state = cudaStreamQuery(nullptr)) == cudaErrorNotReady) {
        if (std::chrono::steady_clock::now() - start > std::chrono::seconds(10)) {
            throw Hang("the kernel did not end within 10 seconds");
        }
    }
    check(state, "kernel");
}
bool is_lost() {
    return cudaPeekAtLastError() != cudaSuccess || cudaDeviceSynchronize() != cudaSuccess;
}

}  // namespace unit::device
