// Step 5: two consumers, a tile twice as wide, and the producer's registers.
//
// Idea: one tile of 128 x 256 loads 48 KiB where two of 128 x 128 load 64. Its sums take 128
// registers of each thread of two warpgroups; these share b's tile, and take 64 rows of a's each.
// Registers are dealt out anew once the kernel runs: the producer's warpgroup gives away most of
// its own. block.cuh has the ring of step 4, for tiles of any size.
// Removes: a quarter of what is loaded from L2.
// Limit: a consumer waits for its product before it issues the next one.
// Sizes: k a multiple of 8.
#include "block.cuh"

namespace step_05 {

using namespace kittens;

constexpr int CONSUMERS = 2, ROWS = 64 * CONSUMERS, COLS = 256, DEPTH = 64, STAGES = 4;
constexpr int THREADS = (CONSUMERS + 1) * WARPGROUP_THREADS;
using a_tile = st_bf<ROWS, DEPTH>;
using b_tile = st_bf<COLS, DEPTH>;
using Globals = Matrices<a_tile, b_tile>;
using Shared = Stages<a_tile, b_tile, STAGES>;

__device__ void produce(const Globals& g, Shared& stages, int row, int col) {
    Shared::position at;
    for (int k = 0; k < g.steps(); ++k, at.advance()) stages.fill(at, g, row, col, k);
}

__device__ void consume(const Globals& g, Shared& stages, int row, int col) {
    const int id = warpgroup::groupid();
    Shared::position at;
    rt_fl<16, COLS> sum;
    for (int k = 0; k < g.steps(); ++k, at.advance()) {
        stages.multiply(at, id, sum, k > 0);
        warpgroup::mma_async_wait(sum);
        stages.release(at.stage);
    }
    warpgroup::store(g.c, sum, {CONSUMERS * row + id, col});
}

__global__ __launch_bounds__(THREADS, 1) void product(const __grid_constant__ Globals g) {
    shared_allocator allocator(shared_memory());
    Shared& stages = allocator.allocate<Shared>();
    if (threadIdx.x == 0) stages.ring.init(1, CONSUMERS);
    publish_semaphores();
    const int row = int(blockIdx.x), col = int(blockIdx.y);
    if (warpgroup::groupid() == CONSUMERS) {
        warpgroup::producer_registers();
        if (warpgroup::elect_leader()) produce(g, stages, row, col);
    } else {
        warpgroup::consumer_registers<CONSUMERS>();
        consume(g, stages, row, col);
    }
}

void run(const Globals& g, cudaStream_t stream) {
    launch(product, block_per_tile(g.c, ROWS, COLS), THREADS, 1, sizeof(Shared) + 1024, stream, g);
}

}  // namespace step_05
