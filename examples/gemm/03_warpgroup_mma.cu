// Step 3: a warpgroup multiplies out of shared memory.
//
// Idea: wgmma. Four warps issue one instruction together; the tensor cores read both operands from
// the swizzled tiles themselves, and only the sums are in registers. The tiles, and how they come,
// are those of step 2.
// Removes: the loads from shared memory into registers.
// Limit: copies and products take turns. Only another block of the multiprocessor fills the gaps.
// Sizes: k a multiple of 8.
#include "call.cuh"

namespace step_03 {

using namespace kittens;

constexpr int TILE = 128, DEPTH = 64, HALVES = TILE / 64;  // a warpgroup's product has 64 rows
using tile = st_bf<TILE, DEPTH>;
using Globals = Matrices<tile, tile>;

struct Shared {
    tile a, b;
    semaphore arrived;
};

__global__ __launch_bounds__(WARPGROUP_THREADS) void product(const __grid_constant__ Globals g) {
    shared_allocator allocator(shared_memory());
    Shared& shared = allocator.allocate<Shared>();
    if (threadIdx.x == 0) init_semaphore(shared.arrived, 1);
    publish_semaphores();

    const int row = int(blockIdx.x), col = int(blockIdx.y);
    rt_fl<16, TILE> sum[HALVES];  // a warp has 16 rows of each half
    for (auto& half : sum) zero(half);
    for (int k = 0; k < g.steps(); ++k) {
        if (threadIdx.x == 0) {
            tma::expect(shared.arrived, shared.a, shared.b);
            tma::load_async(shared.a, g.a, {row, k}, shared.arrived);
            tma::load_async(shared.b, g.b, {col, k}, shared.arrived);
        }
        wait(shared.arrived, k % 2);
        for (int i = 0; i < HALVES; ++i) {
            warpgroup::mma_ABt(sum[i], shared.a.subtile<64, DEPTH>({i, 0}), shared.b);
        }
        for (auto& half : sum) warpgroup::mma_async_wait(half);
        everyone::sync();  // all products have ended: the next copies may overwrite the tiles
    }
#pragma unroll
    for (int i = 0; i < HALVES; ++i) warpgroup::store(g.c, sum[i], {HALVES * row + i, col});
}

void run(const Globals& g, cudaStream_t stream) {
    launch(product, block_per_tile(g.c, TILE, TILE), WARPGROUP_THREADS, 1, sizeof(Shared) + 1024,
           stream, g);
}

}  // namespace step_03
