// Allocation of tensors by a function of PyTorch's that throws. The functions of the stable ABI
// catch exceptions and return a code, and up to torch 2.12 they print them besides; so no caller
// would see torch.OutOfMemoryError, into which PyTorch's bindings turn the C++ exception of that
// name. This function lets it pass. It is not part of the stable ABI: it is looked up by its name,
// which spells the types of all parameters, and what cannot be found is not used. Host C++ without
// torch's headers.
#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <optional>

namespace thunderkittens::throwing {

// c10::ArrayRef<c10::SymInt>: a size that is no symbol is its own representation.
struct Sizes {
    const int64_t* data;
    std::size_t count;
};
enum class ScalarType : int8_t {};
enum class Layout : int8_t {};
struct Device {
    int8_t type, index;
};
// at::Tensor, one pointer. The destructor makes it be returned in memory, as at::Tensor is; what
// the pointer owns is released through the handle of the stable ABI that the memory becomes.
struct Returned {
    void* tensor;
    ~Returned() {}
};

// at::empty_strided, which aoti_torch_empty_strided calls too.
using EmptyStrided = Returned (*)(Sizes sizes, Sizes strides, std::optional<ScalarType>,
                                  std::optional<Layout>, std::optional<Device>,
                                  std::optional<bool> pin_memory);

// Null where this torch has no such function.
inline EmptyStrided find_empty_strided() {
    static const auto function = reinterpret_cast<EmptyStrided>(
        dlsym(RTLD_DEFAULT,
              "_ZN2at4_ops13empty_strided4callEN3c108ArrayRefINS2_6SymIntEEES5_St8optionalINS2_"
              "10ScalarTypeEES6_INS2_6LayoutEES6_INS2_6DeviceEES6_IbE"));
    return function;
}

}  // namespace thunderkittens::throwing
