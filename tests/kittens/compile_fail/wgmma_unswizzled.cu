// error: a shared operand of wgmma must be a swizzled tile
#include <kittens.cuh>

using namespace kittens;

__global__ void kernel() {
    shared_allocator al(shared_memory());
    auto& a = al.allocate<st_bf<64, 64>>();
    auto& b = al.allocate<st_bf<64, 64, false>>();
    rt_fl<16, 64> d;
    warpgroup::mm_ABt(d, a, b);
}
