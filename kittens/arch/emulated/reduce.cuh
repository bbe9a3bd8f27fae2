// Atomic additions of floats in memory that return nothing.
#pragma once

#include <cstdint>

#include "calls.h"

namespace kittens::inline on_cpu {
namespace arch {

// To the four floats of 16 bytes that hold this one: zero to the others, which leaves them.
inline void reduce_add_global(float* pointer, float value) {
    const auto at = reinterpret_cast<std::uintptr_t>(pointer) % 16 / sizeof(float);
    float values[4] = {};
    values[at] = value;
    emulated::add_to_global(pointer - at, values);
}

}  // namespace arch
}  // namespace kittens::inline on_cpu
