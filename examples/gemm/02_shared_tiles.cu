// Step 2: tiles in shared memory, brought by TMA.
//
// Idea: four warps share what they multiply. One thread asks the copy engine for a 128 x 64 tile of
// a and one of b; each warp then reads its half of both from shared memory, so that every element
// that comes from global memory is used by two warps. TMA swizzles the tiles, which keeps these
// reads free of bank conflicts, and brings zeros where a tile reaches beyond the edges.
// Removes: the fetches of each warp on its own.
// Limit: mma.sync takes registers, so each operand is loaded from shared memory before its product.
// Sizes: k a multiple of 8, since to TMA rows begin at multiples of 16 bytes.
#include "call.cuh"

namespace step_02 {

using namespace kittens;

constexpr int TILE = 128, DEPTH = 64, WARP_TILE = 64, SLIVER = 16, THREADS = 4 * WARP_THREADS;
using tile = st_bf<TILE, DEPTH>;
using Globals = Matrices<tile, tile>;

struct Shared {
    tile a, b;
    semaphore arrived;
};

__global__ __launch_bounds__(THREADS) void product(const __grid_constant__ Globals g) {
    shared_allocator allocator(shared_memory());
    Shared& shared = allocator.allocate<Shared>();
    if (threadIdx.x == 0) init_semaphore(shared.arrived, 1);
    publish_semaphores();

    const int row = int(blockIdx.x), col = int(blockIdx.y);
    const int in_row = warpid() / 2, in_col = warpid() % 2;
    rt_bf<WARP_TILE, SLIVER> a, b;
    rt_fl<WARP_TILE, WARP_TILE> sum;
    zero(sum);
    for (int k = 0; k < g.steps(); ++k) {
        if (threadIdx.x == 0) {
            tma::expect(shared.arrived, shared.a, shared.b);
            tma::load_async(shared.a, g.a, {row, k}, shared.arrived);
            tma::load_async(shared.b, g.b, {col, k}, shared.arrived);
        }
        wait(shared.arrived, k % 2);
        for (int i = 0; i < DEPTH / SLIVER; ++i) {
            load(a, shared.a.subtile<WARP_TILE, SLIVER>({in_row, i}));
            load(b, shared.b.subtile<WARP_TILE, SLIVER>({in_col, i}));
            mma_ABt(sum, a, b, sum);
        }
        everyone::sync();  // all have read: the next copies may overwrite the tiles
    }
    store(g.c, sum, {2 * row + in_row, 2 * col + in_col});
}

void run(const Globals& g, cudaStream_t stream) {
    launch(product, block_per_tile(g.c, TILE, TILE), THREADS, 1, sizeof(Shared) + 1024, stream, g);
}

}  // namespace step_02
