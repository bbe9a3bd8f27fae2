// Prefetches of global memory: nothing that a kernel could see, whenever they come.
#pragma once

namespace kittens::inline on_cpu {
namespace arch {

inline void prefetch_global(const void*) {}

}  // namespace arch
}  // namespace kittens::inline on_cpu
