// The emulator's back end of the ops' bodies (backend.h), arrays in CPU memory, and what a family
// gives to the emulator's library, _emulator.so: in csrc/<family>/**/emulated.cpp, for each op, a
// function that takes the arguments of the op's body out of a call and puts its results into the
// call's. The kernels are those of the family's instances.txt, compiled by the host compiler. Host
// C++ without torch, NumPy or Python.
#pragma once

#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "csrc/common/backend.h"
#include "csrc/common/registry.h"
#include "csrc/common/view.h"

namespace thunderkittens::emulated {

// Sizes or strides, also called with an index, as a tensor's are: one from the back if negative.
struct Dims : std::vector<int64_t> {
    Dims() = default;
    Dims(std::vector<int64_t> values) : vector(std::move(values)) {}
    Dims(std::initializer_list<int64_t> values) : vector(values) {}
    int64_t operator()(int64_t i) const {
        return at(static_cast<std::size_t>(i < 0 ? i + std::ssize(*this) : i));
    }
};

// A strided array of up to four dimensions; strides count elements.
struct Array {
    DType dtype = DType::bf16;
    Dims size, stride;
    uint8_t* data = nullptr;
    std::shared_ptr<void> owner;  // of the memory, where it is ours

    int64_t dims() const { return static_cast<int64_t>(size.size()); }
    int64_t elements() const {
        return std::accumulate(size.begin(), size.end(), int64_t{1}, std::multiplies<>());
    }
    // From the first byte to the last.
    int64_t extent() const {
        if (elements() == 0) return 0;
        int64_t last = 0;
        for (std::size_t i = 0; i < size.size(); ++i) last += (size[i] - 1) * stride[i];
        return (last + 1) * size_in_bytes(dtype);
    }
    View view() const { return make_view(data, size, stride); }

    // As torch's tensors have them.
    int64_t dim() const { return dims(); }
    const Dims& sizes() const { return size; }
    const Dims& strides() const { return stride; }
    int64_t numel() const { return elements(); }
    void* data_ptr() const { return data; }
    DType scalar_type() const { return dtype; }
    std::size_t element_size() const { return static_cast<std::size_t>(size_in_bytes(dtype)); }
    bool is_contiguous() const {
        int64_t pitch = 1;
        for (std::size_t i = size.size(); i-- > 0;) {
            if (size[i] > 1 && stride[i] != pitch) return elements() == 0;
            pitch *= size[i];
        }
        return true;
    }
    bool is_cuda() const { return true; }  // the emulated kernels can reach it
    int get_device_index() const { return 0; }
};

// What a call has allocated and drawn: its second run has the same again, as a replayed CUDA graph
// has. So whatever kernels leave in workspaces and flags is there when they begin anew.
struct Recording {
    std::vector<std::shared_ptr<void>> memory;
    std::vector<uint64_t> numbers;
    std::size_t next_memory = 0, next_number = 0;
    bool replays = false;
    bool writes_inputs = false;                  // such a call cannot be repeated
    std::vector<std::shared_ptr<void>> written;  // by kernels

