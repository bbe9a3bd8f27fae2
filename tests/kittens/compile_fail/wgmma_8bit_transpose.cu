// error: 8-bit wgmma operands must have K contiguous
#include <kittens.cuh>

using namespace kittens;

__global__ void kernel() {
    shared_allocator al(shared_memory());
    auto& a = al.allocate<st_fp8e4m3<64, 64>>();
    auto& b = al.allocate<st_fp8e4m3<64, 64>>();
    rt_fl<16, 64> d;
    warpgroup::mm_AB(d, a, b);
}
