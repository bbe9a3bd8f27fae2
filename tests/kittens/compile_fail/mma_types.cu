// error: mma takes bf16 with bf16, half with half or 8-bit floats into float
#include <kittens.cuh>

using namespace kittens;

__global__ void kernel() {
    rt_fl<16, 16> d;
    rt_bf<16, 16> a;
    rt_hf<16, 16> b;
    mma_ABt(d, a, b, d);
}
