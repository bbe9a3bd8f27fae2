// A Python function of a launch: its arguments become the kernel's globals, which the launch gets
// with the stream.
#pragma once

#include <algorithm>
#include <memory>
#include <new>
#include <span>
#include <tuple>

#include "argument.cuh"

namespace kittens::inline KITTENS_BACKEND {
namespace python {

// ---- the number of an aggregate's members ----

struct AnyMember {
    template <class T>
    operator T() const;
};
template <class Globals, class... Members>
concept made_of = requires { Globals{Members{}...}; };

template <class Globals, class... Members>
constexpr int count_members() {
    if constexpr (made_of<Globals, Members..., AnyMember>)
        return count_members<Globals, Members..., AnyMember>();
    else
        return int(sizeof...(Members));
}
// gl has no default, so only all members together make a Globals that has some.
template <class Globals, int tried = 1, class... Members>
constexpr int members_of() {
    if constexpr (made_of<Globals, Members..., AnyMember>)
        return count_members<Globals, Members..., AnyMember>();
    else if constexpr (tried < 32)
        return members_of<Globals, tried + 1, Members..., AnyMember>();
    else
        return -1;
}

// Storage of a Globals whose members are made one by one, in the order of the arguments.
template <class Globals>
struct Storage {
    alignas(Globals) unsigned char bytes[sizeof(Globals)] = {};
    Globals& globals() { return *reinterpret_cast<Globals*>(bytes); }
};

template <class Globals, class... Arguments>
class Function {
  public:
    using Launch = void (*)(const Globals&, cudaStream_t);
    static constexpr int COUNT = int(sizeof...(Arguments));
    static_assert(std::is_aggregate_v<Globals>,
                  "the globals of a kernel are a struct without constructors");
    static_assert((std::is_trivially_destructible_v<typename Arguments::member_type> && ...),
                  "members of a kernel's globals are layouts and numbers");
    static_assert(members_of<Globals>() == COUNT,
                  "every member of the kernel's globals is an argument of the function, once");

    Function(const char* name, const char* doc, Launch launch, Arguments... arguments)
        : name_(name), launch_(launch), arguments_(arguments...) {
        int at = 0;
        std::apply([&](const auto&... each) { (add(each, at++), ...); }, arguments_);
        describe(doc);
        for (int i = 0; i < COUNT; ++i) {
            for (int j = 0; j < i; ++j) {
                if (infos_[i].name == infos_[j].name || infos_[i].place == infos_[j].place) {
                    throw std::invalid_argument(std::string(name) + ": arguments " +
                                                infos_[j].name + " and " + infos_[i].name +
                                                " have one name, or are one member");
                }
            }
        }
        definition_ = {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&call)),
                       METH_FASTCALL | METH_KEYWORDS, doc_.c_str()};
    }

    // The function as an object that owns `self`.
    static Object make(std::unique_ptr<Function> self, PyObject* module_name) {
        PyMethodDef* definition = &self->definition_;
        const Object capsule = Object::owned(PyCapsule_New(self.get(), nullptr, [](PyObject* c) {
            delete static_cast<Function*>(PyCapsule_GetPointer(c, nullptr));
        }));
        self.release();
        return Object::owned(PyCFunction_NewEx(definition, capsule.get(), module_name));
    }

  private:
    struct Info {
        std::string name;
        ptrdiff_t place = 0;  // of the member in Globals
        bool required = true;
        bool is_tensor = false;
        Role role = Role::input;
        PyObject* dtype = nullptr;
        Dims dims{""};
        std::string text;  // for the documentation
    };

    // ---- making ----

    template <class Member>
    static ptrdiff_t place_of(Member Globals::*member) {
        static Storage<Globals> storage;
        return reinterpret_cast<unsigned char*>(&(storage.globals().*member)) - storage.bytes;
    }
    template <class Layout>
    void add(const TensorArgument<Globals, Layout>& argument, int at) {
        using T = typename Layout::T;
        Info& info = infos_[at];
        info.name = argument.name;
        info.place = place_of(argument.member);
        info.is_tensor = true;
        info.role = argument.role;
        info.dtype = Torch::dtype_named(dtype_name<T>());
        info.dims = Dims(argument.dims);
        info.text = "torch." + std::string(dtype_name<T>()) + " " + info.dims.text();
        if (info.dims.count() > MAX_DIMS) {
            throw std::invalid_argument(std::string(name_) + ": " + info.name + " has dimensions " +
                                        info.dims.text() + "; there are at most four");
        }
        for (const std::string& word : info.dims.words) {
            if (argument.role != Role::output && Dims::fixed(word) < 0) known_.push_back(word);
        }
    }
    template <class Number>
    void add(const NumberArgument<Globals, Number>& argument, int at) {
        Info& info = infos_[at];
        info.name = argument.name;
        info.place = place_of(argument.member);
        info.required = !argument.value;
        info.text = std::same_as<Number, bool>    ? "bool"
                    : std::floating_point<Number> ? "float"
                                                  : "int";
    }
    // Which outputs a caller may leave out, and the text that help() shows.
    void describe(const char* doc) {
        bool any_input = false;
        for (const Info& info : infos_) {
            any_input = any_input || (info.is_tensor && info.role != Role::output);
        }
        std::string signature, lines;
        for (Info& info : infos_) {
            if (info.is_tensor && info.role == Role::output) {
                info.required = !any_input;
                for (const std::string& word : info.dims.words) {
                    const bool known =
                        std::find(known_.begin(), known_.end(), word) != known_.end();
                    if (word == "_" || (Dims::fixed(word) < 0 && !known)) info.required = true;
                }
            }
            optional_seen_ = optional_seen_ || !info.required;
            if (info.required && optional_seen_ && keywords_from_ < 0) {
                keywords_from_ = int(&info - infos_);
                signature += signature.empty() ? "*" : ", *";
            }
            signature +=
                (signature.empty() ? "" : ", ") + info.name + (info.required ? "" : "=None");
            const char* role = !info.is_tensor || info.role == Role::input ? ""
                               : info.role == Role::output                 ? ", written"
                                                                           : ", updated in place";
            lines += "\n    " + info.name + ": " + info.text + role;
        }
        doc_ = std::string(name_) + "(" + signature + ")\n--\n\n" + doc + "\n" + lines;
    }

