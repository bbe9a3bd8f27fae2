// error: the shared tile must have the register tile's columns and its rows times the
#include <kittens.cuh>

using namespace kittens;

__global__ void kernel() {
    shared_allocator al(shared_memory());
    auto& tile = al.allocate<st_bf<64, 64>>();
    rt_bf<32, 64> registers;
    warpgroup::load(registers, tile);
}
