// Kernels as functions of a Python module, on torch's tensors:
//
//     void scale(const Globals& g, cudaStream_t stream) { launch(kernel, ..., stream, g); }
//
//     KITTENS_PYTHON_MODULE(TORCH_EXTENSION_NAME, m) {
//         using namespace kittens::python;
//         m.function("scale", "y = factor x", scale, input("x", &Globals::x, "rows cols"),
//                         number("factor", &Globals::factor, 1.0f),
//                         output("y", &Globals::y, "rows cols"));
//     }
//
// The function checks kind, dtype, device, shape, strides and alignment, makes the outputs that it
// is not given, launches on PyTorch's current stream of the tensors' device without waiting, and
// returns the outputs. Compiled by nvcc it takes CUDA tensors; by a C++ compiler CPU tensors, and
// runs the kernel on the emulator. It needs Python's headers and nothing of torch; the program has
// imported torch. No other header of the library includes this one.
#pragma once

#include "kittens.cuh"
#include "python/function.cuh"

namespace kittens::inline KITTENS_BACKEND {
namespace python {

class Module {
  public:
    explicit Module(PyModuleDef* definition)
        : module_(Object::owned(PyModule_Create(definition))),
          name_(Object::owned(PyModule_GetNameObject(module_.get()))) {}

    template <class Globals, class... Arguments>
    void function(const char* name, const char* doc, void (*launch)(const Globals&, cudaStream_t),
                  Arguments... arguments) {
        using Made = Function<Globals, Arguments...>;
        add(name, Made::make(std::make_unique<Made>(name, doc, launch, arguments...), name_.get()));
    }
    PyObject* release() { return module_.release(); }

  private:
    void add(const char* name, const Object& function) {
        if (PyObject_SetAttrString(module_.get(), name, function.get()) != 0) throw ErrorIsSet();
    }
    Object module_, name_;
};

// What the interpreter calls: the module, or nullptr and an error.
inline PyObject* make_module(PyModuleDef* definition, void (*fill)(Module&)) {
    try {
        Module module(definition);
        fill(module);
        return module.release();
    } catch (const ErrorIsSet&) {
    } catch (const std::exception& error) {
        PyErr_SetString(PyExc_ImportError, error.what());
    }
    return nullptr;
}

}  // namespace python
}  // namespace kittens::inline KITTENS_BACKEND

#define KITTENS_PYTHON_JOINED(a, b) a##b
#define KITTENS_PYTHON_INIT(name) KITTENS_PYTHON_JOINED(PyInit_, name)
#define KITTENS_PYTHON_TEXT_OF(name) #name
#define KITTENS_PYTHON_TEXT(name) KITTENS_PYTHON_TEXT_OF(name)

// The module's functions follow as a body, in which `variable` is the module.
#define KITTENS_PYTHON_MODULE(name, variable)                                     \
    static void kittens_fill_module(::kittens::python::Module& variable);         \
    PyMODINIT_FUNC KITTENS_PYTHON_INIT(name)() {                                  \
        static PyModuleDef definition = {PyModuleDef_HEAD_INIT,                   \
                                         KITTENS_PYTHON_TEXT(name),               \
                                         nullptr,                                 \
                                         -1,                                      \
                                         nullptr,                                 \
                                         nullptr,                                 \
                                         nullptr,                                 \
                                         nullptr,                                 \
                                         nullptr};                                \
        return ::kittens::python::make_module(&definition, &kittens_fill_module); \
    }                                                                             \
    static void kittens_fill_module(::kittens::python::Module& variable)
