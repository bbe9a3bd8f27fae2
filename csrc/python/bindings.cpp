// The module _C, without torch: the registry of kernels and the functions that choose among them,
// and the tile library's layouts as NumPy arrays.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "csrc/common/cost_inputs.h"
#include "csrc/common/device.h"
#include "csrc/common/registry.h"
#include "csrc/python/layouts.h"

namespace py = pybind11;
namespace tk = thunderkittens;

namespace {

py::dict kernel_record(const tk::OpEntry& entry, const tk::KernelInfo& kernel) {
    py::dict record;
    record["op"] = entry.op;
    record["family"] = entry.family;
    record["name"] = kernel.name;
    record["config"] = kernel.config;
    record["symbol"] = kernel.symbol;
    record["arch"] = kernel.arch;
    record["threads"] = kernel.threads;
    record["shared_bytes"] = kernel.shared_bytes;
    record["fields"] = kernel.fields;
    return record;
}

py::list kernels() {
    py::list records;
    for (const auto& entry : tk::registry()) {
        for (const auto& kernel : entry.kernels()) records.append(kernel_record(entry, kernel));
    }
    return records;
}

// Of all ops, or of one, which may have no portable kernel.
std::string no_code_for(const tk::DeviceProperties& device, const std::string& op) {
    if (op.empty()) return tk::no_code_for(device);
    for (const auto& kernel : tk::find_op(op).kernels()) {
        if (kernel.arch == tk::PORTABLE) return tk::no_code_for(device);
    }
    return tk::no_native_code_for(device);
}

std::vector<std::string> ops() {
    std::vector<std::string> names;
    for (const auto& entry : tk::registry()) names.push_back(entry.op);
    return names;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
    m.doc() = "Registry of thunderkittens' kernels, their choice, and the tile library's layouts.";

    py::class_<tk::DeviceProperties>(m, "DeviceProperties")
        .def(py::init([](int sm_count, int shared_bytes_per_block, int l2_bytes, int major,
                         int minor, bool portable_only) {
                 return tk::DeviceProperties{sm_count, shared_bytes_per_block, l2_bytes, major,
                                             minor,    portable_only};
             }),
             py::kw_only(), py::arg("sm_count"), py::arg("shared_bytes_per_block"),
             py::arg("l2_bytes"), py::arg("major"), py::arg("minor"),
             py::arg("portable_only") = false)
        .def_readonly("sm_count", &tk::DeviceProperties::sm_count)
        .def_readonly("shared_bytes_per_block", &tk::DeviceProperties::shared_bytes_per_block)
        .def_readonly("l2_bytes", &tk::DeviceProperties::l2_bytes)
        .def_readonly("major", &tk::DeviceProperties::major)
        .def_readonly("minor", &tk::DeviceProperties::minor)
        .def_readonly("portable_only", &tk::DeviceProperties::portable_only)
        .def("restricted", &tk::restricted, "The device as the environment restricts it.");

    m.def("ops", &ops, "Names of the ops that have kernels in this build.");
    m.def("kernels", &kernels, "One dictionary per kernel of this build.");
    m.def("architectures", [] { return std::string(tk::built_architectures()); });
    m.def("no_code_for", &no_code_for, py::arg("device"), py::arg("op") = "",
          "Why a device runs no kernel of an op, or of this build; empty if it does.");
    m.def(
        "holds_code_for",
        [](const tk::DeviceProperties& device, bool native, const std::string& architectures) {
            return tk::holds_code_for(device, native, architectures);
        },
        py::arg("device"), py::arg("native"), py::arg("architectures"),
        "Whether a build for some architectures holds native, or portable, code for a device.");
    m.def(
        "holds_machine_code_for",
        [](const tk::DeviceProperties& device, const std::string& architectures) {
            bool found = tk::holds_code_for(device, true, architectures);
            tk::for_each_architecture(architectures, [&](tk::Architecture a) {
                a.later = false;
                found |= a.machine_code && a.runs_on(device);
            });
            return found;
        },
        py::arg("device"), py::arg("architectures") = std::string(tk::built_architectures()),
        "Whether kernels of a build for some architectures, else of this one, run as they are, or "
        "are compiled by the driver when they are first used.");
    m.def("runs_native", &tk::runs_native, py::arg("device"),
          "Whether it runs kernels for sm_90a, or those that are portable.");
    m.def(
        "problem_fields", [](const std::string& op) { return tk::find_op(op).problem_fields; },
        py::arg("op"));
    m.def(
        "unsupported",
        [](const std::string& op, const tk::Fields& problem, const tk::DeviceProperties& device) {
            return tk::find_op(op).unsupported(problem, device);
        },
        py::arg("op"), py::arg("problem"), py::arg("device"));
    m.def(
        "choose",
        [](const std::string& op, const tk::Fields& problem, const tk::DeviceProperties& device) {
            return tk::find_op(op).choose(problem, device);
        },
        py::arg("op"), py::arg("problem"), py::arg("device"));
    m.def(
        "candidates",
        [](const std::string& op, const tk::Fields& problem, const tk::DeviceProperties& device) {
            const auto found = tk::candidates_of_ops().find(tk::find_op(op).op);
            const bool known = found != tk::candidates_of_ops().end();
            return known ? found->second(problem, device) : std::vector<tk::Fields>{};
        },
        py::arg("op"), py::arg("problem"), py::arg("device"),
        "The choice and what else could run; empty where an op does not say.");
    m.def(
        "cost_inputs",
        [](const std::string& op, const tk::Fields& problem, const tk::Fields& choice,
           const tk::DeviceProperties& device) {
            return tk::cost_inputs_of_ops().at(op)(problem, choice, device);
        },
        py::arg("op"), py::arg("problem"), py::arg("choice"), py::arg("device"),
        "What an op's learned cost knows of a problem and a choice.");
    bind_layouts(m);
}
