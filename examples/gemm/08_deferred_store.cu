// Step 8: a tile leaves while the next one is computed.
//
// Idea: a finished tile is rounded to bf16, which halves it, and stays in registers. In each of the
// next tile's first steps, after its product has been issued, a warp puts 64 columns of its 16 rows
// into a buffer in shared memory and lets TMA store them. Every warp has two buffers, and waits for
// no other warp.
// Removes: the time in which consumers stored and the tensor cores idled.
// This is the design of the package's own kernel, csrc/gemm/dense/persistent_sm90.cuh.
// Sizes: k and n multiples of 8, since TMA stores, too.
#include "block.cuh"

namespace step_08 {

using namespace kittens;
using namespace block;

constexpr int GROUP = 8, PIECE = 64, PIECES = COLS / PIECE;
using piece_tile = st_bf<16, PIECE>;
using Globals = Matrices<a_tile, b_tile, piece_tile>;

struct Shared : stages {
    alignas(1024) piece_tile out[CONSUMERS * WARPGROUP_WARPS][2];
};

// A warp's 16 rows of a finished tile, from element (row, col) of c on.
struct Finished {
    rt_bf<16, COLS> values;
    int row, col;
    bool any = false;

    // By the warp: rounds the sums, to be sent later.
    __device__ void keep(const rt_fl<16, COLS>& sum, int at_row, int at_col) {
        copy(values, sum);
        row = at_row, col = at_col;
        any = true;
    }
    // By the warp. TMA may still be reading the other buffer.
    __device__ void send(const Globals& g, Shared& shared, int piece) const {
        piece_tile& buffer = shared.out[warpid()][piece % 2];
        rt_bf<16, PIECE> part;
        take_columns(part, values, piece * PIECE);
        warp::tma::store_async_read_wait<1>();
        warp::sync();
        store(buffer, part);
        warp::sync();
        warp::tma::store_async(g.c, buffer, elements(row, col + piece * PIECE));
    }
};

__device__ void for_each_tile(const Globals& g, auto work) {
    const schedule::TileGrid grid{ceil_div(g.c.rows(), ROWS), ceil_div(g.c.cols(), COLS)};
    for (int i = int(blockIdx.x); i < grid.size(); i += int(gridDim.x)) {
        const schedule::Tile tile = schedule::grouped_raster(i, grid, GROUP);
        work(tile.row, tile.col);
    }
}

__global__ __launch_bounds__(THREADS, 1) void product(const __grid_constant__ Globals g) {
    const auto produce = [&](Shared& shared) {
        stages::position at;
        for_each_tile(g, [&](int row, int col) {
            for (int k = 0; k < g.steps(); ++k, at.advance()) shared.fill(at, g, row, col, k);
        });
    };
    const auto consume = [&](Shared& shared) {
        const int id = warpgroup::groupid();
        stages::position at;
        rt_fl<16, COLS> sum;
        Finished last;
        // Those pieces of the last tile whose turn it is; the index is a constant, as registers'
        // must be.
        const auto send = [&](int first, int end) {
#pragma unroll
            for (int piece = 0; piece < PIECES; ++piece) {
                if (last.any && piece >= first && piece < end) last.send(g, shared, piece);
            }
        };
        for_each_tile(g, [&](int row, int col) {
            int previous = 0;
            for (int k = 0; k < g.steps(); ++k, at.advance()) {
                shared.multiply(at, id, sum, k > 0);
                if (k < PIECES) send(k, k + 1);
                warpgroup::mma_async_wait<1>();
                if (k > 0) shared.release(previous);
                previous = at.stage;
            }
            warpgroup::mma_async_wait(sum);
            shared.release(previous);
            send(g.steps(), PIECES);  // where there were fewer steps than pieces
            last.keep(sum, ROWS * row + 16 * warpid(), COLS * col);
        });
        send(0, PIECES);
        warp::tma::store_async_read_wait();  // shared memory ends with the block
    };
    by_role<Shared>(produce, consume);
}

void run(const Globals& g, cudaStream_t stream) {
    const int tiles = ceil_div(g.c.rows(), ROWS) * ceil_div(g.c.cols(), COLS);
    launch(product, schedule::persistent_blocks(tiles, g.multiprocessors), THREADS, 1,
           sizeof(Shared) + 1024, stream, g);
}

}  // namespace step_08
