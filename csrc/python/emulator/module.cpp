// The module _emulator, without torch: runs kernels on NumPy arrays in CPU memory.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>

#include "csrc/common/emulated.h"
#include "kittens/arch/emulated/machine/options.h"

namespace py = pybind11;
namespace tk = thunderkittens;
namespace emu = kittens::emulated;

namespace {

constexpr tk::DeviceProperties EMULATED_DEVICE = {132, 232448, 50 << 20, 9, 0};

// NumPy has no bf16 and no fp8: such arrays hold their bits as uint16; e4m3 as uint8, e5m2 as int8.
tk::emulated::Array array_from(const std::string& name, const py::array& array) {
    tk::emulated::Array result;
    const std::string kind = py::str(array.dtype().attr("name"));
    if (kind == "uint16" || kind == "int16" || kind == "bfloat16")
        result.dtype = tk::DType::bf16;
    else if (kind == "float16")
        result.dtype = tk::DType::fp16;
    else if (kind == "float32")
        result.dtype = tk::DType::fp32;
    else if (kind == "int32")
        result.dtype = tk::DType::int32;
    else if (kind == "uint8")
        result.dtype = tk::DType::e4m3;
    else if (kind == "int8")
        result.dtype = tk::DType::e5m2;
    else
        throw py::type_error(name + " is " + kind +
                             "; the emulator takes float16, float32, int32 and, "
                             "as the bits of bfloat16, e4m3 and e5m2, uint16, uint8 and int8");
    const int64_t bytes = tk::size_in_bytes(result.dtype);
    if (array.ndim() > 4) throw py::value_error(name + " has more than 4 dimensions");
    for (py::ssize_t i = 0; i < array.ndim(); ++i) {
        if (array.strides(i) % bytes != 0 || array.strides(i) < 0) {
            throw py::value_error(name +
                                  " has a stride that is negative or no multiple of its "
                                  "elements' size");
        }
        result.size.push_back(array.shape(i));
        result.stride.push_back(array.strides(i) / bytes);
    }
    result.data = static_cast<uint8_t*>(const_cast<void*>(array.data()));
    return result;
}
py::array array_to(const tk::emulated::Array& a) {
    const char* kind = a.dtype == tk::DType::bf16    ? "uint16"
                       : a.dtype == tk::DType::fp16  ? "float16"
                       : a.dtype == tk::DType::int32 ? "int32"
                       : a.dtype == tk::DType::e4m3  ? "uint8"
                       : a.dtype == tk::DType::e5m2  ? "int8"
                                                     : "float32";
    std::vector<py::ssize_t> strides;
    for (const int64_t s : a.stride) strides.push_back(s * tk::size_in_bytes(a.dtype));
    auto* owner = new std::shared_ptr<void>(a.owner);
    const py::capsule base(owner, [](void* p) { delete static_cast<std::shared_ptr<void>*>(p); });
    return py::array(py::dtype(kind), a.size, strides, a.data, base);
}

// What a call may say of the emulated device, and what the environment says.
tk::DeviceProperties device_from(const tk::Fields& fields) {
    tk::DeviceProperties device = EMULATED_DEVICE;
    const auto take = [&](const char* name, auto& property) {
        const auto found = fields.find(name);
        if (found != fields.end()) tk::detail::from_value(name, found->second, property);
    };
    take("sm_count", device.sm_count);
    take("shared_bytes_per_block", device.shared_bytes_per_block);
    take("portable_only", device.portable_only);
    return tk::restricted(device);
}

emu::Policy policy_from(const std::string& name) {
    for (const auto p :
         {emu::Policy::on_wait, emu::Policy::late_mma, emu::Policy::eager, emu::Policy::random}) {
        if (name == emu::name_of(p)) return p;
    }
    throw py::value_error("policy must be 'on_wait', 'late_mma', 'eager' or 'random', got '" +
                          name + "'");
}

// Runs a call, and once more on the same memory if it has a workspace; results are then those of
// the second run.
tk::emulated::Result run_twice(tk::emulated::Run run, const tk::emulated::Call& call) {
    tk::emulated::Recording recording;
    struct Scope {
        ~Scope() { tk::emulated::recording = nullptr; }
    } const scope;
    tk::emulated::recording = &recording;
    tk::emulated::Result result = run(call);
    const auto is_result = [&](const auto& owner) {
        return std::ranges::any_of(result.arrays,
                                   [&](const auto& entry) { return entry.second.owner == owner; });
    };
    if (recording.writes_inputs || std::ranges::all_of(recording.written, is_result)) return result;
    for (const auto& [name, array] : result.arrays) {
        if (array.owner) std::memset(array.data, 0xff, std::size_t(array.extent()));
    }
    recording.replays = true;
    return run(call);
}

py::tuple run(const std::string& op, const std::map<std::string, py::array>& arrays,
              const tk::Fields& scalars, const tk::Fields& config, const tk::Fields& device,
              const std::string& policy, uint64_t seed, int host_threads, bool check_order,
              bool replay) {
    const auto found = tk::emulated::runs().find(op);
    if (found == tk::emulated::runs().end()) {
        throw py::value_error("the emulator has no op '" + op + "'");
    }
    tk::emulated::Call call{.scalars = scalars, .config = config};
    for (const auto& [name, array] : arrays) call.arrays[name] = array_from(name, array);
    call.device = device_from(device);
    emu::Options options;
    options.policy = policy_from(policy);
    options.seed = seed;
    options.host_threads = host_threads;
    options.check_order = check_order;
    tk::emulated::Result result;
    {
        const py::gil_scoped_release release;
        const emu::OptionsScope scope(options);
        result = replay ? run_twice(found->second, call) : found->second(call);
    }
    py::dict out;
    for (const auto& [name, array] : result.arrays) out[py::str(name)] = array_to(array);
    return py::make_tuple(out, result.choice);
}

std::vector<std::string> ops() {
    std::vector<std::string> names;
    for (const auto& [name, run] : tk::emulated::runs()) names.push_back(name);
    return names;
}

}  // namespace

PYBIND11_MODULE(_emulator, m) {
    m.doc() = "Runs thunderkittens' kernels on the CPU, on NumPy arrays.";
    const auto& error = py::register_exception<emu::Error>(m, "EmulatorError", PyExc_RuntimeError);
    py::register_exception<emu::Deadlock>(m, "DeadlockError", error.ptr());
    m.def("ops", &ops, "Names of the ops that the emulator has.");
    m.def(
        "unsupported",
        [](const std::string& op, const tk::Fields& problem, const tk::Fields& device) {
            return tk::find_op(op).unsupported(problem, device_from(device));
        },
        py::arg("op"), py::arg("problem"), py::arg("device") = tk::Fields{},
        "Why an op has no kernel for a problem; empty if it has.");
    m.def("run", &run, py::arg("op"), py::arg("arrays"), py::arg("scalars") = tk::Fields{},
          py::kw_only(), py::arg("config") = tk::Fields{}, py::arg("device") = tk::Fields{},
          py::arg("policy") = "on_wait", py::arg("seed") = 0, py::arg("host_threads") = 1,
          py::arg("check_order") = true, py::arg("replay") = false,
          "Runs an op's kernel; returns a dictionary of its results and one of what was chosen.");
}
