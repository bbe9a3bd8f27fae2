// error: D and C of a product must be in row layout
#include <kittens.cuh>

using namespace kittens;

__global__ void kernel() {
    rt_fl<16, 16, col_l> d;
    rt_bf<16, 16> a, b;
    mma_ABt(d, a, b, d);
}
