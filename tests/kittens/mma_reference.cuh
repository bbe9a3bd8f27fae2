// The matrix product in plain loops, and the error that the tensor cores may make.
#pragma once

#include "device.cuh"

namespace unit {

struct ProductShape {
    int m, n, k;
    bool transpose_a, transpose_b;
};

// d + op(a) op(b) in double; `magnitude` receives the largest sum of absolute products.
inline Values reference_product(const ProductShape& s, const Values& a, const Values& b, Values d,
                                double* magnitude = nullptr) {
    double largest = 0;
    for (int i = 0; i < s.m; ++i) {
        for (int j = 0; j < s.n; ++j) {
            double sum = 0, absolute = 0;
            for (int k = 0; k < s.k; ++k) {
                const double x = a[s.transpose_a ? size_t(k) * s.m + i : size_t(i) * s.k + k];
                const double y = b[s.transpose_b ? size_t(j) * s.k + k : size_t(k) * s.n + j];
                sum += x * y;
                absolute += std::abs(x * y);
            }
            d[size_t(i) * s.n + j] += sum;
            largest = std::max(largest, absolute + std::abs(d[size_t(i) * s.n + j]));
        }
    }
    if (magnitude) *magnitude = largest;
    return d;
}

// Error of one accumulated sum, relative to the sum of magnitudes. The tensor cores add with
// truncation: 16-bit operands keep the accumulator's precision per step of 16, 8-bit operands on
// Hopper 13 bits of the fraction per step of 32.
template <class TA, class TD>
double product_error(int k) {
    if (float_8bit<TA>) return (k / 32 + 1) * 0x1p-12;
    return (k / 16 + 1) * (std::same_as<TD, half> ? 0x1p-10 : 0x1p-21);
}

inline std::string form_name(bool transpose_a, bool transpose_b) {
    return std::string(transpose_a ? "At" : "A") + (transpose_b ? "Bt" : "B");
}

}  // namespace unit
