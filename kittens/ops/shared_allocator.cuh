// Hands out shared memory: al.allocate<tile>() is a tile, al.allocate<tile, 2, 3>() an array of
// tiles.
#pragma once

#include "../types/scalar.cuh"

namespace kittens::inline KITTENS_BACKEND {

// Largest dynamic shared memory of a block that this compilation targets.
constexpr int MAX_SHARED_MEMORY = 232448;  // 227 KiB

template <int alignment = 1024>
struct shared_allocator {
    static_assert(alignment > 0 && (alignment & (alignment - 1)) == 0,
                  "the allocator's alignment must be a power of two");
    int* pointer;

    __device__ __forceinline__ shared_allocator(int* start) : pointer(start) {}

    template <class T, size_t... dims>
    __device__ __forceinline__ auto& allocate() {
        using Array = typename array_of<T, dims...>::type;
        const uintptr_t start =
            (reinterpret_cast<uintptr_t>(pointer) + alignment - 1) & ~uintptr_t(alignment - 1);
        pointer = reinterpret_cast<int*>(start + sizeof(Array));
        return *reinterpret_cast<Array*>(start);
    }

  private:
    template <class T, size_t... dims>
    struct array_of {
        using type = T;
    };
    template <class T, size_t first, size_t... rest>
    struct array_of<T, first, rest...> {
        using type = typename array_of<T, rest...>::type[first];
    };
};
shared_allocator(int*) -> shared_allocator<1024>;

}  // namespace kittens::inline KITTENS_BACKEND
