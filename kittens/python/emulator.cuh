// What a call from Python has around its launch on the emulator: the options of `tk.emulate` where
// the call is inside of one, else those of the environment (KITTENS_POLICY, KITTENS_SEED). Kernels
// may touch the tensors of the call and nothing else, and write to outputs alone; a message names
// the tensor.
#pragma once

#include <span>
#include <string>

#include "../arch/emulated/machine/options.h"
#include "tensor.h"

namespace kittens::inline on_cpu {
namespace python {

inline PyObject* is_here(const Torch& torch) { return torch.is_cpu; }
constexpr const char* DEVICE_SENTENCE =
    "this module is built for the emulator and takes CPU tensors";

// thunderkittens.emulation, if the program has imported it.
inline Object emulation_module() {
    static PyObject* const name = interned("thunderkittens.emulation");
    PyObject* module = PyImport_GetModule(name);
    if (module == nullptr && PyErr_Occurred() != nullptr) throw ErrorIsSet();
    return module == nullptr ? Object() : Object::owned(module);
}

class Around {
  public:
    Around(const char* function, int, std::span<const Tensor* const> tensors)
        : options_(emulated::options) {
        options_.kernel = function;
        for (const Tensor* tensor : tensors) {
            options_.regions.push_back(
                {tensor->data, tensor->extent(), tensor->name, tensor->writable});
        }
        const Object module = emulation_module();
        if (!module) return;
        const Object current = module.attribute("current");
        const Object active = Object::owned(PyObject_CallNoArgs(current.get()));
        if (active.get() == Py_None) return;
        options_.from_environment = false;
        const std::string policy = to_text(active.attribute("policy").get());
        for (const auto known : {emulated::Policy::on_wait, emulated::Policy::late_mma,
                                 emulated::Policy::eager, emulated::Policy::random}) {
            if (policy == emulated::name_of(known)) options_.policy = known;
        }
        options_.seed = uint64_t(to_integer(active.attribute("seed").get()));
        options_.host_threads = int(to_integer(active.attribute("host_threads").get()));
        options_.check_order = is_true(active.attribute("check_order"));
        const Object kernels = active.attribute("kernels");
        const Object entry = Object::owned(Py_BuildValue("{s:s}", "kernel", function));
        if (PyList_Append(kernels.get(), entry.get()) != 0) throw ErrorIsSet();
    }

    template <class Launch>
    void run(Launch launch) const {
        const emulated::OptionsScope scope(options_);
        launch(cudaStream_t{});
    }

  private:
    emulated::Options options_;
};

// tk.EmulatorError and tk.DeadlockError, where there is a thunderkittens.
inline PyObject* exception_type(const std::exception& error) {
    const bool deadlock = dynamic_cast<const emulated::Deadlock*>(&error) != nullptr;
    if (!deadlock && dynamic_cast<const emulated::Error*>(&error) == nullptr) return nullptr;
    const Object module = emulation_module();
    if (!module) return nullptr;
    return module.attribute(deadlock ? "DeadlockError" : "EmulatorError").release();
}

}  // namespace python
}  // namespace kittens::inline on_cpu