    // ---- calling ----

    static PyObject* call(PyObject* self, PyObject* const* values, Py_ssize_t count,
                          PyObject* keywords) {
        const auto* function = static_cast<const Function*>(PyCapsule_GetPointer(self, nullptr));
        if (function == nullptr) return nullptr;
        try {
            return function->run(values, count, keywords).release();
        } catch (const ErrorIsSet&) {
        } catch (const Refusal& refusal) {
            PyErr_SetString(refusal.type, refusal.what());
        } catch (const std::invalid_argument& error) {
            function->raise(PyExc_ValueError, error);
        } catch (const std::exception& error) {
            try {
                PyObject* type = exception_type(error);
                function->raise(type != nullptr ? type : PyExc_RuntimeError, error);
            } catch (const ErrorIsSet&) {
            }
        }
        return nullptr;
    }
    void raise(PyObject* type, const std::exception& error) const {
        PyErr_SetString(type, (name_ + (": " + std::string(error.what()))).c_str());
    }

    Object run(PyObject* const* values, Py_ssize_t count, PyObject* keywords) const {
        std::array<PyObject*, COUNT> given{};
        take(values, count, keywords, given);
        Call call{given};
        // Outputs come last: their sizes are those of the inputs.
        read<false>(call, std::index_sequence_for<Arguments...>());
        read<true>(call, std::index_sequence_for<Arguments...>());

        std::array<const Tensor*, COUNT> tensors{};
        size_t used = 0;
        for (const auto& tensor : call.tensors) {
            if (tensor) tensors[used++] = &*tensor;
        }
        const Around around(name_, call.device, std::span(tensors.data(), used));
        launch(around, call.storage.globals());
        return returned(call);
    }

    // Without the interpreter's lock: an emulated kernel takes its time, and a launch may wait for
    // room in the stream's queue.
    void launch(const Around& around, const Globals& globals) const {
        struct Unlocked {
            PyThreadState* state = PyEval_SaveThread();
            ~Unlocked() { PyEval_RestoreThread(state); }
        } const unlocked;
        around.run([&](cudaStream_t stream) { launch_(globals, stream); });
    }

    struct Call {
        const std::array<PyObject*, COUNT>& given;
        std::array<std::optional<Tensor>, COUNT> tensors{};
        Storage<Globals> storage{};
        Sizes sizes{};
        int first = -1;  // the first tensor, whose device is that of the call
        int device = -1;
    };

    // Positional and keyword arguments to their places; None is as good as nothing.
    void take(PyObject* const* values, Py_ssize_t count, PyObject* keywords,
              std::array<PyObject*, COUNT>& given) const {
        const int positions = keywords_from_ < 0 ? COUNT : keywords_from_;
        const auto fault = [&](const std::string& sentence) {
            refuse(PyExc_TypeError, name_, sentence);
        };
        if (count > positions) {
            fault("takes " + std::to_string(positions) + " arguments by position, got " +
                  std::to_string(count));
        }
        for (Py_ssize_t i = 0; i < count; ++i) given[size_t(i)] = values[i];
        const Py_ssize_t named = keywords == nullptr ? 0 : PyTuple_Size(keywords);
        for (Py_ssize_t i = 0; i < named; ++i) {
            const std::string key = to_text(PyTuple_GetItem(keywords, i));
            int at = 0;
            while (at < COUNT && infos_[at].name != key) ++at;
            if (at == COUNT) fault("has no argument " + key + "; it has " + names());
            if (given[size_t(at)] != nullptr) fault(key + " is given twice");
            given[size_t(at)] = values[count + i];
        }
        for (int i = 0; i < COUNT; ++i) {
            if (given[size_t(i)] == Py_None) given[size_t(i)] = nullptr;
            if (given[size_t(i)] == nullptr && infos_[i].required) {
                fault(infos_[i].name + " is missing");
            }
        }
    }
    std::string names() const {
        std::string text;
        for (const Info& info : infos_) text += (text.empty() ? "" : ", ") + info.name;
        return text;
    }

