// error: the accumulator of a warpgroup product has 16 rows per warp, in row layout
#include <kittens.cuh>

using namespace kittens;

__global__ void kernel() {
    shared_allocator al(shared_memory());
    auto& a = al.allocate<st_bf<64, 64>>();
    auto& b = al.allocate<st_bf<64, 64>>();
    rt_fl<64, 64> d;
    warpgroup::mm_AB(d, a, b);
}
