// What is around the kernels: the matrices as a kernel gets them, and how Python calls a step. Every
// step computes c = a b^T with a (m, k), b (n, k) and c (m, n), bf16, with sums in float.
#pragma once

#include "kittens/prototype.cuh"
#include "kittens/python.cuh"

__host__ __device__ constexpr int ceil_div(int size, int unit) { return (size + unit - 1) / unit; }

template <class... Tiles>
using matrix = kittens::gl<kittens::bf16, 1, 1, -1, -1, Tiles...>;

// The matrices, with tensor maps for the tiles of a and b that TMA brings, and for those of c that
// it takes away.
template <class ATile, class BTile, class... CTiles>
struct Matrices {
    matrix<ATile> a;
    matrix<BTile> b;
    matrix<CTiles...> c;
    int multiprocessors;  // of the GPU, for steps that need to know how many blocks run at once

    // How many tiles cover k.
    __host__ __device__ int steps() const { return ceil_div(a.cols(), ATile::cols); }
};

// A block for every tile of the output, rows first.
inline dim3 block_per_tile(const auto& c, int rows, int cols) {
    return {unsigned(ceil_div(c.rows(), rows)), unsigned(ceil_div(c.cols(), cols))};
}

// A step as a Python function.
template <class Globals>
void add_step(kittens::python::Module& m, const char* name,
              void (*run)(const Globals&, cudaStream_t)) {
    using namespace kittens::python;
    m.function(name, "c = a b^T", run, input("a", &Globals::a, "m k"),
               input("b", &Globals::b, "n k"), output("c", &Globals::c, "m n"),
               number("multiprocessors", &Globals::multiprocessors));
}
