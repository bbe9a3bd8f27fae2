// A kernel of one's own, in one file: y = gelu(x w^T + bias), bf16 with float accumulation.
//
// A block computes 64 x 128 of y. Its fifth warp keeps three stages of x and w in flight by TMA;
// the first four, a warpgroup, multiply them with wgmma, add the bias, apply gelu and store the
// tile by TMA. Ragged edges need no code: TMA reads zeros and writes nothing outside.
//
// The last lines make it a function of a Python module on torch's tensors. The same source runs on a
// GPU (nvcc) and on a CPU (any C++ compiler, the emulator); run.py builds and calls both.
#include "kittens/python.cuh"

namespace {

using namespace kittens;

constexpr int STAGES = 3, THREADS = 5 * WARP_THREADS;
using x_tile = st_bf<64, 64>;
using w_tile = st_bf<128, 64>;
using y_tile = st_bf<64, 128>;

struct Globals {
    gl<bf16, 1, 1, -1, -1, x_tile> x;
    gl<bf16, 1, 1, -1, -1, w_tile> w;
    gl<bf16, 1, 1, -1, -1, y_tile> y;
    gl<float, 1, 1, 1, -1> bias;
};
struct Shared {
    x_tile x[STAGES];
    w_tile w[STAGES];
    y_tile y;
    semaphore filled[STAGES], free[STAGES];
};

// Stage and parity of the k-th step.
__device__ int stage_of(int k) { return k % STAGES; }
__device__ int phase_of(int k) { return k / STAGES % 2; }

__device__ void load(const Globals& g, Shared& shared, int row, int col, int steps) {
    for (int k = 0; k < steps; ++k) {
        const int s = stage_of(k);
        wait(shared.free[s], phase_of(k) ^ 1);  // the first round need not wait
        tma::expect(shared.filled[s], shared.x[s], shared.w[s]);
        tma::load_async(shared.x[s], g.x, {row, k}, shared.filled[s]);
        tma::load_async(shared.w[s], g.w, {col, k}, shared.filled[s]);
    }
}

__device__ void compute(const Globals& g, Shared& shared, int row, int col, int steps) {
    rt_fl<16, 128> sum;
    rt_fl<16, 128>::row_vec bias;
    warp::load(bias, g.bias, {0, col});
    warp::zero(sum);
    for (int k = 0; k < steps; ++k) {
        const int s = stage_of(k);
        wait(shared.filled[s], phase_of(k));
        warpgroup::mma_ABt(sum, shared.x[s], shared.w[s]);
        warpgroup::mma_async_wait(sum);
        if (warpgroup::laneid() == 0) arrive(shared.free[s]);
    }
    warp::add_col(sum, sum, bias);
    warp::apply(sum, sum, [](int, int, float v) {
        return 0.5f * v * (1.0f + arch::tanh_approx(0.7978845608f * (v + 0.044715f * v * v * v)));
    });
    warpgroup::store(shared.y, sum);
    warpgroup::sync(1);
    if (warpgroup::laneid() == 0) {
        tma::store_async(g.y, shared.y, {row, col});
        tma::store_async_read_wait();
    }
}

__global__ __launch_bounds__(THREADS) void gelu_linear_kernel(const __grid_constant__ Globals g) {
    shared_allocator al(shared_memory());
    Shared& shared = al.allocate<Shared>();
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            init_semaphore(shared.filled[s], 1);
            init_semaphore(shared.free[s], 1);
        }
        arch::mbarrier_init_fence();
    }
    arch::sync_block();
    const int row = int(blockIdx.y), col = int(blockIdx.x), steps = (g.x.cols() + 63) / 64;
    if (kittens::warpid() < 4)
        compute(g, shared, row, col, steps);
    else if (laneid() == 0)
        load(g, shared, row, col, steps);
}

// Runs it for the tensors of a call.
void gelu_linear(const Globals& g, cudaStream_t stream) {
    const dim3 blocks(unsigned(g.y.cols() + 127) / 128, unsigned(g.y.rows() + 63) / 64);
    launch(gelu_linear_kernel, blocks, THREADS, 1, sizeof(Shared) + 1024, stream, g);
}

}  // namespace

KITTENS_PYTHON_MODULE(TORCH_EXTENSION_NAME, m) {
    using namespace kittens::python;
    m.function("gelu_linear", "y = gelu(x w^T + bias)", gelu_linear, input("x", &Globals::x, "m k"),
               input("w", &Globals::w, "n k"), input("bias", &Globals::bias, "n"),
               output("y", &Globals::y, "m n"));
}
