// Programmatic dependent launch. Launches run one after the other; what is checked is that a kernel
// which may start early does not touch global memory before the wait.
#pragma once

#include "calls.h"

namespace kittens::inline on_cpu {
namespace arch {

inline void wait_for_dependencies() { emulated::wait_for_dependencies(); }
inline void launch_dependents() {}

inline void skip_dependencies() { wait_for_dependencies(); }

}  // namespace arch
}  // namespace kittens::inline on_cpu
