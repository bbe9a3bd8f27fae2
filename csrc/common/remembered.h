// Pure functions of a problem and a device, such as choose(), which most calls of an op ask of the
// problem of the call before. Host C++ only.
#pragma once

#include <optional>

#include "csrc/common/device.h"

namespace thunderkittens {

// `function(problem, device)`, or what it has given to this thread for the same before, if that was
// the last. It is called for each place in the source apart: `function` is a lambda.
template <class Problem, class Function>
const auto& remembered(const Problem& problem, const DeviceProperties& device, Function function) {
    struct Last {
        Problem problem;
        DeviceProperties device;
        decltype(function(problem, device)) result;
    };
    static thread_local std::optional<Last> last;
    if (!last || !(last->problem == problem && last->device == device)) {
        last = Last{problem, device, function(problem, device)};
    }
    return last->result;
}

}  // namespace thunderkittens
