// The elements of the tensor cores' operands, 8 and 16-bit floats, as floats.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>

#include "../calls.h"

namespace kittens::inline on_cpu {
namespace emulated {

constexpr int bytes_of(Element e) { return e == Element::bf16 || e == Element::half ? 2 : 1; }
// 2 to the smallest exponent of a format.
constexpr float smallest_power(Element e) {
    return e == Element::bf16 ? 0x1p-126f : e == Element::e4m3 ? 0x1p-6f : 0x1p-14f;
}

template <class T>
inline const std::array<float, 256>& fp8_table() {
    static const std::array<float, 256> table = [] {
        std::array<float, 256> t;
        for (unsigned i = 0; i < 256; ++i) {
            T x;
            x.__x = static_cast<__nv_fp8_storage_t>(i);
            t[i] = static_cast<float>(x);
        }
        return t;
    }();
    return table;
}
inline float half_to_float(uint16_t bits) {
    const uint32_t sign = uint32_t(bits & 0x8000u) << 16;
    const uint32_t magnitude = bits & 0x7fffu;
    if (magnitude < 0x0400u) {  // subnormal
        const float value = static_cast<float>(magnitude) * 0x1p-24f;
        return std::bit_cast<float>(std::bit_cast<uint32_t>(value) | sign);
    }
    if (magnitude >= 0x7c00u) return std::bit_cast<float>(sign | 0x7f800000u | magnitude << 13);
    return std::bit_cast<float>(sign | ((magnitude << 13) + 0x38000000u));
}

// `bytes` of elements, at most 16, to floats with a stride between them.
inline void to_floats(Element type, const void* from, int bytes, float* to, int stride) {
    const auto* p = static_cast<const uint8_t*>(from);
    if (type == Element::bf16 || type == Element::half) {
        for (int i = 0; i < bytes / 2; ++i) {
            uint16_t bits;
            std::memcpy(&bits, p + 2 * i, 2);
            to[i * stride] = type == Element::half ? half_to_float(bits)
                                                   : std::bit_cast<float>(uint32_t(bits) << 16);
        }
    } else {
        const auto& table =
            type == Element::e4m3 ? fp8_table<__nv_fp8_e4m3>() : fp8_table<__nv_fp8_e5m2>();
        for (int i = 0; i < bytes; ++i) to[i * stride] = table[p[i]];
    }
}

}  // namespace emulated
}  // namespace kittens::inline on_cpu
