// From a value that is known at run time to the kernel that is compiled for it: launchers are
// templates over the members of a list, the values of at(0) to at(count - 1). Host C++ only.
#pragma once

#include <cstddef>
#include <utility>

namespace thunderkittens::gemm {

template <auto value, typename Value, typename Launch>
bool launch_if(const Value& wanted, Launch& launch) {
    return wanted == value && launch.template operator()<value>();
}

// Calls launch.operator()<value>() for the value in the list that equals `wanted`. False where
// there is none, or where that says so.
template <auto at, std::size_t count, typename Value, typename Launch>
bool launch_listed(const Value& wanted, Launch launch) {
    return [&]<std::size_t... i>(std::index_sequence<i...>) {
        return (launch_if<at(i)>(wanted, launch) || ...);
    }(std::make_index_sequence<count>());
}

// The value in the list that has a name, as instances.txt gives it: what tells it from the others.
// One that is not compiled is an error of the compiler.
template <auto at, std::size_t count, class Name>
consteval auto named(const Name& name) {
    for (std::size_t i = 0; i < count; ++i) {
        if (name.is_of(at(i))) return at(i);
    }
    throw "no such configuration is listed";
}

}  // namespace thunderkittens::gemm
