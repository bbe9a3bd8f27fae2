// The choices of a thread's latest problems. Host C++ only.
#pragma once

#include <cstdint>

#include "csrc/common/device.h"

namespace thunderkittens::gemm {

// A model calls the same products again and again, and a comparison of all kernels takes longer
// than a launch: each thread keeps the choices of its latest problems. `hash` is any mixture of the
// problem's sizes, `is_same` says whether two problems are one, and `choose` makes a choice. Each
// pair of types has a table of its own.
template <class Choice, class Problem, class IsSame, class Choose>
Choice latest_choice(const Problem& p, const DeviceProperties& device, int64_t hash,
                     IsSame&& is_same, Choose&& choose) {
    struct Known {
        Problem problem{.m = -1};
        DeviceProperties device;
        Choice choice;
    };
    constexpr uint64_t entries = 64, mixer = 0x9e3779b97f4a7c15;
    thread_local Known known[entries];
    Known& entry = known[static_cast<uint64_t>(hash) * mixer >> 58];
    if (!(is_same(entry.problem, p) && entry.device == device))
        entry = {p, device, choose(p, device)};
    return entry.choice;
}

}  // namespace thunderkittens::gemm
