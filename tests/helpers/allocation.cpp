// The allocation of csrc/common/tensor.h as ops of a library of their own, which test_allocation.py
// compiles: on the stable ABI, as the package's ops are, but on CPU tensors.
#include <vector>

#include "csrc/common/tensor.h"

namespace {

using namespace thunderkittens;

// With PyTorch's function that throws, or not; `quietly`: as where the stable one prints nothing.
Tensor allocate_test(const Tensor& like, std::vector<int64_t> sizes, std::vector<int64_t> strides,
                     bool function, bool quietly) {
    return allocate(sizes, strides, like.scalar_type(), like,
                    function ? throwing::find_empty_strided() : nullptr, quietly);
}
// On a device of which there is none.
Tensor throw_test(const Tensor& x) {
    const int64_t size = 1;
    const throwing::Device xpu{12, 0};
    throwing::find_empty_strided()({&size, 1}, {&size, 1}, std::nullopt, std::nullopt, xpu,
                                   std::nullopt);
    return x;
}
Tensor empty_as_test(const Tensor& x) { return empty_as(x); }
Tensor packed_test(const Tensor& x) { return packed(x); }
Tensor aligned_test(const Tensor& x) { return aligned_and_contiguous(x); }

}  // namespace

STABLE_TORCH_LIBRARY(thunderkittens_tests, m) {
    m.def(
        "allocate(Tensor like, int[] sizes, int[] strides, bool function, bool quietly) -> Tensor");
    m.def("throw_another(Tensor x) -> Tensor");
    m.def("empty_as(Tensor x) -> Tensor");
    m.def("packed(Tensor x) -> Tensor");
    m.def("aligned(Tensor x) -> Tensor");
}
STABLE_TORCH_LIBRARY_IMPL(thunderkittens_tests, CPU, m) {
    m.impl("allocate", TORCH_BOX(&allocate_test));
    m.impl("throw_another", TORCH_BOX(&throw_test));
    m.impl("empty_as", TORCH_BOX(&empty_as_test));
    m.impl("packed", TORCH_BOX(&packed_test));
    m.impl("aligned", TORCH_BOX(&aligned_test));
}
