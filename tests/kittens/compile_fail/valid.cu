// no error: the forms that the other files get wrong.
#include <kittens.cuh>

using namespace kittens;

__global__ void kernel(const __grid_constant__ gl<bf16, -1, -1, -1, -1, st_bf<64, 64>> g) {
    shared_allocator al(shared_memory());
    auto& a = al.allocate<st_bf<64, 64>>();
    auto& b = al.allocate<st_bf<64, 64>>();
    auto& arrived = al.allocate<semaphore>();
    tma::load_async(a, g, {0, 0, 0, 0}, arrived);
    rt_fl<16, 64> d;
    warpgroup::mm_AB(d, a, b);
    warpgroup::mma_async_wait(d);
    rt_bf<16, 64> converted;
    copy(converted, d);
    warpgroup::store(a, converted);
    rt_fl<16, 16> product;
    rt_bf<16, 16> left;
    rt_bf<16, 16, col_l> right;
    mma_AB(product, left, right, product);
}
