// error: B's outer dimension must equal the accumulator's columns
#include <kittens.cuh>

using namespace kittens;

__global__ void kernel() {
    shared_allocator al(shared_memory());
    auto& a = al.allocate<st_bf<64, 64>>();
    auto& b = al.allocate<st_bf<64, 128>>();
    rt_fl<16, 64> d;
    warpgroup::mm_AB(d, a, b);
}
