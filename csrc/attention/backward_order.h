// How the work of the attention backward is split where dQ is summed in a fixed order. Host C++
// only.
#pragma once

#include "csrc/attention/backward.h"

namespace thunderkittens::attention {

// The parts of a group then, at least `parts`. ordered_section_heads of a choice counts with them.
int ordered_parts(const Problem& problem, const BackwardConfig& config, int parts,
                  const DeviceProperties& device);

}  // namespace thunderkittens::attention
