// error: this tile type is not among the global layout's TMA types
#include <kittens.cuh>

using namespace kittens;

__global__ void kernel(const __grid_constant__ gl<bf16, -1, -1, -1, -1, st_bf<64, 64>> g) {
    shared_allocator al(shared_memory());
    auto& tile = al.allocate<st_bf<64, 128>>();
    auto& arrived = al.allocate<semaphore>();
    tma::load_async(tile, g, {0, 0, 0, 0}, arrived);
}
