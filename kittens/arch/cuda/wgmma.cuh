// wgmma: asynchronous products of a warpgroup, m64nNk16 (16-bit) and m64nNk32 (8-bit), accumulators
// in registers, A from shared memory or registers, B from shared memory (PTX ISA,
// "wgmma.mma_async").
//
// One macro spells the instruction; every N from 16 to 256 in steps of 16 is one line of a table,
// and 136 one more for e4m3 operands.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

namespace kittens::inline on_gpu {
namespace arch {

// Matrix descriptor of an operand in shared memory (PTX ISA, "Matrix Descriptor Format"). For an
// operand whose contiguous dimension is K, `stride_bytes` lies between groups of 8 rows and
// `leading_bytes` is unused with a swizzle. For the transposed ("MN-major") form `leading_bytes`
// lies between stripes of one swizzle width along M or N, `stride_bytes` between groups of 8 along
// K.
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t shared_address, int leading_bytes,
                                                     int stride_bytes, int swizzle_bytes) {
    const uint64_t mode = swizzle_bytes == 128  ? 1
                          : swizzle_bytes == 64 ? 2
                          : swizzle_bytes == 32 ? 3
                                                : 0;
    return static_cast<uint64_t>((shared_address & 0x3FFFF) >> 4) |
           (static_cast<uint64_t>(leading_bytes >> 4) << 16) |
           (static_cast<uint64_t>(stride_bytes >> 4) << 32) | (mode << 62);
}
// The same matrix, `bytes` further on. The address field cannot overflow: shared memory ends before
// it does.
__device__ __forceinline__ uint64_t wgmma_advance(uint64_t descriptor, int bytes) {
    const uint32_t low = static_cast<uint32_t>(descriptor) + static_cast<uint32_t>(bytes >> 4);
    return (descriptor & 0xFFFFFFFF00000000) | low;
}

// Orders register accesses of this warpgroup with the wgmma that follow.
__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int PENDING = 0>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// Keeps the compiler from moving accesses of an accumulator register across this point.
__device__ __forceinline__ void pin_register(float& value) {
    asm volatile("" : "+f"(value)::"memory");
}
__device__ __forceinline__ void pin_register(uint32_t& value) {
    asm volatile("" : "+r"(value)::"memory");
}

// wgmma<N, Accumulator, A, B>: `from_shared` and `from_registers`. d holds N/2 floats per thread,
// or N/4 packed pairs of half. `accumulate` false overwrites d.
template <int N, class D, class A, class B>
struct wgmma;

// Operand lists: D0 names registers 0-7, D1 8-15 ...; R0.. bind them.
#define KITTENS_D0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define KITTENS_D1 "%8, %9, %10, %11, %12, %13, %14, %15"
#define KITTENS_D2 "%16, %17, %18, %19, %20, %21, %22, %23"
#define KITTENS_D3 "%24, %25, %26, %27, %28, %29, %30, %31"
#define KITTENS_D4 "%32, %33, %34, %35, %36, %37, %38, %39"
#define KITTENS_D5 "%40, %41, %42, %43, %44, %45, %46, %47"
#define KITTENS_D6 "%48, %49, %50, %51, %52, %53, %54, %55"
#define KITTENS_D7 "%56, %57, %58, %59, %60, %61, %62, %63"
#define KITTENS_D8 "%64, %65, %66, %67, %68, %69, %70, %71"
#define KITTENS_D9 "%72, %73, %74, %75, %76, %77, %78, %79"
#define KITTENS_D10 "%80, %81, %82, %83, %84, %85, %86, %87"
#define KITTENS_D11 "%88, %89, %90, %91, %92, %93, %94, %95"
#define KITTENS_D12 "%96, %97, %98, %99, %100, %101, %102, %103"
#define KITTENS_D13 "%104, %105, %106, %107, %108, %109, %110, %111"
#define KITTENS_D14 "%112, %113, %114, %115, %116, %117, %118, %119"
#define KITTENS_D15 "%120, %121, %122, %123, %124, %125, %126, %127"
#define KITTENS_DS1 KITTENS_D0
#define KITTENS_DS2 KITTENS_DS1 ", " KITTENS_D1
#define KITTENS_DS3 KITTENS_DS2 ", " KITTENS_D2
#define KITTENS_DS4 KITTENS_DS3 ", " KITTENS_D3
#define KITTENS_DS5 KITTENS_DS4 ", " KITTENS_D4
#define KITTENS_DS6 KITTENS_DS5 ", " KITTENS_D5
#define KITTENS_DS7 KITTENS_DS6 ", " KITTENS_D6
#define KITTENS_DS8 KITTENS_DS7 ", " KITTENS_D7
#define KITTENS_DS9 KITTENS_DS8 ", " KITTENS_D8
#define KITTENS_DS10 KITTENS_DS9 ", " KITTENS_D9
#define KITTENS_DS11 KITTENS_DS10 ", " KITTENS_D10
#define KITTENS_DS12 KITTENS_DS11 ", " KITTENS_D11
#define KITTENS_DS13 KITTENS_DS12 ", " KITTENS_D12
#define KITTENS_DS14 KITTENS_DS13 ", " KITTENS_D13
#define KITTENS_DS15 KITTENS_DS14 ", " KITTENS_D14
#define KITTENS_DS16 KITTENS_DS15 ", " KITTENS_D15
#define KITTENS_BIND_f(i)                                                           \
    "+f"(d[i + 0]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), \
        "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define KITTENS_Bf1 KITTENS_BIND_f(0)
#define KITTENS_Bf2 KITTENS_Bf1, KITTENS_BIND_f(8)
#define KITTENS_Bf3 KITTENS_Bf2, KITTENS_BIND_f(16)
#define KITTENS_Bf4 KITTENS_Bf3, KITTENS_BIND_f(24)
#define KITTENS_Bf5 KITTENS_Bf4, KITTENS_BIND_f(32)
#define KITTENS_Bf6 KITTENS_Bf5, KITTENS_BIND_f(40)
#define KITTENS_Bf7 KITTENS_Bf6, KITTENS_BIND_f(48)
#define KITTENS_Bf8 KITTENS_Bf7, KITTENS_BIND_f(56)
#define KITTENS_Bf9 KITTENS_Bf8, KITTENS_BIND_f(64)
#define KITTENS_Bf10 KITTENS_Bf9, KITTENS_BIND_f(72)
#define KITTENS_Bf11 KITTENS_Bf10, KITTENS_BIND_f(80)
#define KITTENS_Bf12 KITTENS_Bf11, KITTENS_BIND_f(88)
#define KITTENS_Bf13 KITTENS_Bf12, KITTENS_BIND_f(96)
#define KITTENS_Bf14 KITTENS_Bf13, KITTENS_BIND_f(104)
#define KITTENS_Bf15 KITTENS_Bf14, KITTENS_BIND_f(112)
#define KITTENS_Bf16 KITTENS_Bf15, KITTENS_BIND_f(120)
#define KITTENS_BIND_r(i)                                                           \
    "+r"(d[i + 0]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3]), "+r"(d[i + 4]), \
        "+r"(d[i + 5]), "+r"(d[i + 6]), "+r"(d[i + 7])
