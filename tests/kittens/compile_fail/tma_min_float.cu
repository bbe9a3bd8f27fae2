// error: TMA has min and max for 16-bit floats only
#include <kittens.cuh>

using namespace kittens;

__global__ void kernel(const __grid_constant__ gl<float, -1, -1, -1, -1, st_fl<64, 64>> g) {
    shared_allocator al(shared_memory());
    tma::store_min_async(g, al.allocate<st_fl<64, 64>>(), {0, 0, 0, 0});
}
