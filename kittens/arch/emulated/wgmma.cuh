// wgmma: asynchronous products of a warpgroup, m64nNk16 (16-bit) and m64nNk32 (8-bit), accumulators
// in registers, A from shared memory or registers, B from shared memory.
#pragma once

#include "calls.h"

namespace kittens::inline on_cpu {
namespace arch {

inline uint64_t wgmma_descriptor(uint32_t shared_address, int leading_bytes, int stride_bytes,
                                 int swizzle_bytes) {
    return emulated::describe_operand(shared_address, leading_bytes, stride_bytes, swizzle_bytes);
}
inline uint64_t wgmma_advance(uint64_t descriptor, int bytes) {
    return descriptor + static_cast<uint64_t>(bytes >> 4);
}
inline void wgmma_fence() { emulated::fence_products(); }
inline void wgmma_commit() { emulated::commit_products(); }
template <int PENDING = 0>
inline void wgmma_wait() {
    emulated::wait_for_products(PENDING);
}
inline void pin_register(float& value) { asm volatile("" : "+m"(value)); }
inline void pin_register(uint32_t& value) { asm volatile("" : "+m"(value)); }

template <int N, class D, class A, class B>
struct wgmma {
    static constexpr bool is_half = std::is_same_v<D, __half>;
    static constexpr bool is_e4m3 =
        std::is_same_v<A, __nv_fp8_e4m3> && std::is_same_v<B, __nv_fp8_e4m3>;
    static_assert(N >= 16 && N <= 256 && (N % 16 == 0 || (N == 136 && is_e4m3 && !is_half)));
    static constexpr int REGISTERS = is_half ? N / 4 : N / 2;
    using Register = std::conditional_t<is_half, uint32_t, float>;

    template <int TRANSPOSE_A, int TRANSPOSE_B>
    static void from_shared(Register (&d)[REGISTERS], uint64_t a, uint64_t b, int accumulate) {
        static_assert(sizeof(A) == 2 || (!TRANSPOSE_A && !TRANSPOSE_B),
                      "8-bit wgmma operands must be K-major");
        emulated::issue_product(shape(false, TRANSPOSE_A, TRANSPOSE_B),
                                reinterpret_cast<uint32_t*>(d), nullptr, a, b, accumulate != 0);
    }
    template <int TRANSPOSE_B>
    static void from_registers(Register (&d)[REGISTERS], const uint32_t (&a)[4], uint64_t b,
                               int accumulate) {
        static_assert(sizeof(A) == 2 || !TRANSPOSE_B, "8-bit wgmma operands must be K-major");
        emulated::issue_product(shape(true, false, TRANSPOSE_B), reinterpret_cast<uint32_t*>(d), a,
                                0, b, accumulate != 0);
    }

  private:
    static constexpr emulated::ProductShape shape(bool in_registers, bool transpose_a,
                                                  bool transpose_b) {
        return {N,
                emulated::element_of<A>(),
                emulated::element_of<B>(),
                is_half,
                in_registers,
                transpose_a,
                transpose_b};
    }
};

}  // namespace arch
}  // namespace kittens::inline on_cpu