    std::shared_ptr<void> memory_of(std::size_t bytes) {
        if (replays) {
            TK_CHECK(next_memory < memory.size(), "the emulator: a replay allocates more");
            return memory[next_memory++];
        }
        memory.emplace_back(std::aligned_alloc(128, bytes), std::free);
        if (memory.back()) std::memset(memory.back().get(), 0xff, bytes);
        return memory.back();
    }
};
inline thread_local Recording* recording = nullptr;
inline uint64_t recorded(uint64_t fresh) {
    if (recording == nullptr) return fresh;
    if (recording->replays) return recording->numbers.at(recording->next_number++);
    recording->numbers.push_back(fresh);
    return fresh;
}

// Fresh memory is NaN in every format.
inline void take_memory(Array& a, int64_t elements) {
    const int64_t bytes = std::max<int64_t>(elements, 1) * size_in_bytes(a.dtype);
    Recording alone;
    a.owner = (recording != nullptr ? recording : &alone)
                  ->memory_of(static_cast<std::size_t>((bytes + 127) / 128 * 128));
    if (!a.owner) throw std::bad_alloc();
    a.data = static_cast<uint8_t*>(a.owner.get());
}
// Strides are packed, rows padded to a multiple of `pad` elements.
inline Array allocate(std::vector<int64_t> size, DType dtype, int64_t pad = 1) {
    Array a{.dtype = dtype, .size = std::move(size)};
    a.stride.resize(a.size.size());
    int64_t pitch = 1;
    for (std::size_t i = a.size.size(); i-- > 0;) {
        a.stride[i] = pitch;
        pitch *= std::max<int64_t>(a.size[i], 1);
        if (i + 1 == a.size.size()) pitch = (pitch + pad - 1) / pad * pad;
    }
    take_memory(a, pitch);
    return a;
}

template <class F>
void for_each_row(const Array& a, F f) {
    const View v = a.view();
    for (int64_t b = 0; b < v.size[0]; ++b)
        for (int64_t d = 0; d < v.size[1]; ++d)
            for (int64_t r = 0; r < v.size[2]; ++r)
                f(b * v.stride[0] + d * v.stride[1] + r * v.stride[2], b, d, r);
}
inline void copy_elements(const Array& to, const Array& from) {
    const auto bytes = static_cast<std::size_t>(size_in_bytes(from.dtype));
    const View t = to.view(), f = from.view();
    for_each_row(to, [&](int64_t at, int64_t b, int64_t d, int64_t r) {
        const int64_t source = b * f.stride[0] + d * f.stride[1] + r * f.stride[2];
        for (int64_t c = 0; c < t.size[3]; ++c) {
            std::memcpy(to.data + std::size_t(at + c * t.stride[3]) * bytes,
                        from.data + std::size_t(source + c * f.stride[3]) * bytes, bytes);
        }
    });
}
using thunderkittens::copy_for_tensor_map;
using thunderkittens::for_tensor_map;

// As torch has them.
inline void copy_(Array& to, const Array& from) { copy_elements(to, from); }
inline void fill_(Array& a, double value) {
    for (int64_t i = 0; i < a.elements(); ++i) {  // of contiguous fp32
        reinterpret_cast<float*>(a.data)[i] = static_cast<float>(value);
    }
}
inline Array transpose(Array a, int64_t i, int64_t j) {
    const auto at = [&](int64_t k) { return static_cast<std::size_t>(k < 0 ? k + a.dims() : k); };
    std::swap(a.size[at(i)], a.size[at(j)]);
    std::swap(a.stride[at(i)], a.stride[at(j)]);
    return a;
}
inline void zero_(Array& a) {
    if (a.elements() > 0) std::memset(a.data, 0, static_cast<std::size_t>(a.extent()));
}

// One call of an op.
struct Call {
    std::map<std::string, Array> arrays;
    Fields scalars;
    Fields config;  // fields of the choice to be forced
    DeviceProperties device;

    const Array& array(const std::string& name) const {
        const auto found = arrays.find(name);
        TK_CHECK(found != arrays.end(), "the emulator needs the array '", name, "'");
        return found->second;
    }
    const Array* optional(const std::string& name) const {
        const auto found = arrays.find(name);
        return found == arrays.end() ? nullptr : &found->second;
    }
    std::optional<Array> if_given(const std::string& name) const {
        const Array* found = optional(name);
        return found ? std::optional(*found) : std::nullopt;
    }
    template <class T>
    T scalar(const std::string& name, T otherwise) const {
        const auto found = scalars.find(name);
        if (found == scalars.end()) return otherwise;
        T value{};
        detail::from_value(name, found->second, value);
        return value;
    }
};
struct Result {
    std::map<std::string, Array> arrays;
    Fields choice;
};

// Overwrites fields of a choice by those that are forced.
template <class Choice>
void force(Choice& choice, const Call& call) {
    if (call.config.empty()) return;
    TK_CHECK(detail::force_fields(choice, call.config),
             "the emulator: a forced field is none of the choice's");
}

// Gives the kernels that are launched in this scope their name, and the memory that they may
// access. Defined where the tile library is known, in csrc/python/emulator/.
class Launch {
  public:
    explicit Launch(const std::string& kernel);
    ~Launch();
    void may_read(const char* name, const Array& a);
    // Before wait_for_dependencies, too: the previous kernel began after this was there.
    void may_read_early(const char* name, const Array& a);
    void may_write(const char* name, const Array& a);
    void may_read(const char* name, const std::optional<Array>& a) {
        if (a) may_read(name, *a);
    }
    void may_read_early(const char* name, const std::optional<Array>& a) {
        if (a) may_read_early(name, *a);
    }
    void may_write(const char* name, const std::optional<Array>& a) {
        if (a) may_write(name, *a);
    }
    static constexpr Stream stream = nullptr;

