// Results of single tensor-core instructions, D = C + A B^T on 64 x 64 products of one step along
// K, for the test of the emulator's arithmetic (tests/test_tensor_core.py):
//   instructions <kind> <how> <products> <file of A, B, C> <file of D>
// where kind is an index into KINDS below and how 0 for wgmma, 1 for mma.sync.
#include <kittens.cuh>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>

#include "device_memory.h"

namespace {

using namespace kittens;
namespace device = unit::device;

template <class T>
using products_of = gl<T, 1, -1, -1, -1>;

template <class D, class A, class B>
struct Globals {
    products_of<A> a;
    products_of<B> b;
    products_of<D> c, d;
};

template <class D, class A, class B>
__global__ void __launch_bounds__(128) wgmma_kernel(const __grid_constant__ Globals<D, A, B> g) {
    constexpr int K = 32 / int(sizeof(A));
    const int i = int(blockIdx.x);
    shared_allocator<> al(shared_memory());
    auto& a = al.allocate<st<A, 64, K>>();
    auto& b = al.allocate<st<B, 64, K>>();
    warpgroup::load(a, g.a, {0, i, 0, 0});
    warpgroup::load(b, g.b, {0, i, 0, 0});
    rt<D, 16, 64> product;
    warpgroup::load(product, g.c, {0, i, 0, 0});
    arch::fence_async_shared();
    arch::sync_block();
    warpgroup::mma_ABt(product, a, b);
    warpgroup::mma_async_wait(product);
    warpgroup::store(g.d, product, {0, i, 0, 0});
}
template <class D, class A, class B>
__global__ void __launch_bounds__(128) mma_kernel(const __grid_constant__ Globals<D, A, B> g) {
    constexpr int K = 32 / int(sizeof(A));
    const int i = int(blockIdx.x);
    rt<A, 16, K> a;
    rt<B, 64, K> b;
    rt<D, 16, 64> product;
    warpgroup::load(a, g.a, {0, i, 0, 0});
    warp::load(b, g.b, {0, i, 0, 0});
    warpgroup::load(product, g.c, {0, i, 0, 0});
    mma_ABt(product, a, b, product);
    warpgroup::store(g.d, product, {0, i, 0, 0});
}

template <class D, class A, class B>
void run(int how, int products, const std::vector<uint8_t>& input, std::vector<uint8_t>& output) {
    constexpr int K = 32 / int(sizeof(A));
    const size_t operand = size_t(products) * 64 * 32,
                 sums = size_t(products) * 64 * 64 * sizeof(D);
    std::vector<uint8_t> arena(input);
    if (arena.size() != 2 * operand + sums) throw std::runtime_error("the input's size is wrong");
    arena.resize(arena.size() + sums);
    device::upload(arena);
    uint8_t* a = device::arena();
    const auto layout = [&]<class T>(T*, size_t offset, int cols) {
        return products_of<T>(reinterpret_cast<T*>(a + offset), nullptr, products, 64, cols);
    };
    const Globals<D, A, B> g{layout(static_cast<A*>(nullptr), 0, K),
                             layout(static_cast<B*>(nullptr), operand, K),
                             layout(static_cast<D*>(nullptr), 2 * operand, 64),
                             layout(static_cast<D*>(nullptr), 2 * operand + sums, 64)};
    if (how == 0) {
        launch(wgmma_kernel<D, A, B>, products, 128, 1, 16384, nullptr, g);
    } else if constexpr (sizeof(D) == 4 || sizeof(A) == 2) {
        launch(mma_kernel<D, A, B>, products, 128, 1, 0, nullptr, g);
    } else {
        throw std::runtime_error("mma.sync of 8-bit operands has no half accumulator here");
    }
    device::wait();
    device::download(arena);
    output.assign(arena.end() - static_cast<ptrdiff_t>(sums), arena.end());
}

using Run = void (*)(int, int, const std::vector<uint8_t>&, std::vector<uint8_t>&);
constexpr Run KINDS[] = {
    run<float, bf16, bf16>,       run<float, half, half>,       run<float, fp8e4m3, fp8e4m3>,
    run<float, fp8e4m3, fp8e5m2>, run<float, fp8e5m2, fp8e4m3>, run<float, fp8e5m2, fp8e5m2>,
    run<half, half, half>,        run<half, fp8e4m3, fp8e4m3>,
};

}  // namespace

int main(int count, char** arguments) {
    if (count != 6) return 2;
    try {
        std::ifstream in(arguments[4], std::ios::binary);
        const std::vector<uint8_t> input{std::istreambuf_iterator<char>(in), {}};
        std::vector<uint8_t> output;
        KINDS[std::atoi(arguments[1])](std::atoi(arguments[2]), std::atoi(arguments[3]), input,
                                       output);
        std::ofstream(arguments[5], std::ios::binary)
            .write(reinterpret_cast<const char*>(output.data()),
                   static_cast<std::streamsize>(output.size()));
    } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
}
