// Step 7: persistent blocks in a grouped raster.
//
// Idea: a block for each multiprocessor, which takes one tile after the other. The producer runs
// ahead into the next tile while the consumers store the last one. The order of tiles is ours now:
// groups of rows of tiles, so that those at work at one time form a rectangle that is about square
// and read as few different rows of a and of b as can be.
// Removes: the empty ring at the start of a tile, and loads that miss L2.
// Limit: the tensor cores idle while the consumers store a tile.
// Sizes: k a multiple of 8.
#include "block.cuh"

namespace step_07 {

using namespace kittens;
using namespace block;

constexpr int GROUP = 8;  // rows of tiles
using Globals = Matrices<a_tile, b_tile>;

// Calls work(row, col) for each tile of this block.
__device__ void for_each_tile(const Globals& g, auto work) {
    const schedule::TileGrid grid{ceil_div(g.c.rows(), ROWS), ceil_div(g.c.cols(), COLS)};
    for (int i = int(blockIdx.x); i < grid.size(); i += int(gridDim.x)) {
        const schedule::Tile tile = schedule::grouped_raster(i, grid, GROUP);
        work(tile.row, tile.col);
    }
}

__global__ __launch_bounds__(THREADS, 1) void product(const __grid_constant__ Globals g) {
    const auto produce = [&](stages& shared) {
        stages::position at;
        for_each_tile(g, [&](int row, int col) {
            for (int k = 0; k < g.steps(); ++k, at.advance()) shared.fill(at, g, row, col, k);
        });
    };
    const auto consume = [&](stages& shared) {
        const int id = warpgroup::groupid();
        stages::position at;
        for_each_tile(g, [&](int row, int col) {
            rt_fl<16, COLS> sum;
            int previous = 0;
            for (int k = 0; k < g.steps(); ++k, at.advance()) {
                shared.multiply(at, id, sum, k > 0);
                warpgroup::mma_async_wait<1>();
                if (k > 0) shared.release(previous);
                previous = at.stage;
            }
            warpgroup::mma_async_wait(sum);
            shared.release(previous);
            warpgroup::store(g.c, sum, {CONSUMERS * row + id, col});
        });
    };
    by_role<stages>(produce, consume);
}

void run(const Globals& g, cudaStream_t stream) {
    const int tiles = ceil_div(g.c.rows(), ROWS) * ceil_div(g.c.cols(), COLS);
    launch(product, schedule::persistent_blocks(tiles, g.multiprocessors), THREADS, 1,
           sizeof(stages) + 1024, stream, g);
}

}  // namespace step_07