  private:
    struct Scope;
    std::unique_ptr<Scope> scope_;
};

using Run = Result (*)(const Call&);
inline std::map<std::string, Run>& runs() {
    static std::map<std::string, Run> all;
    return all;
}
inline bool register_run(const std::string& op, Run run) { return runs().emplace(op, run).second; }

}  // namespace thunderkittens::emulated

namespace thunderkittens {

template <>
struct Backend<emulated::Array> {
    using Array = emulated::Array;
    using ScalarType = DType;
    // What has no type here travels as bytes.
    static constexpr DType BYTE = DType::e4m3, E8M0 = BYTE, E2M1X2 = BYTE;

    const emulated::Call& call;
    mutable Fields choice = {};  // of the kernel that was launched

    explicit Backend(const emulated::Call& _call) : call(_call) {}

    static DType scalar_type(DType dtype) { return dtype; }
    static std::optional<DType> dtype_of(DType dtype) { return dtype; }
    static std::string dtype_text(DType dtype) { return torch_name(dtype); }

    static Array empty_strided(std::span<const int64_t> sizes, std::span<const int64_t> strides,
                               DType dtype, const Array&) {
        const auto list = [](std::span<const int64_t> x) {
            return std::vector<int64_t>(x.begin(), x.end());
        };
        Array a{.dtype = dtype, .size = list(sizes), .stride = list(strides)};
        emulated::take_memory(a, a.extent() / size_in_bytes(dtype));
        return a;
    }
    static Array view_as(DType, const Array& x) { return x; }
    static bool is_int64(const Array& x, int64_t count = 1) {
        return x.dtype == DType::int32 && x.numel() == 2 * count;
    }
    static bool is_int8(const Array&) { return false; }
    // Of 16 bits, by their signs.
    static void negate(Array& x) {
        emulated::for_each_row(x, [&](int64_t at, int64_t, int64_t, int64_t) {
            for (int64_t c = 0; c < x.size(-1); ++c)
                x.data[2 * (at + c * x.stride(-1)) + 1] ^= 0x80;
        });
    }
    static void add(Array& x, int64_t number) {
        for (int64_t i = 0; i < x.size(0); ++i) {
            reinterpret_cast<int32_t*>(x.data)[i * x.stride(0)] += static_cast<int32_t>(number);
        }
    }

    struct Guard {
        ~Guard() {}  // has something to do where there are several devices
    };
    static Guard guard(const Array&) { return {}; }
    const DeviceProperties& device(const Array&) const { return call.device; }
    static int sms_of_pass(const Array&) { return 1; }
    static uint64_t drawn(uint64_t number) { return emulated::recorded(number); }
    static Stream stream(const Array&) { return nullptr; }
    template <class Choice>
    Choice chosen(const char*, Choice value) const {
        emulated::force(value, call);
        return value;
    }
    template <class Choice, class On>
    emulated::Launch launch(const char* op, const Choice& value, const On& on) const {
        choice = detail::named_fields_of(value);
        return launch_part(op, value, on);
    }
    template <class Choice, class On>
    static emulated::Launch launch_part(const char* op, const Choice& value, const On&) {
        return emulated::Launch(concat(op, ' ', kernel_name(value)));
    }
    template <class On>
    static emulated::Launch launch(const char* kernel, const On&) {
        return emulated::Launch(kernel);
    }

    emulated::Result result(std::map<std::string, Array> arrays) const {
        return {std::move(arrays), choice};
    }
};

}  // namespace thunderkittens
