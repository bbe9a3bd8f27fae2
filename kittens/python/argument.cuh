// The arguments of a Python function, each a member of the kernel's globals: tensors, whose
// dimensions have names, and numbers.
#pragma once

#include <array>
#include <concepts>
#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "../types/global/gl.cuh"
#include "device.cuh"

namespace kittens::inline KITTENS_BACKEND {
namespace python {

// What is read off a global layout's type.
template <class Layout>
struct layout_traits;
template <class T_, int b, int d, int r, int c, class... TMA>
struct layout_traits<gl<T_, b, d, r, c, TMA...>> {
    using T = T_;
    static constexpr int sizes[MAX_DIMS] = {b, d, r, c};
    static constexpr bool has_tensor_maps = sizeof...(TMA) > 0;
};
template <class Layout>
concept global_tensor = requires { layout_traits<Layout>::sizes; };

template <class T>
constexpr const char* dtype_name() {
    if constexpr (std::same_as<T, bf16>)
        return "bfloat16";
    else if constexpr (std::same_as<T, half>)
        return "float16";
    else if constexpr (std::same_as<T, float>)
        return "float32";
    else if constexpr (std::same_as<T, fp8e4m3>)
        return "float8_e4m3fn";
    else
        return "float8_e5m2";
}

enum class Role { input, output, in_place };

template <class Globals, global_tensor Layout>
struct TensorArgument {
    using member_type = Layout;
    const char* name;
    Layout Globals::*member;
    const char* dims;
    Role role;
};

template <class Globals, class Number>
struct NumberArgument {
    using member_type = Number;
    const char* name;
    Number Globals::*member;
    std::optional<Number> value;
};

// ---- what a user writes ----

// A tensor that the kernel reads. `dims` names its dimensions, up to four, from the first: "m k". A
// name has one size in all arguments; a number is that size; _ is any.
template <class Globals, global_tensor Layout>
TensorArgument<Globals, Layout> input(const char* name, Layout Globals::*member, const char* dims) {
    return {name, member, dims, Role::input};
}
// A tensor that the kernel writes. The function makes and returns it, unless the caller gives one;
// the caller must where a size is not known from the inputs.
template <class Globals, global_tensor Layout>
TensorArgument<Globals, Layout> output(const char* name, Layout Globals::*member,
                                       const char* dims) {
    return {name, member, dims, Role::output};
}
// A tensor that the kernel reads and writes.
template <class Globals, global_tensor Layout>
TensorArgument<Globals, Layout> in_place(const char* name, Layout Globals::*member,
                                         const char* dims) {
    return {name, member, dims, Role::in_place};
}
template <class Globals, class Number>
    requires std::is_arithmetic_v<Number>
NumberArgument<Globals, Number> number(const char* name, Number Globals::*member) {
    return {name, member, std::nullopt};
}
// One that a caller may leave out.
template <class Globals, class Number>
    requires std::is_arithmetic_v<Number>
NumberArgument<Globals, Number> number(const char* name, Number Globals::*member,
                                       std::type_identity_t<Number> value) {
    return {name, member, value};
}

// ---- dimensions ----

// "m k": the words are right-aligned among the four dimensions of a layout.
struct Dims {
    std::vector<std::string> words;

    explicit Dims(const char* text) {
        std::string word;
        for (const char* at = text;; ++at) {
            if (*at != ' ' && *at != '\0') {
                word += *at;
                continue;
            }
            if (!word.empty()) words.push_back(std::exchange(word, {}));
            if (*at == '\0') break;
        }
    }
    int count() const { return int(words.size()); }
    std::string text() const {
        std::string text = "(";
        for (size_t i = 0; i < words.size(); ++i) text += (i > 0 ? ", " : "") + words[i];
        return text + (words.size() == 1 ? ",)" : ")");
    }
    // The size that a word is by itself, or -1.
    static int64_t fixed(const std::string& word) {
        return word[0] >= '0' && word[0] <= '9' ? std::stoll(word) : -1;
    }
};

// Sizes of the names in a call, and the argument that each is of.
struct Sizes {
    struct Entry {
        std::string name;
        int64_t size;
        const char* argument;
    };
    std::vector<Entry> entries;

