// error: TMA reduces no 8-bit floats
#include <kittens.cuh>

using namespace kittens;

using tile_type = st_fp8e4m3<64, 64>;
__global__ void kernel(const __grid_constant__ gl<fp8e4m3, -1, -1, -1, -1, tile_type> g) {
    shared_allocator al(shared_memory());
    tma::store_add_async(g, al.allocate<tile_type>(), {0, 0, 0, 0});
}
