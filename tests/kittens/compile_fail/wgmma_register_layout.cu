// error: a register A has 16 rows per warp and K columns, in row layout
#include <kittens.cuh>

using namespace kittens;

__global__ void kernel() {
    shared_allocator al(shared_memory());
    auto& b = al.allocate<st_bf<64, 64>>();
    rt_bf<16, 64, col_l> a;
    rt_fl<16, 64> d;
    warpgroup::mm_AB(d, a, b);
}
