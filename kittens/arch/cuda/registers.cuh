// Register reallocation between warpgroups (PTX ISA, "setmaxnreg"): counts are multiples of 8 in
// 24..256.
#pragma once

namespace kittens::inline on_gpu {
namespace arch {

template <int REGISTERS>
__device__ __forceinline__ void increase_registers() {
    static_assert(REGISTERS >= 24 && REGISTERS <= 256 && REGISTERS % 8 == 0,
                  "setmaxnreg takes a multiple of 8 from 24 to 256");
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ __forceinline__ void decrease_registers() {
    static_assert(REGISTERS >= 24 && REGISTERS <= 256 && REGISTERS % 8 == 0,
                  "setmaxnreg takes a multiple of 8 from 24 to 256");
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

}  // namespace arch
}  // namespace kittens::inline on_gpu
