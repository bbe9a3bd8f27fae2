// Preconditions of the library's functions.
#pragma once

#include "calls.h"

namespace kittens::inline on_cpu {
namespace arch {

inline void require(bool holds, const char* sentence) {
    if (!holds) emulated::fail(sentence);
}

}  // namespace arch
}  // namespace kittens::inline on_cpu
