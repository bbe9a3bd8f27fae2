// Register reallocation between warpgroups (PTX ISA, "setmaxnreg"): counts are multiples of 8 in
// 24..256. And what the compiler is told of a single register.
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

// The register's value is not wanted any more. A tile that a loop's body declares, and a product
// overwrites, would otherwise be kept from one round to the next: as far as the compiler knows, the
// product reads it.
__device__ __forceinline__ void discard_register(float& value) { asm volatile("" : "=f"(value)); }

}  // namespace arch
}  // namespace kittens::inline on_gpu
