// Python's objects in C++: owned references, and exceptions in both directions. This is CPython's
// limited API (3.10) alone, so that a module with Py_LIMITED_API defined serves every later Python.
#pragma once

#include <Python.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

#include "../arch/arch.cuh"

namespace kittens::inline KITTENS_BACKEND {
namespace python {

// The Python error that is set already: it only has to reach the interpreter.
struct ErrorIsSet {};

// An exception of a Python type, and its sentence.
struct Refusal : std::runtime_error {
    Refusal(PyObject* type, const std::string& sentence)
        : std::runtime_error(sentence), type(type) {}
    PyObject* type;
};

// An owned reference, or nullptr.
class Object {
  public:
    Object() = default;
    // Takes over a new reference, which most of Python's functions return, or nullptr and an error.
    static Object owned(PyObject* pointer) {
        if (pointer == nullptr) throw ErrorIsSet();
        return Object(pointer);
    }
    static Object borrowed(PyObject* pointer) {
        Py_XINCREF(pointer);
        return Object(pointer);
    }
    Object(Object&& other) noexcept : pointer_(std::exchange(other.pointer_, nullptr)) {}
    Object& operator=(Object&& other) noexcept {
        std::swap(pointer_, other.pointer_);
        return *this;
    }
    ~Object() { Py_XDECREF(pointer_); }

    PyObject* get() const { return pointer_; }
    PyObject* release() { return std::exchange(pointer_, nullptr); }
    explicit operator bool() const { return pointer_ != nullptr; }

    Object attribute(PyObject* interned) const {
        return owned(PyObject_GetAttr(pointer_, interned));
    }
    Object attribute(const char* name) const {
        return owned(PyObject_GetAttrString(pointer_, name));
    }
    // The method without arguments.
    Object call(PyObject* interned) const {
        return owned(PyObject_CallMethodObjArgs(pointer_, interned, nullptr));
    }

  private:
    explicit Object(PyObject* pointer) : pointer_(pointer) {}
    PyObject* pointer_ = nullptr;
};

// A name that is made once and, as the interpreter's own, never freed.
inline PyObject* interned(const char* name) { return PyUnicode_InternFromString(name); }

inline bool is_true(const Object& object) {
    const int result = PyObject_IsTrue(object.get());
    if (result < 0) throw ErrorIsSet();
    return result != 0;
}

inline int64_t to_integer(PyObject* object) {
    const long long value = PyLong_AsLongLong(object);
    if (value == -1 && PyErr_Occurred() != nullptr) throw ErrorIsSet();
    return value;
}

// str(object)
inline std::string to_text(PyObject* object) {
    const Object text = Object::owned(PyObject_Str(object));
    Py_ssize_t length = 0;
    const char* data = PyUnicode_AsUTF8AndSize(text.get(), &length);
    if (data == nullptr) throw ErrorIsSet();
    return {data, static_cast<size_t>(length)};
}

// "float", "torch.Tensor"
inline std::string type_text(PyObject* object) {
    const Object type = Object::borrowed(reinterpret_cast<PyObject*>(Py_TYPE(object)));
    return to_text(type.attribute("__name__").get());
}

inline Object import_module(const char* module) {
    return Object::owned(PyImport_ImportModule(module));
}

}  // namespace python
}  // namespace kittens::inline KITTENS_BACKEND
