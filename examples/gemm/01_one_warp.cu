// Step 1: a warp with tensor cores.
//
// Idea: a tile of the output lives in the registers of one warp. The warp walks along k, brings a
// sliver of a and one of b from global memory into registers, and multiplies them (mma.sync).
// Limit: every warp fetches all of its operands itself, and waits for each fetch.
// Sizes: any.
#include "call.cuh"

namespace step_01 {

using namespace kittens;

constexpr int TILE = 64, DEPTH = 16;

struct Globals {
    matrix<> a, b, c;
    int multiprocessors;
};

__global__ void product(const __grid_constant__ Globals g) {
    const int row = int(blockIdx.x), col = int(blockIdx.y);
    rt_bf<TILE, DEPTH> a_sliver, b_sliver;
    rt_fl<TILE, TILE> sum;
    zero(sum);
    for (int k = 0; k < ceil_div(g.a.cols(), DEPTH); ++k) {
        load(a_sliver, g.a, {row, k});
        load(b_sliver, g.b, {col, k});
        mma_ABt(sum, a_sliver, b_sliver, sum);
    }
    store(g.c, sum, {row, col});
}

void run(const Globals& g, cudaStream_t stream) {
    launch(product, block_per_tile(g.c, TILE, TILE), WARP_THREADS, 1, 0, stream, g);
}

}  // namespace step_01