#define KITTENS_Br1 KITTENS_BIND_r(0)
#define KITTENS_Br2 KITTENS_Br1, KITTENS_BIND_r(8)
#define KITTENS_Br3 KITTENS_Br2, KITTENS_BIND_r(16)
#define KITTENS_Br4 KITTENS_Br3, KITTENS_BIND_r(24)
#define KITTENS_Br5 KITTENS_Br4, KITTENS_BIND_r(32)
#define KITTENS_Br6 KITTENS_Br5, KITTENS_BIND_r(40)
#define KITTENS_Br7 KITTENS_Br6, KITTENS_BIND_r(48)
#define KITTENS_Br8 KITTENS_Br7, KITTENS_BIND_r(56)
#define KITTENS_Br9 KITTENS_Br8, KITTENS_BIND_r(64)
#define KITTENS_Br10 KITTENS_Br9, KITTENS_BIND_r(72)
#define KITTENS_Br11 KITTENS_Br10, KITTENS_BIND_r(80)
#define KITTENS_Br12 KITTENS_Br11, KITTENS_BIND_r(88)
#define KITTENS_Br13 KITTENS_Br12, KITTENS_BIND_r(96)
#define KITTENS_Br14 KITTENS_Br13, KITTENS_BIND_r(104)
#define KITTENS_Br15 KITTENS_Br14, KITTENS_BIND_r(112)
#define KITTENS_Br16 KITTENS_Br15, KITTENS_BIND_r(120)

