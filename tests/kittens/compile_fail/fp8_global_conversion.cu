// error: loads and stores convert between float, bf16 and half only; use copy() for fp8
#include <kittens.cuh>

using namespace kittens;

__global__ void kernel(const __grid_constant__ gl<float, -1, -1, -1, -1> g) {
    rt_fp8e4m3<32, 32> tile;
    load(tile, g, {0, 0, 0, 0});
}
