// error: the columns of a group's register tile lie in several warps: reduce at warp
#include <kittens.cuh>

using namespace kittens;

__global__ void kernel() {
    rt_fl<16, 64> tile;
    decltype(tile)::row_vec v;
    warpgroup::col_sum(v, tile);
}
