// mma.sync at warp scope: m16n8k16 for 16-bit and m16n8k32 for 8-bit operands. A is row-major, B is
// column-major in the instruction's terms (PTX ISA, "mma.sync.aligned.m16n8k16 / k32").
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

namespace kittens::inline on_gpu {
namespace arch {

template <class A, class B>
struct mma_sync;

#define KITTENS_MMA_SYNC_F32(A_TYPE, B_TYPE, K, A_NAME, B_NAME)                                   \
    template <>                                                                                   \
    struct mma_sync<A_TYPE, B_TYPE> {                                                             \
        static __device__ __forceinline__ void fma(float (&d)[4], const uint32_t (&a)[4],         \
                                                   const uint32_t (&b)[2], const float (&c)[4]) { \
            asm volatile("mma.sync.aligned.m16n8k" #K ".row.col.f32." A_NAME "." B_NAME           \
                         ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "                    \
                         "{%10, %11, %12, %13};"                                                  \
                         : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])                         \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]),      \
                           "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));                           \
        }                                                                                         \
    }

KITTENS_MMA_SYNC_F32(__nv_bfloat16, __nv_bfloat16, 16, "bf16", "bf16");
KITTENS_MMA_SYNC_F32(__half, __half, 16, "f16", "f16");
KITTENS_MMA_SYNC_F32(__nv_fp8_e4m3, __nv_fp8_e4m3, 32, "e4m3", "e4m3");
KITTENS_MMA_SYNC_F32(__nv_fp8_e4m3, __nv_fp8_e5m2, 32, "e4m3", "e5m2");
KITTENS_MMA_SYNC_F32(__nv_fp8_e5m2, __nv_fp8_e4m3, 32, "e5m2", "e4m3");
KITTENS_MMA_SYNC_F32(__nv_fp8_e5m2, __nv_fp8_e5m2, 32, "e5m2", "e5m2");
#undef KITTENS_MMA_SYNC_F32

// fp16 accumulation: two packed registers hold what four floats hold above.
__device__ __forceinline__ void mma_sync_f16(uint32_t (&d)[2], const uint32_t (&a)[4],
                                             const uint32_t (&b)[2], const uint32_t (&c)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0, %1}, {%2, %3, %4, %5}, {%6, %7}, "
        "{%8, %9};"
        : "=r"(d[0]), "=r"(d[1])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(c[0]), "r"(c[1]));
}

}  // namespace arch
}  // namespace kittens::inline on_gpu
