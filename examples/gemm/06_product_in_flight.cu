// Step 6: one product stays in flight.
//
// Idea: a consumer issues the product of a stage, and only then waits for that of the stage before
// and hands that stage back. The tensor cores always have the next product in their queue.
// Removes: the gap between the end of a product and the issue of the next.
// Limit: blocks take tiles in an order that shares little through L2, and a block that stores its
// tile loads nothing meanwhile.
// Sizes: k a multiple of 8.
#include "block.cuh"

namespace step_06 {

using namespace kittens;
using namespace block;

using Globals = Matrices<a_tile, b_tile>;

__global__ __launch_bounds__(THREADS, 1) void product(const __grid_constant__ Globals g) {
    const int row = int(blockIdx.x), col = int(blockIdx.y);
    const auto produce = [&](stages& shared) {
        stages::position at;
        for (int k = 0; k < g.steps(); ++k, at.advance()) shared.fill(at, g, row, col, k);
    };
    const auto consume = [&](stages& shared) {
        const int id = warpgroup::groupid();
        stages::position at;
        rt_fl<16, COLS> sum;
        int previous = 0;
        for (int k = 0; k < g.steps(); ++k, at.advance()) {
            shared.multiply(at, id, sum, k > 0);
            warpgroup::mma_async_wait<1>();  // for all but the latest product
            if (k > 0) shared.release(previous);
            previous = at.stage;
        }
        warpgroup::mma_async_wait(sum);
        warpgroup::store(g.c, sum, {CONSUMERS * row + id, col});
    };
    by_role<stages>(produce, consume);
}

void run(const Globals& g, cudaStream_t stream) {
    launch(product, block_per_tile(g.c, ROWS, COLS), THREADS, 1, sizeof(stages) + 1024, stream, g);
}

}  // namespace step_06