    template <bool outputs, size_t... at>
    void read(Call& call, std::index_sequence<at...>) const {
        (read_one<outputs>(call, at, std::get<at>(arguments_)), ...);
    }
    template <bool outputs, class Layout>
    void read_one(Call& call, size_t at, const TensorArgument<Globals, Layout>& argument) const {
        using Traits = layout_traits<Layout>;
        if (outputs != (argument.role == Role::output)) return;
        const Info& info = infos_[at];
        Object made;
        PyObject* object = call.given[at];
        if (object == nullptr) {
            made = allocate(call, info);
            object = made.get();
        }
        require_tensor(name_, argument.name, object, info.dtype);
        Tensor tensor = read_tensor(name_, argument.name, object, info.dims);
        tensor.writable = argument.role != Role::input;
        tensor.element_bytes = int(sizeof(typename Traits::T));
        require_shape(name_, tensor, info.dims, Traits::sizes, call.sizes);
        require_strides(name_, tensor, Traits::has_tensor_maps);
        if (call.first < 0) {
            call.first = int(at);
            call.device = tensor.device;
        } else if (tensor.device != call.device) {
            const Tensor& other = *call.tensors[size_t(call.first)];
            refuse(PyExc_TypeError, name_,
                   argument.name + (" is on " + device_text(object)) + ", " + other.name +
                       " is on " + device_text(other.object.get()) +
                       "; they must be on one device");
        }
        new (&(call.storage.globals().*argument.member)) Layout(make_layout<Layout>(tensor));
        call.tensors[at].emplace(std::move(tensor));
    }
    template <bool outputs, class Number>
    void read_one(Call& call, size_t at, const NumberArgument<Globals, Number>& argument) const {
        if (outputs) return;
        PyObject* object = call.given[at];
        const Number value =
            object == nullptr ? *argument.value : read_number<Number>(name_, argument.name, object);
        new (&(call.storage.globals().*argument.member)) Number(value);
    }

    // torch.empty(sizes, dtype=..., device=...), beside the first input.
    static Object allocate(const Call& call, const Info& info) {
        const Torch& torch = Torch::get();
        const Object shape = Object::owned(PyTuple_New(info.dims.count()));
        for (int i = 0; i < info.dims.count(); ++i) {
            const std::string& word = info.dims.words[size_t(i)];
            const int64_t fixed = Dims::fixed(word);
            const int64_t size = fixed >= 0 ? fixed : call.sizes.find(word)->size;
            PyTuple_SetItem(shape.get(), i, Object::owned(PyLong_FromLongLong(size)).release());
        }
        const Object& like = call.tensors[size_t(call.first)]->object;
        const Object device = like.attribute(torch.device);
        const Object options =
            Object::owned(Py_BuildValue("{s:O,s:O}", "dtype", info.dtype, "device", device.get()));
        const Object values = Object::owned(PyTuple_Pack(1, shape.get()));
        return Object::owned(PyObject_Call(torch.empty, values.get(), options.get()));
    }

    // The outputs. Autograd learns that tensors of the caller have changed.
    Object returned(Call& call) const {
        const Torch& torch = Torch::get();
        std::vector<Object> results;
        for (int i = 0; i < COUNT; ++i) {
            const std::optional<Tensor>& tensor = call.tensors[size_t(i)];
            if (!tensor || !tensor->writable) continue;
            PyObject* object = tensor->object.get();
            if (call.given[size_t(i)] != nullptr &&
                !is_true(tensor->object.call(torch.is_inference))) {
                Object::owned(
                    PyObject_CallFunctionObjArgs(torch.increment_version, object, nullptr));
            }
            if (infos_[i].role == Role::output) results.push_back(Object::borrowed(object));
        }
        if (results.empty()) return Object::borrowed(Py_None);
        if (results.size() == 1) return std::move(results[0]);
        Object tuple = Object::owned(PyTuple_New(Py_ssize_t(results.size())));
        for (size_t i = 0; i < results.size(); ++i) {
            PyTuple_SetItem(tuple.get(), Py_ssize_t(i), results[i].release());
        }
        return tuple;
    }

    const char* name_;
    Launch launch_;
    std::tuple<Arguments...> arguments_;
    Info infos_[sizeof...(Arguments)];
    std::vector<std::string> known_;  // names of dimensions that inputs have
    bool optional_seen_ = false;
    int keywords_from_ = -1;  // a required argument behind an optional one goes by keyword
    std::string doc_;
    PyMethodDef definition_{};
};

}  // namespace python
}  // namespace kittens::inline KITTENS_BACKEND
