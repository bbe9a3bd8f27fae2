// How the work of the attention backward is split in the deterministic mode, where dQ is summed in
// a fixed order. Host C++ only.
#pragma once

#include "csrc/attention/backward/backward.h"

namespace thunderkittens::attention {

// The head splits of a group then, at least `head_splits`; deterministic_section_heads of a choice
// counts with them.
int deterministic_head_splits(const Problem& problem, const BackwardConfig& config, int head_splits,
                              const DeviceProperties& device);

}  // namespace thunderkittens::attention
