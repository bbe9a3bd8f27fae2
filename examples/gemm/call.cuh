// What is around the kernels: how run.py calls a step, and the matrices as a kernel gets them.
// Every step computes c = a b^T with a (m, k), b (n, k) and c (m, n): bf16, contiguous, with sums
// in float.
#pragma once

#include <stdexcept>
#include <string>

#include "kittens.cuh"
#include "prototype.cuh"

struct Call {
    kittens::bf16 *a, *b, *c;
    int m, n, k;
    int multiprocessors;  // of the GPU, for steps that need to know how many blocks run at once
    cudaStream_t stream;
};

inline void require(bool condition, const char* message) {
    if (!condition) throw std::invalid_argument(message);
}

__host__ __device__ constexpr int ceil_div(int size, int unit) { return (size + unit - 1) / unit; }

// The matrices, with tensor maps for the tiles of a and b that TMA brings, and for those of c that
// it takes away.
template <class ATile, class BTile, class... CTiles>
struct Matrices {
    kittens::gl<kittens::bf16, 1, 1, -1, -1, ATile> a;
    kittens::gl<kittens::bf16, 1, 1, -1, -1, BTile> b;
    kittens::gl<kittens::bf16, 1, 1, -1, -1, CTiles...> c;

    explicit Matrices(const Call& call)
        : a(call.a, nullptr, nullptr, call.m, call.k),
          b(call.b, nullptr, nullptr, call.n, call.k),
          c(call.c, nullptr, nullptr, call.m, call.n) {}

    // How many tiles cover k.
    __host__ __device__ int steps() const { return ceil_div(a.cols(), ATile::cols); }
};

// A block for every tile of the output, rows first.
inline dim3 block_per_tile(const Call& call, int rows, int cols) {
    return {unsigned(ceil_div(call.m, rows)), unsigned(ceil_div(call.n, cols))};
}

// Calls a step's launcher. Returns nullptr, or what went wrong.
inline const char* attempt(const Call& call, void (*run)(const Call&)) {
    static thread_local std::string error;
    try {
        require(call.m > 0 && call.n > 0 && call.k > 0, "m, n and k must be positive");
        run(call);
        return nullptr;
    } catch (const std::exception& failure) {
        error = failure.what();
        return error.c_str();
    }
}
