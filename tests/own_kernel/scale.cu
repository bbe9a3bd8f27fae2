// A kernel of a user's, with every kind of argument: y = factor x[:rows], and total += y, where
// every row is a multiple of 16 wide. A warp takes 16 rows of 64.
#include "kittens/python.cuh"

namespace {

using namespace kittens;

struct Globals {
    gl<bf16, 1, -1, -1, 64> x;
    gl<bf16, 1, -1, -1, 64> y;
    float factor;
    int rows;
    bool twice;
    gl<float, 1, -1, -1, 64> total;
};

__global__ void scale_kernel(const __grid_constant__ Globals g) {
    rt_fl<16, 64> values, total;
    const int head = int(blockIdx.y), band = int(blockIdx.x);
    load(values, g.x, {0, head, band, 0});
    mul(values, values, g.twice ? 2 * g.factor : g.factor);
    warp::apply(values, values,
                [&](int row, int, float v) { return 16 * band + row < g.rows ? v : 0.0f; });
    store(g.y, values, {0, head, band, 0});
    load(total, g.total, {0, head, band, 0});
    add(total, total, values);
    store(g.total, total, {0, head, band, 0});
}

void scale(const Globals& g, cudaStream_t stream) {
    if (g.rows < 0) throw std::invalid_argument("rows must not be negative");
    const dim3 blocks(unsigned(g.x.rows() + 15) / 16, unsigned(g.x.depth()));
    launch(scale_kernel, blocks, WARP_THREADS, 1, 0, stream, g);
}

// A mistake: it writes to its input.
struct Wrong {
    gl<float, 1, 1, -1, 64> x;
    gl<float, 1, 1, -1, 64> y;
};
__global__ void wrong_kernel(const __grid_constant__ Wrong g) {
    rt_fl<16, 64> values;
    load(values, g.x, {0, 0});
    store(g.x, values, {0, 0});
}
void wrong(const Wrong& g, cudaStream_t stream) {
    launch(wrong_kernel, 1, WARP_THREADS, 1, 0, stream, g);
}

}  // namespace

KITTENS_PYTHON_MODULE(TORCH_EXTENSION_NAME, m) {
    using namespace kittens::python;
    m.function(
        "scale", "y = factor x, and total += y", scale, input("x", &Globals::x, "heads length 64"),
        in_place("total", &Globals::total, "heads length _"), number("factor", &Globals::factor),
        number("rows", &Globals::rows, 1 << 30), number("twice", &Globals::twice, false),
        output("y", &Globals::y, "heads length 64"));
    m.function("wrong", "writes to x", wrong, input("x", &Wrong::x, "rows 64"),
               output("y", &Wrong::y, "other 64"));
}
