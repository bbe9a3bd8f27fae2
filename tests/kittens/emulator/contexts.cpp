// What encode_tensor_map makes of a driver that refuses for want of a context: here a list of
// results stands for the driver. test_fresh_threads.py compiles it and knows the lines.
#define encode_tiled emulated_encode_tiled
#define make_context_current emulated_make_context_current
#include "arch/arch.cuh"
#undef encode_tiled
#undef make_context_current

#include <cstdio>
#include <stdexcept>
#include <vector>

namespace {

std::vector<CUresult> refusals;
std::size_t asked = 0, made = 0;

}  // namespace

namespace kittens::inline on_cpu {
namespace arch {

template <class... Arguments>
CUresult refuse(Arguments...) {
    return asked++ < refusals.size() ? refusals[asked - 1] : CUDA_SUCCESS;
}
inline auto encode_tiled() {
    return [](auto... arguments) { return refuse(arguments...); };
}
inline void make_context_current() { ++made; }

}  // namespace arch
}  // namespace kittens::inline on_cpu

#include "host/tensor_map.h"

namespace {

void show(const std::vector<CUresult>& list) {
    refusals = list;
    asked = made = 0;
    const char* result = "a map";
    try {
        kittens::host::encode_tensor_map({});
    } catch (const std::runtime_error&) {
        result = "an error";
    }
    for (const CUresult refusal : list) std::printf("%d ", int(refusal));
    std::printf("asked %zu, made %zu: %s\n", asked, made, result);
}

}  // namespace

int main() {
    show({});
    show({CUDA_ERROR_INVALID_CONTEXT});
    show({CUDA_ERROR_NOT_INITIALIZED});
    show({CUDA_ERROR_INVALID_CONTEXT, CUDA_ERROR_INVALID_CONTEXT});
    show({CUDA_ERROR_INVALID_VALUE});
    show({CUDA_ERROR_INVALID_CONTEXT, CUDA_ERROR_INVALID_VALUE});
}
