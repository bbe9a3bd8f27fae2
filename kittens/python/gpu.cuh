// What a call from Python has around its launch on a GPU: the tensors' device becomes the current
// one, and the stream is PyTorch's current one of that device. Nothing waits for the GPU.
#pragma once

#include <span>
#include <string>

#include "tensor.h"

namespace kittens::inline on_gpu {
namespace python {

inline PyObject* is_here(const Torch& torch) { return torch.is_cuda; }
constexpr const char* DEVICE_SENTENCE = "this module is built for GPUs and takes CUDA tensors";

class Around {
  public:
    // With the interpreter's lock.
    Around(const char*, int device, std::span<const Tensor* const>) : device_(device) {
        static PyObject* const current =
            import_module("torch").attribute("_C").attribute("_cuda_getCurrentRawStream").release();
        const Object index = Object::owned(PyLong_FromLong(device));
        const Object stream =
            Object::owned(PyObject_CallFunctionObjArgs(current, index.get(), nullptr));
        stream_ = reinterpret_cast<cudaStream_t>(PyLong_AsVoidPtr(stream.get()));
        if (PyErr_Occurred() != nullptr) throw ErrorIsSet();
    }

    // Without it. `launch` takes the stream.
    template <class Launch>
    void run(Launch launch) const {
        int before = device_;
        arch::check(cudaGetDevice(&before), "cudaGetDevice");
        const Restored restored{before, device_};
        launch(stream_);
    }

  private:
    struct Restored {
        Restored(int before, int wanted) : before(before), changed(before != wanted) {
            if (changed) arch::check(cudaSetDevice(wanted), "cudaSetDevice");
        }
        ~Restored() {
            if (changed) cudaSetDevice(before);
        }
        int before;
        bool changed;
    };
    int device_;
    cudaStream_t stream_ = nullptr;
};

// The Python exception of a C++ one that is this back end's own; none.
inline PyObject* exception_type(const std::exception&) { return nullptr; }

}  // namespace python
}  // namespace kittens::inline on_gpu
