// error: A must be in row layout (row_l) for mma_AB and mma_ABt
#include <kittens.cuh>

using namespace kittens;

__global__ void kernel() {
    rt_fl<16, 16> d;
    rt_bf<16, 16, col_l> a;
    rt_bf<16, 16, col_l> b;
    mma_AB(d, a, b, d);
}
