// Scalar types, their packed forms (one 32-bit register, or two floats), and conversions between
// them.
#pragma once

#include <concepts>
#include <type_traits>

#include "../arch/arch.cuh"

namespace kittens::inline KITTENS_BACKEND {

using bf16 = __nv_bfloat16;
using half = __half;
using fp8e4m3 = __nv_fp8_e4m3;
using fp8e5m2 = __nv_fp8_e5m2;
using bf16_2 = __nv_bfloat162;
using half_2 = __half2;
using fp8e4m3_4 = __nv_fp8x4_e4m3;
using fp8e5m2_4 = __nv_fp8x4_e5m2;

// `packed<T>::type` holds `packed<T>::count` neighbours of type T.
template <class T>
struct packed;
template <>
struct packed<float> {
    using type = float2;
    static constexpr int count = 2;
};
template <>
struct packed<bf16> {
    using type = bf16_2;
    static constexpr int count = 2;
};
template <>
struct packed<half> {
    using type = half_2;
    static constexpr int count = 2;
};
template <>
struct packed<fp8e4m3> {
    using type = fp8e4m3_4;
    static constexpr int count = 4;
};
template <>
struct packed<fp8e5m2> {
    using type = fp8e5m2_4;
    static constexpr int count = 4;
};
template <class T>
using packed_type = typename packed<T>::type;

template <class T>
concept scalar = std::same_as<T, float> || std::same_as<T, bf16> || std::same_as<T, half> ||
                 std::same_as<T, fp8e4m3> || std::same_as<T, fp8e5m2>;
template <class T>
concept float_16bit = std::same_as<T, bf16> || std::same_as<T, half>;
template <class T>
concept float_8bit = std::same_as<T, fp8e4m3> || std::same_as<T, fp8e5m2>;

// Rounds to nearest even; fp8 saturates to the largest finite value.
template <scalar To, scalar From>
__host__ __device__ __forceinline__ To convert(From value) {
    if constexpr (std::same_as<To, From>) {
        return value;
    } else if constexpr (std::same_as<From, float>) {
        if constexpr (std::same_as<To, bf16>)
            return __float2bfloat16_rn(value);
        else if constexpr (std::same_as<To, half>)
            return __float2half_rn(value);
        else
            return To(value);
    } else if constexpr (std::same_as<From, bf16>) {
        return convert<To>(__bfloat162float(value));
    } else if constexpr (std::same_as<From, half>) {
        return convert<To>(__half2float(value));
    } else {
        return convert<To>(static_cast<float>(value));
    }
}

// Pairs: one instruction where the hardware has one.
template <scalar T>
__device__ __forceinline__ float2 unpack_pair(const packed_type<T>& pair)
    requires(packed<T>::count == 2)
{
    if constexpr (std::same_as<T, float>)
        return pair;
    else if constexpr (std::same_as<T, bf16>)
        return __bfloat1622float2(pair);
    else
        return __half22float2(pair);
}
template <scalar T>
__device__ __forceinline__ packed_type<T> pack_pair(float low, float high)
    requires(packed<T>::count == 2)
{
    if constexpr (std::same_as<T, float>)
        return {low, high};
    else if constexpr (std::same_as<T, bf16>)
        return arch::pack_bf16(low, high);
    else
        return arch::pack_half(low, high);
}

// Concepts of the library's objects recognise them by an identifier type.
namespace identity {
struct register_tile {};
struct register_vector {};
struct shared_tile {};
struct shared_vector {};
struct global_layout {};
struct ragged_layout {};
}  // namespace identity

template <class T, class Identity>
concept identified_as = std::same_as<typename std::remove_cvref_t<T>::identity_type, Identity>;
template <class T>
concept any_register_tile = identified_as<T, identity::register_tile>;
template <class T>
concept any_register_vector = identified_as<T, identity::register_vector>;
template <class T>
concept any_shared_tile = identified_as<T, identity::shared_tile>;
template <class T>
concept any_shared_vector = identified_as<T, identity::shared_vector>;
template <class T>
concept global_layout_type = identified_as<T, identity::global_layout>;
template <class T>
concept ragged_layout_type = identified_as<T, identity::ragged_layout>;

}  // namespace kittens::inline KITTENS_BACKEND
