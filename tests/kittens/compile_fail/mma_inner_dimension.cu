// error: A and B must agree in K
#include <kittens.cuh>

using namespace kittens;

__global__ void kernel() {
    rt_fl<16, 16> d;
    rt_bf<16, 32> a;
    rt_bf<16, 16> b;
    mma_ABt(d, a, b, d);
}
