// Torch's tensors, read through their Python attributes. So there are no headers of torch here,
// which cost a minute under nvcc, no library of torch to link, and a module fits every version of
// torch. A tensor costs a call about half a microsecond.
#pragma once

#include <string>

#include "object.h"

namespace kittens::inline KITTENS_BACKEND {
namespace python {

constexpr int MAX_DIMS = 4;

// What a call knows of a tensor. Sizes and strides, in elements, are those of the last four
// dimensions; leading ones that the tensor does not have are 1.
struct Tensor {
    const char* name = "";
    bool writable = false;
    Object object;
    void* data = nullptr;
    int dims = 0;
    int64_t size[MAX_DIMS], stride[MAX_DIMS];
    int element_bytes = 0;
    int device = -1;

    // In bytes, from the first element to the last.
    size_t extent() const {
        int64_t last = 0;
        for (int i = 0; i < MAX_DIMS; ++i) last += (size[i] - 1) * stride[i];
        return static_cast<size_t>((last + 1) * element_bytes);
    }
    std::string tuple_text(const int64_t (&values)[MAX_DIMS]) const {
        std::string text = "(";
        for (int i = MAX_DIMS - dims; i < MAX_DIMS; ++i) {
            text += std::to_string(values[i]) + (i + 1 < MAX_DIMS ? ", " : dims == 1 ? "," : "");
        }
        return text + ")";
    }
    std::string shape_text() const { return tuple_text(size); }
};

// Objects of torch, looked up once.
struct Torch {
    PyObject *tensor, *strided, *empty, *is_grad_enabled, *increment_version;
    PyObject *layout, *dtype, *shape, *stride, *data_ptr, *is_cpu, *is_cuda, *get_device,
        *requires_grad;
    PyObject *is_neg, *is_inference, *device;

    static const Torch& get() {
        static const Torch torch;
        return torch;
    }
    // torch.bfloat16 for "bfloat16"
    static PyObject* dtype_named(const char* name) {
        return import_module("torch").attribute(name).release();
    }

  private:
    Torch() {
        const Object torch = import_module("torch");
        tensor = torch.attribute("Tensor").release();
        strided = torch.attribute("strided").release();
        empty = torch.attribute("empty").release();
        is_grad_enabled = torch.attribute("is_grad_enabled").release();
        increment_version =
            import_module("torch.autograd.graph").attribute("increment_version").release();
        layout = interned("layout");
        dtype = interned("dtype");
        shape = interned("shape");
        stride = interned("stride");
        data_ptr = interned("data_ptr");
        is_cpu = interned("is_cpu");
        is_cuda = interned("is_cuda");
        get_device = interned("get_device");
        requires_grad = interned("requires_grad");
        is_neg = interned("is_neg");
        is_inference = interned("is_inference");
        device = interned("device");
    }
};

}  // namespace python
}  // namespace kittens::inline KITTENS_BACKEND