    const Entry* find(const std::string& name) const {
        for (const Entry& entry : entries) {
            if (entry.name == name) return &entry;
        }
        return nullptr;
    }
};

// ---- reading ----

[[noreturn]] inline void refuse(PyObject* type, const char* function, const std::string& sentence) {
    throw Refusal(type, std::string(function) + ": " + sentence);
}

inline std::string device_text(PyObject* tensor) {
    return to_text(Object::borrowed(tensor).attribute(Torch::get().device).get());
}

// Kind, dtype and place of a tensor, whatever its shape.
inline void require_tensor(const char* function, const char* name, PyObject* object,
                           PyObject* dtype) {
    const Torch& torch = Torch::get();
    const Object x = Object::borrowed(object);
    const int is_tensor = PyObject_IsInstance(object, torch.tensor);
    if (is_tensor < 0) throw ErrorIsSet();
    const auto fault = [&](const std::string& sentence) {
        refuse(PyExc_TypeError, function, name + (" " + sentence));
    };
    if (is_tensor == 0) fault("must be a torch.Tensor, got " + type_text(object));
    const Object layout = x.attribute(torch.layout);
    if (layout.get() != torch.strided) {
        fault("must be a dense tensor (torch.strided), got " + to_text(layout.get()));
    }
    const Object own = x.attribute(torch.dtype);
    if (own.get() != dtype) {
        fault("is " + to_text(own.get()) + ", expected " + to_text(dtype));
    }
    if (!is_true(x.attribute(is_here(torch)))) {
        fault("is on " + device_text(object) + "; " + DEVICE_SENTENCE);
    }
    if (is_true(x.call(torch.is_neg))) fault("is a negated view; x.resolve_neg() is none");
    if (is_true(x.attribute(torch.requires_grad))) {
        const Object enabled = Object::owned(PyObject_CallNoArgs(torch.is_grad_enabled));
        if (is_true(enabled)) {
            fault(
                "requires a gradient, which this function does not have: call it under "
                "torch.no_grad(), or in the forward of a torch.autograd.Function");
        }
    }
}

// Shape, strides and address.
inline Tensor read_tensor(const char* function, const char* name, PyObject* object,
                          const Dims& dims) {
    const Torch& torch = Torch::get();
    Tensor tensor;
    tensor.name = name;
    tensor.object = Object::borrowed(object);
    const Object shape = tensor.object.attribute(torch.shape);
    const Object strides = tensor.object.call(torch.stride);
    const Py_ssize_t count = PyTuple_Size(shape.get());
    if (count < 0) throw ErrorIsSet();
    if (count != dims.count()) {
        refuse(PyExc_ValueError, function,
               std::string(name) + " has shape " +
                   to_text(Object::owned(PySequence_Tuple(shape.get())).get()) + ", expected " +
                   std::to_string(dims.count()) + " dimensions " + dims.text());
    }
    tensor.dims = int(count);
    int64_t pitch = 1;
    for (int i = MAX_DIMS - 1; i >= 0; --i) {
        const int at = i - (MAX_DIMS - tensor.dims);
        tensor.size[i] = at < 0 ? 1 : to_integer(PyTuple_GetItem(shape.get(), at));
        tensor.stride[i] = at < 0 ? pitch : to_integer(PyTuple_GetItem(strides.get(), at));
        // The stride of a dimension of size 1 is never used; one that a kernel may multiply by.
        if (tensor.size[i] == 1) tensor.stride[i] = pitch;
        pitch = tensor.size[i] * tensor.stride[i];
    }
    tensor.data = PyLong_AsVoidPtr(tensor.object.call(torch.data_ptr).get());
    if (PyErr_Occurred() != nullptr) throw ErrorIsSet();
    tensor.device = int(to_integer(tensor.object.call(torch.get_device).get()));
    return tensor;
}

// Names take their sizes from the tensor, or must agree with it.
inline void require_shape(const char* function, const Tensor& x, const Dims& dims,
                          const int (&layout_sizes)[MAX_DIMS], Sizes& sizes) {
    const auto fault = [&](const std::string& why) {
        refuse(PyExc_ValueError, function,
               std::string(x.name) + " has shape " + x.shape_text() + ", expected " + dims.text() +
                   why);
    };
    for (int i = 0; i < MAX_DIMS; ++i) {
        const int64_t size = x.size[i], of_layout = layout_sizes[i];
        if (size == 0) fault(" with an element at least");
        if (size > std::numeric_limits<int>::max()) fault(" of at most 2^31 - 1 each");
        const int at = i - (MAX_DIMS - x.dims);
        const std::string word = at < 0 ? "_" : dims.words[size_t(at)];
        const int64_t fixed = at < 0 ? -1 : Dims::fixed(word);
        if (fixed >= 0 && fixed != size) fault("");
        if (of_layout > 0 && of_layout != size) {
            fault(" with " + word + " = " + std::to_string(of_layout));
        }
        if (fixed >= 0 || word == "_") continue;
        if (const Sizes::Entry* entry = sizes.find(word)) {
            if (entry->size != size) {
                fault(" with " + word + " = " + std::to_string(entry->size) + ", that of " +
                      entry->argument);
            }
        } else {
            sizes.entries.push_back({word, size, x.name});
        }
    }
}

// What kernels can address: adjacent elements in the last dimension; for TMA the base and all other
// strides in multiples of 16 bytes; nothing twice that is written.
inline void require_strides(const char* function, const Tensor& x, bool has_tensor_maps) {
    const std::string has = x.name + (" has strides " + x.tuple_text(x.stride));
    if (x.stride[MAX_DIMS - 1] != 1) {
        refuse(PyExc_ValueError, function,
               has + ", expected adjacent elements in the last dimension, as .contiguous() has");
    }
    for (int i = 0; i < MAX_DIMS - 1; ++i) {
        if (x.size[i] == 1) continue;
        if (x.writable && x.stride[i] == 0) {
            refuse(PyExc_ValueError, function, has + ", so elements to be written share memory");
        }
        if (has_tensor_maps && x.stride[i] * x.element_bytes % 16 != 0) {
            refuse(PyExc_ValueError, function,
                   has + ", expected multiples of " + std::to_string(16 / x.element_bytes) +
                       " before the last dimension: TMA needs multiples of 16 bytes");
        }
    }
    if (has_tensor_maps && reinterpret_cast<uintptr_t>(x.data) % 16 != 0) {
        refuse(PyExc_ValueError, function,
               std::string(x.name) +
                   " begins in the middle of 16 bytes, expected at a multiple, which TMA needs");
    }
}

template <class Layout>
Layout make_layout(const Tensor& x) {
    return Layout(static_cast<typename Layout::T*>(x.data), x.size[0], x.size[1], x.size[2],
                  x.size[3], gl_strides{x.stride[0], x.stride[1], x.stride[2]});
}

template <class Number>
Number read_number(const char* function, const char* name, PyObject* object) {
    const auto fault = [&](const char* expected) {
        refuse(PyExc_TypeError, function,
               std::string(name) + " must be " + expected + ", got " + type_text(object));
    };
    // A tensor on a GPU would have to be waited for.
    const int is_tensor = PyObject_IsInstance(object, Torch::get().tensor);
    if (is_tensor < 0) throw ErrorIsSet();
    if constexpr (std::same_as<Number, bool>) {
        if (object != Py_True && object != Py_False) fault("a bool");
        return object == Py_True;
    } else if constexpr (std::integral<Number>) {
        if (is_tensor != 0 || PyIndex_Check(object) == 0) fault("an int");
        const Object whole = Object::owned(PyNumber_Index(object));
        int overflow = 0;
        const long long value = PyLong_AsLongLongAndOverflow(whole.get(), &overflow);
        if (overflow != 0 || !std::in_range<Number>(value)) {
            refuse(PyExc_ValueError, function,
                   std::string(name) + " is " + to_text(whole.get()) + ", expected " +
                       std::to_string(std::numeric_limits<Number>::min()) + " to " +
                       std::to_string(std::numeric_limits<Number>::max()));
        }
        return Number(value);
    } else {
        if (is_tensor != 0 || !(PyFloat_Check(object) || PyLong_Check(object))) fault("a float");
        const double value = PyFloat_AsDouble(object);
        if (value == -1.0 && PyErr_Occurred() != nullptr) throw ErrorIsSet();
        return Number(value);
    }
}

}  // namespace python
}  // namespace kittens::inline KITTENS_BACKEND
