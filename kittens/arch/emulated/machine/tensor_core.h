// The arithmetic of Hopper's tensor cores, bit for bit. One instruction adds the products along K
// and the accumulator in fixed point: each term is cut, towards zero, to a number of fraction bits
// below the largest term's exponent, and the exact sum of what is left is cut to the result's
// format. The scheme and its parameters are those that others have found by experiment (Khattak and
// Mikaitis, "Accurate models of NVIDIA tensor cores", 2025; Xie, Yang, Yang and Yang, "MMA-Sim",
// 2025); the treatment of zeros and of the smallest exponents was measured on an H200, and all of
// it agrees with 4.7 million results of that GPU (tests/tensor_core.npz holds some).
//
//   instruction                                 fraction bits   result
//   wgmma, mma.sync of 16-bit operands          25              float, cut to 23 bits
//   wgmma of 8-bit operands                     13              float, cut to 13 bits
//   the same to half                            25, 13          half, to nearest even
//
// The exponent of a product is the sum of its factors' exponents, where a subnormal has its
// format's smallest. Zeros have none. The largest exponent counts as -133 at least.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "elements.h"

namespace kittens::inline on_cpu {
namespace emulated {

struct Arithmetic {
    Element a, b;
    int fraction_bits, kept_bits;
    bool to_half;
};
constexpr Arithmetic wgmma_arithmetic(Element a, Element b, bool to_half) {
    const int bits = bytes_of(a) == 1 ? 13 : 25;
    return {a, b, bits, bits == 13 ? 13 : 23, to_half};
}

// 2 to the exponent of x, which is `smallest` at least; 0 for 0, infinity when x is not finite.
inline float power_of(float x, float smallest) {
    const float power = std::bit_cast<float>(std::bit_cast<uint32_t>(x) & 0x7f800000u);
    return x == 0.0f ? 0.0f : std::max(power, smallest);
}

// c + sum of a[i] b[i stride]: the definition, for any values.
inline float dot_product(float c, const float* a, const float* b, int k, int stride,
                         const Arithmetic& how) {
    constexpr double infinity = std::numeric_limits<double>::infinity();
    double special = std::isfinite(c) ? 0.0 : double(c);
    double largest = std::max(0x1p-133, double(power_of(c, 0x1p-126f)));
    for (int i = 0; i < k; ++i) {
        const double product = double(a[i]) * double(b[i * stride]);
        if (!std::isfinite(product)) special += product;
        if (product == 0.0) continue;
        largest = std::max(largest, double(power_of(a[i], smallest_power(how.a))) *
                                        power_of(b[i * stride], smallest_power(how.b)));
    }
    if (special != 0.0) {  // infinite or NaN
        return special == infinity || special == -infinity ? static_cast<float>(special)
                                                           : std::bit_cast<float>(0x7fffffffu);
    }
    const double unit = std::ldexp(largest, -how.fraction_bits);
    double sum = std::trunc(double(c) / unit);
    for (int i = 0; i < k; ++i) {
        sum += std::trunc(double(a[i]) * double(b[i * stride]) / unit);
    }
    sum *= unit;
    if (sum == 0.0) return 0.0f;
    const int exponent = std::max(std::ilogb(sum), how.to_half ? -14 : -126);
    const double last = std::ldexp(1.0, exponent - (how.to_half ? 10 : how.kept_bits));
    if (how.to_half) {
        sum = std::nearbyint(sum / last) * last;
        if (std::abs(sum) > 65504.0) sum = std::copysign(infinity, sum);
        return sum == 0.0 ? 0.0f : static_cast<float>(sum);
    }
    sum = std::trunc(sum / last) * last;
    if (std::abs(sum) >= 0x1p128) sum = std::copysign(infinity, sum);
    return sum == 0.0 ? 0.0f : static_cast<float>(sum);
}

// A matrix with the powers of two of its elements.
struct Operand {
    const float* values;
    const float* powers;
    float smallest, largest;  // of the powers, zeros apart
};
inline Operand with_powers(const float* values, float* powers, int count, Element type) {
    Operand o{values, powers, std::numeric_limits<float>::infinity(), 0.0f};
    const float smallest = smallest_power(type);
    for (int i = 0; i < count; ++i) {
        const float power = powers[i] = power_of(values[i], smallest);
        o.largest = std::max(o.largest, power);
        if (power != 0.0f) o.smallest = std::min(o.smallest, power);
    }
    return o;
}

// Eight columns at a time. Sums and differences of bits are of unsigned words, which may wrap.
namespace lanes {
typedef float Floats __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(32), may_alias));
typedef uint32_t Words __attribute__((vector_size(32), may_alias));
typedef int32_t HalfInts __attribute__((vector_size(16), may_alias));
typedef float HalfFloats __attribute__((vector_size(16), may_alias));
typedef double Doubles __attribute__((vector_size(32), may_alias));
typedef int64_t Longs __attribute__((vector_size(32), may_alias));
}  // namespace lanes

