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
using matrix = gl<bf16, 1, 1, -1, -1>;

__global__ void product(matrix a, matrix b, matrix c) {
    const int row = int(blockIdx.x), col = int(blockIdx.y);
    rt_bf<TILE, DEPTH> a_sliver, b_sliver;
    rt_fl<TILE, TILE> sum;
    zero(sum);
    for (int k = 0; k < ceil_div(a.cols(), DEPTH); ++k) {
        load(a_sliver, a, {row, k});
        load(b_sliver, b, {col, k});
        mma_ABt(sum, a_sliver, b_sliver, sum);
    }
    store(c, sum, {row, col});
}

void run(const Call& call) {
    const matrix a(call.a, nullptr, nullptr, call.m, call.k);
    const matrix b(call.b, nullptr, nullptr, call.n, call.k);
    const matrix c(call.c, nullptr, nullptr, call.m, call.n);
    launch(product, block_per_tile(call, TILE, TILE), WARP_THREADS, 1, 0, call.stream, a, b, c);
}

}  // namespace step_01

extern "C" const char* run_step_01(const Call& call) { return attempt(call, step_01::run); }
