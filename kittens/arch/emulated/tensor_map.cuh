// Tensor maps of the emulated TMA: in place of the driver's function, one of the emulator's own,
// which follows the same rules and needs no context.
#pragma once

#include "calls.h"

namespace kittens::inline on_cpu {
namespace arch {

inline auto encode_tiled() { return &emulated::encode_tensor_map; }
inline void make_context_current() {}

}  // namespace arch
}  // namespace kittens::inline on_cpu
