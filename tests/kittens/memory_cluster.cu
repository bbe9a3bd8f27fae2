// Memory of several blocks of a cluster: TMA multicast, bulk copies from block to block, ordinary
// loads and stores of another block's shared memory.
#include "memory_tile_tma.cuh"

namespace unit {
namespace {

// Every block loads its tile of the source and sends it to the blocks of `mask`, itself included or
// not. Output (receiver, sender): the tile, or zeros where nothing was sent.
template <class ST, int BLOCKS>
__global__ void multicast_kernel(const __grid_constant__ tma_global<ST, 2> source,
                                 const __grid_constant__ global<typename ST::T> seen,
                                 const unsigned mask) {
    using T = typename ST::T;
    shared_allocator<> al(shared_memory());
    ST(&tiles)[BLOCKS] = al.allocate<ST, BLOCKS>();
    semaphore& arrived = al.allocate<semaphore>();
    const int rank = kittens::cluster::rank();
    const bool receives = mask >> rank & 1;
    for (ST& tile : tiles) {
        for_each_place<ST>([&](int row, int col) { tile.set(row, col, convert<T>(0.0f)); });
    }
    arch::fence_async_shared();
    if (threadIdx.x == 0) {
        init_semaphore(arrived, 0, 1);
        arch::mbarrier_init_fence();
        if (receives) tma::expect(arrived, tiles);
    }
    kittens::cluster::sync();
    if (threadIdx.x == 0) {
        tma::cluster::load_async(tiles[rank], source, {0, 0, rank, 0}, arrived,
                                 static_cast<uint16_t>(mask));
    }
    if (receives) wait(arrived, 0);
    for (int i = 0; i < BLOCKS; ++i) {
        for_each_place<ST>([&](int row, int col) {
            const int to = (rank * BLOCKS + i) * ST::rows + row;
            arch::store_global(seen.at(elements(to, col)), tiles[i].get(row, col));
        });
    }
    kittens::cluster::sync();
}

template <class ST, int BLOCKS>
void multicast_cases() {
    using T = typename ST::T;
    for (unsigned mask = 1; mask < 1u << BLOCKS; mask += BLOCKS > 2 ? 3 : 1) {
        run(text("multicast %d blocks to %#x %s", BLOCKS, mask, tile_name<ST>().c_str()),
            [&](Case& c) {
                const size_t tile = ST::num_elements;
                const Values source = c.uniform(type_of<T>, BLOCKS * tile, -8, 8);
                T* source_data = c.input<T>("source", source);
                T* seen = c.output<T>("seen", BLOCKS * BLOCKS * tile);
                Values expected(BLOCKS * BLOCKS * tile, 0.0);
                for (int rank = 0; rank < BLOCKS; ++rank) {
                    if (mask >> rank & 1) {
                        std::copy(source.begin(), source.end(),
                                  expected.begin() + static_cast<ptrdiff_t>(rank * BLOCKS * tile));
                    }
                }
                c.expect(expected, bit_exact, ST::cols);
                c.launch([&] {
                    kittens::launch(
                        multicast_kernel<ST, BLOCKS>, BLOCKS, 128, BLOCKS,
                        BLOCKS * sizeof(ST) + 2048, nullptr,
                        make_global<tma_global<ST, 2>>(
                            source_data, View::contiguous(1, 1, BLOCKS * ST::rows, ST::cols)),
                        matrix(seen, BLOCKS * BLOCKS * ST::rows, ST::cols), mask);
                });
            });
    }
}

enum class Remote { load, store, bulk };

// Every block hands its object to the next one, or fetches the previous one's.
template <int WARPS, class O>
__global__ void remote_kernel(const __grid_constant__ global<typename O::T> source,
                              const __grid_constant__ global<typename O::T> seen,
                              const Remote how) {
    using G = group<WARPS>;
    shared_allocator<> al(shared_memory());
    O& own = al.allocate<O>();
    O& received = al.allocate<O>();
    semaphore& arrived = al.allocate<semaphore>();
    const int rank = kittens::cluster::rank(), blocks = static_cast<int>(arch::cluster_size());
    for_each_place<O>([&](auto... at) {
        const element_coord e = place(at...);
        own.set(at..., arch::load_global(source.at(elements(rank * rows_of<O>() + e.r, e.c))));
    });
    poison_shared(received);
    if (threadIdx.x == 0) {
        init_semaphore(arrived, 0, 1);
        arch::mbarrier_init_fence();
        tma::expect(arrived, received);
    }
    arch::fence_async_shared();
    kittens::cluster::sync();
    const int next = (rank + 1) % blocks, previous = (rank + blocks - 1) % blocks;
    if (how == Remote::load) G::load_remote(received, own, previous);
    if (how == Remote::store) G::store_remote(received, own, next);
    if (how == Remote::bulk) {
        if (threadIdx.x == 0) tma::cluster::store_async(received, own, next, arrived);
        wait(arrived, 0);
    }
    kittens::cluster::sync();
    for_each_place<O>([&](auto... at) {
        const element_coord e = place(at...);
        arch::store_global(seen.at(elements(rank * rows_of<O>() + e.r, e.c)), received.get(at...));
    });
}

template <int WARPS, class O>
void remote_cases() {
    using T = typename O::T;
    const char* names[] = {"load_remote", "store_remote", "bulk store_async"};
    for (const int blocks : {2, 4}) {
        for (int op = 0; op < 3; ++op) {
            run(text("%s %d blocks %s %s", names[op], blocks, scope_name(WARPS).c_str(),
                     object_name<O>().c_str()),
                [&](Case& c) {
                    const Values source = c.uniform(type_of<T>, blocks * count_of<O>, -8, 8);
                    T* source_data = c.input<T>("source", source);
                    T* seen = c.output<T>("seen", source.size());
                    Values expected(source.size());
                    for (int rank = 0; rank < blocks; ++rank) {
                        const int from = (rank + blocks - 1) % blocks;
                        for (int i = 0; i < count_of<O>; ++i) {
                            expected[rank * count_of<O> + i] = source[from * count_of<O> + i];
                        }
                    }
                    c.expect(expected, bit_exact, cols_of<O>());
                    c.launch([&] {
                        const int rows = blocks * rows_of<O>();
                        kittens::launch(remote_kernel<WARPS, O>, blocks, 32 * WARPS, blocks,
                                        2 * sizeof(O) + 4096, nullptr,
                                        matrix(source_data, rows, cols_of<O>()),
                                        matrix(seen, rows, cols_of<O>()), static_cast<Remote>(op));
                    });
                });
        }
    }
}

void clusters() {
    multicast_cases<st_bf<64, 64>, 2>();
    multicast_cases<st_bf<16, 32>, 4>();
    multicast_cases<st_fl<32, 64>, 2>();
    remote_cases<4, st_bf<64, 64>>();
    remote_cases<1, st_fl<16, 32>>();
    remote_cases<2, sv_fl<64>>();
    if constexpr (intensity >= 2) {
        multicast_cases<st_fp8e4m3<64, 128>, 2>();
        multicast_cases<st_hf<32, 192, true, 64>, 4>();
        remote_cases<8, st_hf<32, 48>>();
        remote_cases<4, st_fp8e4m3<32, 64>>();
        remote_cases<1, sv_bf<16>>();
    }
}
const Section section("memory/cluster", clusters);

}  // namespace
}  // namespace unit
