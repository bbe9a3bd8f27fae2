// Step 4: a ring of stages between a producer and a consumer.
//
// Idea: warp specialisation. A fifth warp only asks TMA for tiles, up to three steps of k ahead;
// the warpgroup only multiplies. They meet at the semaphores of the ring, two for each stage: its
// tiles have arrived, its product is finished.
// Removes: the wait for copies between two products.
// Limit: a tile of 128 x 128 loads 32 KiB for 2 million multiplications, which asks much of L2.
// Sizes: k a multiple of 8.
#include "call.cuh"

namespace step_04 {

using namespace kittens;

constexpr int TILE = 128, DEPTH = 64, HALVES = TILE / 64, STAGES = 3;
constexpr int THREADS = WARPGROUP_THREADS + WARP_THREADS, BLOCKS_AT_ONCE = 2;
using tile = st_bf<TILE, DEPTH>;
using Globals = Matrices<tile, tile>;

struct Shared {
    tile a[STAGES], b[STAGES];
    ring<STAGES> stages;
};

__device__ void produce(const Globals& g, Shared& shared, int row, int col) {
    ring<STAGES>::position at;
    for (int k = 0; k < g.steps(); ++k, at.advance()) {
        semaphore& arrived = shared.stages.arrived[at.stage];
        shared.stages.wait_finished(at);
        tma::expect(arrived, shared.a[at.stage], shared.b[at.stage]);
        tma::load_async(shared.a[at.stage], g.a, {row, k}, arrived);
        tma::load_async(shared.b[at.stage], g.b, {col, k}, arrived);
    }
}

__device__ void consume(const Globals& g, Shared& shared, int row, int col) {
    ring<STAGES>::position at;
    rt_fl<16, TILE> sum[HALVES];
    for (auto& half : sum) zero(half);
    for (int k = 0; k < g.steps(); ++k, at.advance()) {
        shared.stages.wait_arrived(at);
        for (int i = 0; i < HALVES; ++i) {
            warpgroup::mma_ABt(sum[i], shared.a[at.stage].subtile<64, DEPTH>({i, 0}),
                               shared.b[at.stage]);
        }
        for (auto& half : sum) warpgroup::mma_async_wait(half);
        warpgroup::arrive(shared.stages.finished[at.stage]);
    }
#pragma unroll
    for (int i = 0; i < HALVES; ++i) warpgroup::store(g.c, sum[i], {HALVES * row + i, col});
}

__global__ __launch_bounds__(THREADS,
                             BLOCKS_AT_ONCE) void product(const __grid_constant__ Globals g) {
    shared_allocator allocator(shared_memory());
    Shared& shared = allocator.allocate<Shared>();
    if (threadIdx.x == 0) shared.stages.init(1, 1);
    publish_semaphores();
    const int row = int(blockIdx.x), col = int(blockIdx.y);
    if (warpgroup::groupid() == 0) {
        consume(g, shared, row, col);
    } else if (warp::elect_leader()) {
        produce(g, shared, row, col);
    }
}

void run(const Globals& g, cudaStream_t stream) {
    launch(product, block_per_tile(g.c, TILE, TILE), THREADS, 1, sizeof(Shared) + 1024, stream, g);
}

}  // namespace step_04
