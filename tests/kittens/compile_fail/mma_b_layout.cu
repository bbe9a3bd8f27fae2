// error: B must be in column layout (col_l) for mma_AB and mma_AtB
#include <kittens.cuh>

using namespace kittens;

__global__ void kernel() {
    rt_fl<16, 16> d;
    rt_bf<16, 16> a, b;
    mma_AB(d, a, b, d);
}
