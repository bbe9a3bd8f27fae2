// From a value that is known at run time to the kernel that is compiled for it: launchers are
// templates over the members of a list. Host C++ only.
#pragma once

#include <cstddef>
#include <utility>

namespace thunderkittens::gemm {

template <auto value, typename Value, typename Launch>
bool launch_if(const Value& wanted, Launch& launch) {
    return wanted == value && launch.template operator()<value>();
}

// Calls launch.operator()<value>() for the value that equals `wanted` in the list of at(0) to
// at(count - 1). False where there is none, or where that says so.
template <auto at, std::size_t count, typename Value, typename Launch>
bool launch_listed(const Value& wanted, Launch launch) {
    return [&]<std::size_t... i>(std::index_sequence<i...>) {
        return (launch_if<at(i)>(wanted, launch) || ...);
    }(std::make_index_sequence<count>());
}

}  // namespace thunderkittens::gemm