// The result's floats from sums in units of the largest exponent: the two halves of the products'.
__attribute__((always_inline)) inline void cut_sums(float* out, const lanes::Words& even,
                                                    const lanes::Words& odd,
                                                    const lanes::Ints& largest,
                                                    const Arithmetic& how) {
    using namespace lanes;
    const double unit = 1.0 / static_cast<double>(1 << how.fraction_bits);
    const int64_t kept = ~((int64_t(1) << (52 - how.kept_bits)) - 1);
    HalfInts parts[2][2];
    HalfFloats powers[2], results[2];
    std::memcpy(parts[0], &even, sizeof(even));
    std::memcpy(parts[1], &odd, sizeof(odd));
    std::memcpy(powers, &largest, sizeof(powers));
    for (int h = 0; h < 2; ++h) {
        const Doubles sum = __builtin_convertvector(parts[0][h], Doubles) +
                            __builtin_convertvector(parts[1][h], Doubles);
        const Doubles value = sum * (__builtin_convertvector(powers[h], Doubles) * unit);
        const Longs bits = reinterpret_cast<Longs>(value) & kept;
        results[h] = __builtin_convertvector(reinterpret_cast<Doubles>(bits), HalfFloats);
    }
    std::memcpy(out, results, sizeof(results));
}

// c (rows x n) += a (rows x k) b (k x n), where n is a multiple of 8, k of 16, and no product
// overflows: products in float, their cut values as integers. Elements whose largest exponent is
// below -100, where products that underflow could matter, or that are not finite, are left to the
// definition.
__attribute__((always_inline)) inline void multiply_body(float* c, const Operand& a,
                                                         const Operand& b, int rows, int n, int k,
                                                         const Arithmetic& how) {
    using namespace lanes;
    constexpr uint32_t low = (127u - 100u) << 23, high = 0x7f800000u;
    const uint32_t inverse = static_cast<uint32_t>(254 + how.fraction_bits) << 23;
    const bool underflows = double(a.smallest) * b.smallest < 0x1p-126;
    for (int at = 0; at < rows * n; at += 8) {
        const int row = at / n * k, col = at % n;
        const Floats before = *reinterpret_cast<const Floats*>(c + at);
        // Powers are positive: they compare as their bits do.
        Ints largest = reinterpret_cast<Ints>(before) & 0x7f800000;
        for (int i = 0; i < k; ++i) {
            const Floats power =
                a.powers[row + i] * *reinterpret_cast<const Floats*>(b.powers + i * n + col);
            const Ints bits = reinterpret_cast<Ints>(power);
            largest = bits > largest ? bits : largest;
        }
        const Words exponents = reinterpret_cast<Words>(largest), inverses = inverse - exponents;
        const Floats scale = reinterpret_cast<Floats>(inverses);
        // Sums of 8 products of less than 2^27 fit 32 bits, those of 16 may not.
        const Ints accumulator = __builtin_convertvector(before * scale, Ints);
        Words even = reinterpret_cast<Words>(accumulator), odd{};
        for (int i = 0; i < k; i += 2) {
            const float* x = a.values + row + i;
            const float* y = b.values + i * n + col;
            const Floats p = x[0] * *reinterpret_cast<const Floats*>(y);
            const Floats q = x[1] * *reinterpret_cast<const Floats*>(y + n);
            const Ints cut_p = __builtin_convertvector(p * scale, Ints);
            const Ints cut_q = __builtin_convertvector(q * scale, Ints);
            even += reinterpret_cast<Words>(cut_p);
            odd += reinterpret_cast<Words>(cut_q);
        }
        cut_sums(c + at, even, odd, largest, how);
        const Ints outside = exponents - low >= high - low;
        const Longs any = reinterpret_cast<Longs>(outside);
        if ((any[0] | any[1] | any[2] | any[3]) == 0) continue;
        for (int i = 0; i < 8; ++i) {
            // Without any term the result is 0, as above.
            const bool no_terms = largest[i] == 0 && before[i] == 0.0f && !underflows;
            if (outside[i] == 0 || no_terms) continue;
            c[at + i] = dot_product(before[i], a.values + row, b.values + col + i, k, n, how);
        }
    }
}
#if defined(__x86_64__)
__attribute__((target("avx2"))) inline void multiply_avx2(float* c, const Operand& a,
                                                          const Operand& b, int rows, int n, int k,
                                                          const Arithmetic& how) {
    multiply_body(c, a, b, rows, n, k, how);
}
#endif
inline void multiply_any(float* c, const Operand& a, const Operand& b, int rows, int n, int k,
                         const Arithmetic& how) {
    multiply_body(c, a, b, rows, n, k, how);
}

// c (rows x n) += a (rows x k) b (k x n), at most 64 x 256 with k of one instruction.
inline void multiply(float* c, const float* a, const float* b, int rows, int n, int k,
                     const Arithmetic& how) {
    static thread_local float a_powers[64 * 32], b_powers[32 * 256];
    const Operand left = with_powers(a, a_powers, rows * k, how.a);
    const Operand right = with_powers(b, b_powers, k * n, how.b);
    if (how.to_half || !(double(left.largest) * right.largest <= 0x1p125)) {
        for (int i = 0; i < rows * n; ++i) {
            c[i] = dot_product(c[i], a + i / n * k, b + i % n, k, n, how);
        }
        return;
    }
#if defined(__x86_64__)
    static const bool has_avx2 = __builtin_cpu_supports("avx2");
    if (has_avx2) return multiply_avx2(c, left, right, rows, n, k, how);
#endif
    multiply_any(c, left, right, rows, n, k, how);
}

}  // namespace emulated
}  // namespace kittens::inline on_cpu
