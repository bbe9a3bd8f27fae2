// A matrix product at the speed of the hardware in a hundred lines: C = A B in bf16 with fp32
// accumulation; M is any number, N and K are multiples of 8, as TMA needs. Each block of 12 warps
// makes tiles of 128 x 256 of C: two consumer warpgroups hold 64 x 256 each in registers, one
// producer warpgroup keeps four stages of A and B in flight.
//
//   nvcc -std=c++20 -O3 --expt-relaxed-constexpr -gencode arch=compute_90a,code=sm_90a -I kittens
//        -o gemm_in_100_lines examples/gemm_in_100_lines.cu
//   ./gemm_in_100_lines 8192 8192 8192
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "kittens.cuh"
#include "prototype.cuh"

using namespace kittens;
using namespace kittens::prototype::lcf;

struct Gemm {
    using a_tile = st_bf<64, 64>;
    using b_tile = st_bf<64, 256>;
    using c_tile = st_bf<64, 256>;
    struct layout {
        struct globals {
            gl<bf16, 1, 1, -1, -1, a_tile> a;
            gl<bf16, 1, 1, -1, -1, b_tile> b, c;
        };
        struct input_block {
            a_tile a[2];
            b_tile b;
        };
        struct finish_block {
            c_tile c[2];
        };
        struct common_state {
            schedule::Tile tile;
        };
        struct consumer_state {
            rt_fl<16, 256> sum;
        };
    };
    static constexpr int NUM_CONSUMER_WARPS = 8, INPUT_PIPE_STAGES = 4,
                         PRODUCER_BARRIER_ARRIVALS = 1;

    __host__ __device__ static schedule::TileGrid tiles(const layout::globals& g) {
        return {(g.c.rows() + 127) / 128, (g.c.cols() + 255) / 256};
    }
    __device__ static void common_setup(common_setup_args<layout> args) {
        const auto grid = tiles(args.globals);
        const int task =
            schedule::persistent_task(args.task_iter, blockIdx.x, gridDim.x, grid.size());
        if (task < 0) return;  // num_iters stays -1: this block is done
        args.common.tile = schedule::grouped_raster(task, grid, 8);
        args.num_iters = (args.globals.a.cols() + 63) / 64;
    }
    struct producer {
        __device__ static void setup(producer_setup_args<layout>) {
            warpgroup::decrease_registers<40>();
        }
        __device__ static void load(producer_load_args<layout> args) {
            if (warpgroup::laneid() != 0) return;
            const auto [row, col, batch] = args.common.tile;
            tma::expect(args.inputs_arrived, args.input);
            for (int i = 0; i < 2; ++i)
                tma::load_async(args.input.a[i], args.globals.a, {2 * row + i, args.iter},
                                args.inputs_arrived);
            tma::load_async(args.input.b, args.globals.b, {args.iter, col}, args.inputs_arrived);
        }
    };
    struct consumer {
        __device__ static void setup(consumer_setup_args<layout> args) {
            warpgroup::increase_registers<232>();
            warp::zero(args.state.sum);
        }
        __device__ static void compute(consumer_compute_args<layout> args) {
            warpgroup::mma_AB(args.state.sum, args.input.a[warpgroup::groupid()], args.input.b);
            warpgroup::mma_async_wait(args.state.sum);
            if (warp::laneid() == 0) arrive(args.inputs_finished);  // the stage may be loaded again
        }
        __device__ static void finish(consumer_finish_args<layout> args) {
            const int id = warpgroup::groupid();
            warpgroup::store(args.finish.c[id], args.state.sum);
            warpgroup::sync(id + 1);
            if (warpgroup::laneid() == 0) {
                tma::store_async(args.globals.c, args.finish.c[id],
                                 {2 * args.common.tile.row + id, args.common.tile.col});
                tma::store_async_read_wait();  // the finish block lies over input stages
            }
            if (warp::laneid() == 0) arrive(args.finish_finished);
        }
    };
};

int main(int argc, char** argv) {
    size_t size[3] = {8192, 8192, 8192};  // M, N, K
    for (int i = 1; i < argc && i <= 3; ++i) size[i - 1] = std::strtoull(argv[i], nullptr, 10);
    const auto [M, N, K] = size;
    std::vector<bf16> a(M * K), b(K * N), c(M * N);
    for (size_t i = 0; i < a.size(); ++i)
        a[i] = __float2bfloat16(float(int(i * 2654435761u >> 16) % 17 - 8) / 8);
    for (size_t i = 0; i < b.size(); ++i)
        b[i] = __float2bfloat16(float(int(i * 2246822519u >> 16) % 17 - 8) / 8);
    bf16 *A, *B, *C;
    host::check(cudaMalloc(&A, 2 * a.size()), "A");
    host::check(cudaMalloc(&B, 2 * b.size()), "B");
    host::check(cudaMalloc(&C, 2 * c.size()), "C");
    host::check(cudaMemcpy(A, a.data(), 2 * a.size(), cudaMemcpyHostToDevice), "copy of A");
    host::check(cudaMemcpy(B, b.data(), 2 * b.size(), cudaMemcpyHostToDevice), "copy of B");
    int processors = 0;
    host::check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, 0), "device");

    const Gemm::layout::globals g{{A, 1, 1, M, K}, {B, 1, 1, K, N}, {C, 1, 1, M, N}};
    const int blocks = schedule::persistent_blocks(Gemm::tiles(g).size(), processors);
    cudaEvent_t start, stop;
    cudaEventCreate(&start), cudaEventCreate(&stop);
    const int repeats = 20;
    for (int i = -3; i < repeats; ++i) {  // three to warm up
        if (i == 0) cudaEventRecord(start);
        launch<Gemm>(blocks, nullptr, g);
    }
    cudaEventRecord(stop);
    host::check(cudaMemcpy(c.data(), C, 2 * c.size(), cudaMemcpyDeviceToHost), "copy of C");
    float ms = 0;
    cudaEventElapsedTime(&ms, start, stop);

    double worst = 0;
    for (size_t i = 0; i < 2000; ++i) {  // some elements, in double precision
        const size_t row = i * 7919 % M, col = i * 104729 % N;
        double sum = 0;
        for (size_t k = 0; k < K; ++k)
            sum += double(float(a[row * K + k])) * double(float(b[k * N + col]));
        worst =
            std::max(worst, std::abs(sum - double(float(c[row * N + col]))) / (1 + std::abs(sum)));
    }
    std::printf("%zu x %zu x %zu: %.0f GFLOP/s, worst relative error of 2000 elements %.1e\n", M, N,
                K, 2e-6 * M * N * K * repeats / ms, worst);
    return worst < 1e-2 ? 0 : 1;
}