// I0 to I6 are the numbers of the operands that follow the accumulators.
#define KITTENS_WGMMA_16BIT(N, TYPE, D_TYPE, NAMES, DS, BIND, REGISTER, REGISTERS, I0, I1, I2, I3, \
                            I4, I5, I6)                                                            \
    template <>                                                                                    \
    struct wgmma<N, D_TYPE, TYPE, TYPE> {                                                          \
        template <int TRANSPOSE_A, int TRANSPOSE_B>                                                \
        static __device__ __forceinline__ void from_shared(REGISTER (&d)[REGISTERS], uint64_t a,   \
                                                           uint64_t b, int accumulate) {           \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #I2                                  \
                         ", 0;\n"                                                                  \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16." NAMES " {" DS "}, %" #I0    \
                         ", %" #I1 ", p, 1, 1, %" #I3 ", %" #I4 ";\n}\n"                           \
                         : KITTENS_B##BIND                                                         \
                         : "l"(a), "l"(b), "r"(accumulate), "n"(TRANSPOSE_A), "n"(TRANSPOSE_B));   \
        }                                                                                          \
        template <int TRANSPOSE_B>                                                                 \
        static __device__ __forceinline__ void from_registers(REGISTER (&d)[REGISTERS],            \
                                                              const uint32_t (&a)[4], uint64_t b,  \
                                                              int accumulate) {                    \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #I5                                  \
                         ", 0;\n"                                                                  \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16." NAMES " {" DS "}, {%" #I0   \
                         ", %" #I1 ", %" #I2 ", %" #I3 "}, %" #I4 ", p, 1, 1, %" #I6 ";\n}\n"      \
                         : KITTENS_B##BIND                                                         \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate),    \
                           "n"(TRANSPOSE_B));                                                      \
        }                                                                                          \
    }
// 8-bit operands are K-major: the instruction has no transpose.
#define KITTENS_WGMMA_8BIT(N, A_TYPE, B_TYPE, D_TYPE, NAMES, DS, BIND, REGISTER, REGISTERS, I0,   \
                           I1, I2, I3, I4, I5)                                                    \
    template <>                                                                                   \
    struct wgmma<N, D_TYPE, A_TYPE, B_TYPE> {                                                     \
        template <int TRANSPOSE_A, int TRANSPOSE_B>                                               \
        static __device__ __forceinline__ void from_shared(REGISTER (&d)[REGISTERS], uint64_t a,  \
                                                           uint64_t b, int accumulate) {          \
            static_assert(!TRANSPOSE_A && !TRANSPOSE_B, "8-bit wgmma operands must be K-major");  \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #I2                                 \
                         ", 0;\n"                                                                 \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k32." NAMES " {" DS "}, %" #I0   \
                         ", %" #I1 ", p, 1, 1;\n}\n"                                              \
                         : KITTENS_B##BIND                                                        \
                         : "l"(a), "l"(b), "r"(accumulate));                                      \
        }                                                                                         \
        template <int TRANSPOSE_B>                                                                \
        static __device__ __forceinline__ void from_registers(REGISTER (&d)[REGISTERS],           \
                                                              const uint32_t (&a)[4], uint64_t b, \
                                                              int accumulate) {                   \
            static_assert(!TRANSPOSE_B, "8-bit wgmma operands must be K-major");                  \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #I5                                 \
                         ", 0;\n"                                                                 \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k32." NAMES " {" DS "}, {%" #I0  \
                         ", %" #I1 ", %" #I2 ", %" #I3 "}, %" #I4 ", p, 1, 1;\n}\n"               \
                         : KITTENS_B##BIND                                                        \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));  \
        }                                                                                         \
    }

