// What an op's learned cost knows of a problem and a choice, for the tool that fits it
// (tools/fit_gemm_cost.py). Host C++ only.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "csrc/common/registry.h"

namespace thunderkittens {

// Of a problem's fields and a choice's.
using CostInputs =
    std::function<std::vector<double>(const Fields&, const Fields&, const DeviceProperties&)>;
inline std::map<std::string, CostInputs>& cost_inputs_of_ops() {
    static std::map<std::string, CostInputs> functions;
    return functions;
}

template <typename Problem, typename Choice>
bool register_cost_inputs(const std::string& op,
                          std::vector<double> (*inputs)(const Problem&, const Choice&,
                                                        const DeviceProperties&)) {
    cost_inputs_of_ops()[op] = [=](const Fields& problem, const Fields& fields,
                                   const DeviceProperties& device) {
        Choice choice;
        TK_CHECK(detail::force_fields(choice, fields), op,
                 ": a forced field is none of the choice's");
        return inputs(detail::struct_from<Problem>(op, problem), choice, device);
    };
    return true;
}

}  // namespace thunderkittens
