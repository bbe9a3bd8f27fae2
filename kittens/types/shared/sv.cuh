// Shared vectors: plain arrays, aligned for bulk copies.
#pragma once

#include "../scalar.cuh"

namespace kittens::inline KITTENS_BACKEND {

template <scalar _T, int _length>
struct alignas(128) sv {
    using identity_type = identity::shared_vector;
    using T = _T;
    using dtype = _T;
    static constexpr int length = _length;
    static constexpr int num_elements = length;
    static_assert(length > 0 && (length * int(sizeof(T))) % 16 == 0,
                  "a shared vector must be a multiple of 16 bytes long");

    T data[length];

    __device__ __forceinline__ uint32_t address() const { return arch::shared_address(this); }
    __device__ __forceinline__ uint32_t address_of(int i) const {
        return address() + uint32_t(i * int(sizeof(T)));
    }
    __device__ __forceinline__ T get(int i) const { return arch::load_shared<T>(address_of(i)); }
    __device__ __forceinline__ void set(int i, const T& value) {
        arch::store_shared(address_of(i), value);
    }
};

template <int length>
using sv_fl = sv<float, length>;
template <int length>
using sv_bf = sv<bf16, length>;
template <int length>
using sv_hf = sv<half, length>;

template <class ST>
using col_vec = sv<typename ST::T, ST::rows>;
template <class ST>
using row_vec = sv<typename ST::T, ST::cols>;

}  // namespace kittens::inline KITTENS_BACKEND