// F: 8 floats per piece and 2 pieces per 16 columns of N. H: 4 registers of packed halves per 8
// columns.
#define KITTENS_WGMMA_F32(N, P, REGISTERS, I0, I1, I2, I3, I4, I5, I6)                          \
    KITTENS_WGMMA_16BIT(N, __nv_bfloat16, float, "f32.bf16.bf16", KITTENS_DS##P, f##P, float,   \
                        REGISTERS, I0, I1, I2, I3, I4, I5, I6);                                 \
    KITTENS_WGMMA_16BIT(N, __half, float, "f32.f16.f16", KITTENS_DS##P, f##P, float, REGISTERS, \
                        I0, I1, I2, I3, I4, I5, I6);                                            \
    KITTENS_WGMMA_8BIT(N, __nv_fp8_e4m3, __nv_fp8_e4m3, float, "f32.e4m3.e4m3", KITTENS_DS##P,  \
                       f##P, float, REGISTERS, I0, I1, I2, I3, I4, I5);                         \
    KITTENS_WGMMA_8BIT(N, __nv_fp8_e4m3, __nv_fp8_e5m2, float, "f32.e4m3.e5m2", KITTENS_DS##P,  \
                       f##P, float, REGISTERS, I0, I1, I2, I3, I4, I5);                         \
    KITTENS_WGMMA_8BIT(N, __nv_fp8_e5m2, __nv_fp8_e4m3, float, "f32.e5m2.e4m3", KITTENS_DS##P,  \
                       f##P, float, REGISTERS, I0, I1, I2, I3, I4, I5);                         \
    KITTENS_WGMMA_8BIT(N, __nv_fp8_e5m2, __nv_fp8_e5m2, float, "f32.e5m2.e5m2", KITTENS_DS##P,  \
                       f##P, float, REGISTERS, I0, I1, I2, I3, I4, I5)
#define KITTENS_WGMMA_F16(N, STRING, BIND, REGISTERS, I0, I1, I2, I3, I4, I5, I6)                \
    KITTENS_WGMMA_16BIT(N, __half, __half, "f16.f16.f16", STRING, BIND, uint32_t, REGISTERS, I0, \
                        I1, I2, I3, I4, I5, I6);                                                 \
    KITTENS_WGMMA_8BIT(N, __nv_fp8_e4m3, __nv_fp8_e4m3, __half, "f16.e4m3.e4m3", STRING, BIND,   \
                       uint32_t, REGISTERS, I0, I1, I2, I3, I4, I5)

KITTENS_WGMMA_F32(16, 1, 8, 8, 9, 10, 11, 12, 13, 14);
KITTENS_WGMMA_F32(32, 2, 16, 16, 17, 18, 19, 20, 21, 22);
KITTENS_WGMMA_F32(48, 3, 24, 24, 25, 26, 27, 28, 29, 30);
KITTENS_WGMMA_F32(64, 4, 32, 32, 33, 34, 35, 36, 37, 38);
KITTENS_WGMMA_F32(80, 5, 40, 40, 41, 42, 43, 44, 45, 46);
KITTENS_WGMMA_F32(96, 6, 48, 48, 49, 50, 51, 52, 53, 54);
KITTENS_WGMMA_F32(112, 7, 56, 56, 57, 58, 59, 60, 61, 62);
KITTENS_WGMMA_F32(128, 8, 64, 64, 65, 66, 67, 68, 69, 70);
KITTENS_WGMMA_F32(144, 9, 72, 72, 73, 74, 75, 76, 77, 78);
KITTENS_WGMMA_F32(160, 10, 80, 80, 81, 82, 83, 84, 85, 86);
KITTENS_WGMMA_F32(176, 11, 88, 88, 89, 90, 91, 92, 93, 94);
KITTENS_WGMMA_F32(192, 12, 96, 96, 97, 98, 99, 100, 101, 102);
KITTENS_WGMMA_F32(208, 13, 104, 104, 105, 106, 107, 108, 109, 110);
KITTENS_WGMMA_F32(224, 14, 112, 112, 113, 114, 115, 116, 117, 118);
KITTENS_WGMMA_F32(240, 15, 120, 120, 121, 122, 123, 124, 125, 126);
KITTENS_WGMMA_F32(256, 16, 128, 128, 129, 130, 131, 132, 133, 134);

// An odd number of eights: 8 pieces and a half.
#define KITTENS_Bf136 KITTENS_Bf8, "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67])
KITTENS_WGMMA_8BIT(136, __nv_fp8_e4m3, __nv_fp8_e4m3, float, "f32.e4m3.e4m3",
                   KITTENS_DS8 ", %64, %65, %66, %67", f136, float, 68, 68, 69, 70, 71, 72, 73);

// With fp16 accumulators N / 4 registers: pieces of 8 cover 32 columns, a half piece the odd 16.
KITTENS_WGMMA_F16(32, KITTENS_DS1, r1, 8, 8, 9, 10, 11, 12, 13, 14);
KITTENS_WGMMA_F16(64, KITTENS_DS2, r2, 16, 16, 17, 18, 19, 20, 21, 22);
KITTENS_WGMMA_F16(96, KITTENS_DS3, r3, 24, 24, 25, 26, 27, 28, 29, 30);
KITTENS_WGMMA_F16(128, KITTENS_DS4, r4, 32, 32, 33, 34, 35, 36, 37, 38);
KITTENS_WGMMA_F16(160, KITTENS_DS5, r5, 40, 40, 41, 42, 43, 44, 45, 46);
KITTENS_WGMMA_F16(192, KITTENS_DS6, r6, 48, 48, 49, 50, 51, 52, 53, 54);
KITTENS_WGMMA_F16(224, KITTENS_DS7, r7, 56, 56, 57, 58, 59, 60, 61, 62);
KITTENS_WGMMA_F16(256, KITTENS_DS8, r8, 64, 64, 65, 66, 67, 68, 69, 70);
#define KITTENS_HALF_BIND(i) "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3])
#define KITTENS_Bh16 KITTENS_HALF_BIND(0)
KITTENS_WGMMA_F16(16, "%0, %1, %2, %3", h16, 4, 4, 5, 6, 7, 8, 9, 10);
#define KITTENS_Bh48 KITTENS_Br1, KITTENS_HALF_BIND(8)
KITTENS_WGMMA_F16(48, KITTENS_DS1 ", %8, %9, %10, %11", h48, 12, 12, 13, 14, 15, 16, 17, 18);
#define KITTENS_Bh80 KITTENS_Br2, KITTENS_HALF_BIND(16)
KITTENS_WGMMA_F16(80, KITTENS_DS2 ", %16, %17, %18, %19", h80, 20, 20, 21, 22, 23, 24, 25, 26);
#define KITTENS_Bh112 KITTENS_Br3, KITTENS_HALF_BIND(24)
KITTENS_WGMMA_F16(112, KITTENS_DS3 ", %24, %25, %26, %27", h112, 28, 28, 29, 30, 31, 32, 33, 34);
#define KITTENS_Bh144 KITTENS_Br4, KITTENS_HALF_BIND(32)
KITTENS_WGMMA_F16(144, KITTENS_DS4 ", %32, %33, %34, %35", h144, 36, 36, 37, 38, 39, 40, 41, 42);
#define KITTENS_Bh176 KITTENS_Br5, KITTENS_HALF_BIND(40)
KITTENS_WGMMA_F16(176, KITTENS_DS5 ", %40, %41, %42, %43", h176, 44, 44, 45, 46, 47, 48, 49, 50);
#define KITTENS_Bh208 KITTENS_Br6, KITTENS_HALF_BIND(48)
KITTENS_WGMMA_F16(208, KITTENS_DS6 ", %48, %49, %50, %51", h208, 52, 52, 53, 54, 55, 56, 57, 58);
#define KITTENS_Bh240 KITTENS_Br7, KITTENS_HALF_BIND(56)
KITTENS_WGMMA_F16(240, KITTENS_DS7 ", %56, %57, %58, %59", h240, 60, 60, 61, 62, 63, 64, 65, 66);

#undef KITTENS_WGMMA_F32
#undef KITTENS_WGMMA_F16
#undef KITTENS_WGMMA_16BIT
#undef KITTENS_WGMMA_8BIT
#undef KITTENS_HALF_BIND

}  // namespace arch
}  // namespace kittens::inline on_gpu
