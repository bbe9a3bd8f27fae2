// The product of 136 columns, an odd number of eights, which the table of wgmma.cuh has not: of
// e4m3 operands. Not in the umbrella arch.cuh.
#pragma once

#include "arch.cuh"

namespace kittens::inline KITTENS_BACKEND {
namespace arch {

template <>
struct wgmma<136, float, __nv_fp8_e4m3, __nv_fp8_e4m3> {
    template <int TRANSPOSE_A, int TRANSPOSE_B>
    static __device__ __forceinline__ void from_shared(float (&d)[68], uint64_t a, uint64_t b,
                                                       int accumulate) {
        static_assert(!TRANSPOSE_A && !TRANSPOSE_B, "8-bit wgmma operands must be K-major");
#if defined(__CUDACC__)
#define KITTENS_BIND(i)                                                             \
    "+f"(d[i + 0]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), \
        "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
        asm volatile(
            "{\n.reg .pred p;\nsetp.ne.b32 p, %70, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n136k32.f32.e4m3.e4m3 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
            "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "
            "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "
            "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, "
            "%66, %67}, %68, %69, p, 1, 1;\n}\n"
            : KITTENS_BIND(0), KITTENS_BIND(8), KITTENS_BIND(16), KITTENS_BIND(24),
              KITTENS_BIND(32), KITTENS_BIND(40), KITTENS_BIND(48), KITTENS_BIND(56), "+f"(d[64]),
              "+f"(d[65]), "+f"(d[66]), "+f"(d[67])
            : "l"(a), "l"(b), "r"(accumulate));
#undef KITTENS_BIND
#else
        constexpr auto element = emulated::element_of<__nv_fp8_e4m3>();
        emulated::issue_product({136, element, element, false, false, false, false},
                                reinterpret_cast<uint32_t*>(d), nullptr, a, b, accumulate != 0);
#endif
    }
};

}  // namespace arch
}  // namespace kittens::inline KITTENS_BACKEND
