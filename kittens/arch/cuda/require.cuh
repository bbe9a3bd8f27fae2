// Preconditions that only the emulator checks: here they cost nothing.
#pragma once

namespace kittens::inline on_gpu {
namespace arch {

__device__ __forceinline__ constexpr void require(bool, const char*) {}

}  // namespace arch
}  // namespace kittens::inline on_gpu
