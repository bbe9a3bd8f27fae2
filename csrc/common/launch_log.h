// What the ops have launched, for the log of calls (THUNDERKITTENS_LOG=1, python/thunderkittens/
// _log.py). The first call of the exported function thunderkittens_launches of _cuda.so begins it,
// for the whole process; without that, a launch pays one relaxed load.
#pragma once

#include <atomic>

#include "csrc/common/registry.h"

namespace thunderkittens {

extern std::atomic<bool> launches_noted;

// Adds a launch to those of this thread. `kernel` is of the op, unless the fields name one.
void note_launch(const char* kernel, const Fields& fields);

template <class Choice>
void note_choice(const char* op, const Choice& choice) {
    if (launches_noted.load(std::memory_order_relaxed)) [[unlikely]]
        note_launch(op, detail::named_fields_of(choice));
}
inline void note_kernel(const char* kernel) {
    if (launches_noted.load(std::memory_order_relaxed)) [[unlikely]]
        note_launch(kernel, {});
}

}  // namespace thunderkittens
