// Calls of ops from Python with less work per argument: torch's own conversion asks the schema for
// the type of each, and looks for overrides of every kind. Here an op has a list of what its
// arguments are, made once. A call that does not fit it, such as one with a subclass of tensors, is
// torch's. The dispatcher gets the same arguments from both. A module of Python of its own, because
// `_autograd` knows no Python; it too fits only the torch that it was built with.
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace thunderkittens::autograd {
namespace {

enum class Kind : uint8_t { tensor, integer, number, boolean };

struct Argument {
    Kind kind;
    bool optional;
    std::optional<c10::IValue> value;  // where it is left out
};

struct Signature {
    c10::OperatorHandle op;
    std::vector<Argument> arguments;
    std::size_t results;
};

std::optional<Kind> kind_of(const c10::Type& type) {
    switch (type.kind()) {
        case c10::TypeKind::TensorType: return Kind::tensor;
        case c10::TypeKind::IntType:
        case c10::TypeKind::SymIntType: return Kind::integer;
        case c10::TypeKind::FloatType: return Kind::number;
        case c10::TypeKind::BoolType: return Kind::boolean;
        default: return std::nullopt;
    }
}

// Nothing for an op with arguments or results of other types, such as lists.
std::unique_ptr<const Signature> signature_of(const c10::OperatorHandle& op) {
    const auto& results = op.schema().returns();
    auto signature = std::make_unique<Signature>(Signature{op, {}, results.size()});
    for (const c10::Argument& result : results) {
        if (result.type()->kind() != c10::TypeKind::TensorType) return nullptr;
    }
    for (const c10::Argument& x : op.schema().arguments()) {
        const auto* option = x.type()->castRaw<c10::OptionalType>();
        const auto kind = kind_of(option ? *option->getElementType() : *x.type());
        if (!kind || x.kwarg_only()) return nullptr;
        signature->arguments.push_back({*kind, option != nullptr, x.default_value()});
    }
    return signature;
}

// Whether x was such an argument; it is then on the stack.
bool push(torch::jit::Stack& stack, const Argument& argument, PyObject* x) {
    if (argument.optional && x == Py_None) {
        stack.emplace_back();
        return true;
    }
    switch (argument.kind) {
        case Kind::tensor:
            // No subclass: it may have a __torch_function__.
            if (!THPVariable_CheckExact(x)) return false;
            stack.emplace_back(THPVariable_Unpack(x));
            return true;
        case Kind::integer: {
            if (THPDtype_Check(x)) {
                stack.emplace_back(
                    static_cast<int64_t>(reinterpret_cast<THPDtype*>(x)->scalar_type));
                return true;
            }
            if (!PyLong_CheckExact(x)) return false;
            int overflow = 0;
            const int64_t value = PyLong_AsLongLongAndOverflow(x, &overflow);
            stack.emplace_back(value);
            return overflow == 0;
        }
        case Kind::number:
            if (!PyFloat_CheckExact(x)) return false;
            stack.emplace_back(PyFloat_AS_DOUBLE(x));
            return true;
        case Kind::boolean:
            if (!PyBool_Check(x)) return false;
            stack.emplace_back(x == Py_True);
            return true;
    }
    return false;
}

// Whether the arguments fit; they are then on the stack.
bool push_all(torch::jit::Stack& stack, const Signature& signature, PyObject* const* given,
              std::size_t count) {
    const auto& arguments = signature.arguments;
    if (count > arguments.size() || at::impl::torch_function_mode_enabled()) return false;
    stack.reserve(std::max(arguments.size(), signature.results));
    for (std::size_t i = 0; i < count; ++i) {
        if (!push(stack, arguments[i], given[i])) return false;
    }
    for (std::size_t i = count; i < arguments.size(); ++i) {
        if (!arguments[i].value) return false;
        stack.push_back(*arguments[i].value);
    }
    return true;
}

// The exception that is handled, as Python's.
PyObject* raised() {
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
}

PyObject* results_of(torch::jit::Stack& stack, std::size_t count) {
    if (count == 0) Py_RETURN_NONE;
    if (count == 1) return THPVariable_Wrap(std::move(stack[0]).toTensor());
    PyObject* const results = PyTuple_New(static_cast<Py_ssize_t>(count));
    for (std::size_t i = 0; results != nullptr && i < count; ++i) {
        PyTuple_SET_ITEM(results, static_cast<Py_ssize_t>(i),
                         THPVariable_Wrap(std::move(stack[i]).toTensor()));
    }
    return results;
}

// The object in Python. It lives as long as the process, like the op.
struct Call {
    PyObject ob_base;
    vectorcallfunc function;
    const Signature* signature;
    const Signature* recorded;  // of the op that records gradients, if plain calls may want some
    PyObject* other;            // torch's function, or what is called where a plain call has failed
};
PyTypeObject call_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

PyObject* make(vectorcallfunc function, const Signature* signature, PyObject* other,
               const Signature* recorded = nullptr) {
    auto* const made = PyObject_New(Call, &call_type);
    if (made == nullptr) return nullptr;
    made->function = function;
    made->signature = signature;
    made->recorded = recorded;
    made->other = Py_NewRef(other);
    return reinterpret_cast<PyObject*>(made);
}

PyObject* run(const Signature& signature, torch::jit::Stack& stack, std::size_t results) {
    {
        const pybind11::gil_scoped_release others_run;
        signature.op.callBoxed(&stack);
    }
    return results_of(stack, results);
}
bool names_any(PyObject* keywords) { return keywords != nullptr && PyTuple_GET_SIZE(keywords) > 0; }

PyObject* call(PyObject* self, PyObject* const* given, std::size_t flags, PyObject* keywords) {
    const Call& c = *reinterpret_cast<const Call*>(self);
    const auto count = static_cast<std::size_t>(PyVectorcall_NARGS(flags));
    try {
        torch::jit::Stack stack;
        if (names_any(keywords) || !push_all(stack, *c.signature, given, count)) {
            return PyObject_Vectorcall(c.other, given, flags, keywords);
        }
        return run(*c.signature, stack, c.signature->results);
    } catch (...) {
        return raised();
    }
}

// The op that a public function has no more to do than to call; none where autocast and transforms
// are to be applied, or a gradient is to be refused, or recorded by more than an op.
const Signature* plain_op(const Call& c, const torch::jit::Stack& stack) {
    const auto keys = c10::impl::tls_local_dispatch_key_set();
    if (!keys.excluded_.has_all(c10::autocast_dispatch_keyset)) return nullptr;
    if (keys.included_.has(c10::DispatchKey::FuncTorchDynamicLayerFrontMode)) return nullptr;
    const bool enabled = c10::GradMode::is_enabled();
    bool wanted = false;
    for (const c10::IValue& x : stack) {
        if (!x.isTensor()) continue;
        const at::Tensor& tensor = x.toTensor();
        wanted |= enabled && tensor.requires_grad();
        if (tensor._fw_grad(/*level=*/0).defined()) return nullptr;
    }
    return wanted ? c.recorded : c.signature;
}

// The error that Python has, given to a function with the arguments of the call, whose result is
// then that of the call. Others than this function words stay.
PyObject* explained(PyObject* function, PyObject* const* given, std::size_t count) {
    const bool known = PyErr_ExceptionMatches(PyExc_RuntimeError) ||
                       PyErr_ExceptionMatches(PyExc_TypeError) ||
                       PyErr_ExceptionMatches(PyExc_ValueError);
    if (!known) return nullptr;
    PyObject *type = nullptr, *error = nullptr, *trace = nullptr;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    PyObject* const arguments = PyTuple_New(static_cast<Py_ssize_t>(count));
    for (std::size_t i = 0; arguments != nullptr && i < count; ++i) {
        PyTuple_SET_ITEM(arguments, static_cast<Py_ssize_t>(i), Py_NewRef(given[i]));
    }
    PyObject* const result =
        arguments == nullptr ? nullptr
                             : PyObject_CallFunctionObjArgs(function, arguments, error, nullptr);
    Py_XDECREF(arguments), Py_XDECREF(type), Py_XDECREF(error), Py_XDECREF(trace);
    return result;
}

PyObject* call_plainly(PyObject* self, PyObject* const* given, std::size_t flags,
                       PyObject* keywords) {
    const Call& c = *reinterpret_cast<const Call*>(self);
    const auto count = static_cast<std::size_t>(PyVectorcall_NARGS(flags));
    try {
        torch::jit::Stack stack;
        if (names_any(keywords) || !push_all(stack, *c.signature, given, count)) {
            Py_RETURN_NOTIMPLEMENTED;
        }
        const Signature* const op = plain_op(c, stack);
        if (op == nullptr) Py_RETURN_NOTIMPLEMENTED;
        return run(*op, stack, c.signature->results);
    } catch (...) {
        raised();
        return explained(c.other, given, count);
    }
}

// call(name, overload, function): what calls the op as `function`, torch's, does.
PyObject* make_call(PyObject*, PyObject* arguments) {
    const char *name = nullptr, *overload = nullptr;
    PyObject* torchs = nullptr;
    if (!PyArg_ParseTuple(arguments, "ssO", &name, &overload, &torchs)) return nullptr;
    try {
        auto signature =
            signature_of(c10::Dispatcher::singleton().findSchemaOrThrow(name, overload));
        return signature ? make(call, signature.release(), torchs) : Py_NewRef(torchs);
    } catch (...) {
        return raised();
    }
}

// plain(call, failed, recorded): what calls the op where a public function has no more to do, and
// returns NotImplemented elsewhere. An error of the op goes to `failed(arguments, error)`. Where a
// gradient is wanted, `recorded`, if it is not None, is called instead, an op of the same arguments
// that records it, and whose further results are its own.
PyObject* make_plain(PyObject*, PyObject* arguments) {
    PyObject *of = nullptr, *failed = nullptr, *recorded = nullptr;
    if (!PyArg_ParseTuple(arguments, "O!OO", &call_type, &of, &failed, &recorded)) return nullptr;
    if (recorded != Py_None && !PyObject_TypeCheck(recorded, &call_type)) {
        PyErr_SetString(PyExc_TypeError, "recorded must be a call of an op, or None");
        return nullptr;
    }
    return make(call_plainly, reinterpret_cast<const Call*>(of)->signature, failed,
                recorded == Py_None ? nullptr : reinterpret_cast<const Call*>(recorded)->signature);
}

PyMethodDef functions[] = {{"call", make_call, METH_VARARGS, nullptr},
                           {"plain", make_plain, METH_VARARGS, nullptr},
                           {nullptr, nullptr, 0, nullptr}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "_call", nullptr, -1, functions};

}  // namespace
}  // namespace thunderkittens::autograd

PyMODINIT_FUNC PyInit__call() {
    using namespace thunderkittens::autograd;
    call_type.tp_name = "thunderkittens._call.Call";
    call_type.tp_basicsize = sizeof(Call);
    call_type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL;
    call_type.tp_vectorcall_offset = offsetof(Call, function);
    call_type.tp_call = PyVectorcall_Call;
    if (PyType_Ready(&call_type) < 0) return nullptr;
    return PyModule_Create(&module);
}
