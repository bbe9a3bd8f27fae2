// Register reallocation between warpgroups: counts are multiples of 8 in 24..256. And what the
// compiler is told of a single register.
#pragma once

#include "calls.h"

namespace kittens::inline on_cpu {
namespace arch {

template <int REGISTERS>
inline void increase_registers() {
    static_assert(REGISTERS >= 24 && REGISTERS <= 256 && REGISTERS % 8 == 0,
                  "setmaxnreg takes a multiple of 8 from 24 to 256");
    emulated::reallocate_registers(REGISTERS, true);
}
template <int REGISTERS>
inline void decrease_registers() {
    static_assert(REGISTERS >= 24 && REGISTERS <= 256 && REGISTERS % 8 == 0,
                  "setmaxnreg takes a multiple of 8 from 24 to 256");
    emulated::reallocate_registers(REGISTERS, false);
}

inline void discard_register(float& value) { value = 0.0f; }

}  // namespace arch
}  // namespace kittens::inline on_cpu
