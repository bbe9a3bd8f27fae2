// ldmatrix / stmatrix / movmatrix: four 8x8 matrices of 16-bit elements between shared memory and
// registers. Lane l gives the address of row l%8 of matrix l/8.
#pragma once

#include <cstdint>

namespace kittens::inline on_gpu {
namespace arch {

__device__ __forceinline__ void load_matrix_x4(uint32_t& r0, uint32_t& r1, uint32_t& r2,
                                               uint32_t& r3, uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r0), "=r"(r1), "=r"(r2), "=r"(r3)
                 : "r"(address)
                 : "memory");
}
__device__ __forceinline__ void load_matrix_x4_transposed(uint32_t& r0, uint32_t& r1, uint32_t& r2,
                                                          uint32_t& r3, uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r0), "=r"(r1), "=r"(r2), "=r"(r3)
                 : "r"(address)
                 : "memory");
}
__device__ __forceinline__ void store_matrix_x4(uint32_t address, uint32_t r0, uint32_t r1,
                                                uint32_t r2, uint32_t r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                 "r"(r0), "r"(r1), "r"(r2), "r"(r3)
                 : "memory");
}
__device__ __forceinline__ void store_matrix_x4_transposed(uint32_t address, uint32_t r0,
                                                           uint32_t r1, uint32_t r2, uint32_t r3) {
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
        "r"(r0), "r"(r1), "r"(r2), "r"(r3)
        : "memory");
}
// Transposes an 8x8 matrix of 16-bit elements that the warp holds, one register per lane.
__device__ __forceinline__ uint32_t transpose_matrix(uint32_t r) {
    uint32_t transposed;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(r));
    return transposed;
}

}  // namespace arch
}  // namespace kittens::inline on_gpu
