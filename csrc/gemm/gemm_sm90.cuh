// Matrix product on Hopper: out = a @ b + bias, 16-bit operands, fp32 accumulation.
//
// A block is persistent and warp-specialised. One thread of the producer warpgroup keeps a ring of
// stages (a block_m x 64 tile of a and a 64 x block_n tile of b) filled by TMA, running ahead across
// tiles, so that the loads of the next tile overlap the epilogue of this one. The consumer warpgroups
// divide the tile's rows; each multiplies with wgmma, one product in flight while it hands back the
// stage of the one before, and writes its rows through a small staging buffer, so that the stores of
// one tile overlap the products of the next.
//
// The blocks of a cluster work on neighbouring tiles. What two of them share, a's tile along a row of
// the cluster, b's along a column, each loads half of and multicasts: fewer bytes from L2, which
// in large products is power, and power is what limits those.
//
// Operands may lie in memory in either major order: TMA brings them into shared memory as they are,
// and wgmma reads either order. Ragged edges: TMA fills with zeros what lies outside, and writes
// nothing there.
#pragma once

#include "csrc/gemm/gemm.h"
#include "csrc/gemm/tile_order.h"
#include "kittens/kittens.cuh"

namespace thunderkittens::gemm {
namespace sm90 {

using namespace kittens;

// Named barrier: the semaphores are initialised. Those of the consumers come after it.
constexpr int READY = 1;

template <Config C>
struct Types {
    static constexpr Config config = C;
    using T = std::conditional_t<C.dtype == DType::bf16, bf16, half>;
    // Rows that a consumer warpgroup computes, in products of 64 rows that share b's tile.
    static constexpr int consumer_rows = C.block_m / C.consumers;
    static constexpr int products = consumer_rows / 64;
    static_assert(consumer_rows % 64 == 0, "a consumer warpgroup computes multiples of 64 rows");

    using a_tile = std::conditional_t<C.a_m_major, st<T, BLOCK_K, C.block_m>,
                                      st<T, C.block_m, BLOCK_K>>;
    using b_tile = std::conditional_t<C.b_n_major, st<T, BLOCK_K, C.block_n>,
                                      st<T, C.block_n, BLOCK_K>>;
    // What one block of a cluster loads of a shared tile: half of it, where that is a tile too.
    static constexpr int a_parts = C.block_m >= 128 ? 2 : 1;
    static constexpr int b_parts = C.block_n >= 128 ? 2 : 1;
    static constexpr int a_part_rows = C.block_m / a_parts;
    static constexpr int b_part_cols = C.block_n / b_parts;
    using a_part = std::conditional_t<C.a_m_major, st<T, BLOCK_K, a_part_rows>,
                                      st<T, a_part_rows, BLOCK_K>>;
    using b_part = std::conditional_t<C.b_n_major, st<T, BLOCK_K, b_part_cols>,
                                      st<T, b_part_cols, BLOCK_K>>;
    // Staging of a warp's output: rows of 128 bytes, whatever the type of the output. To TMA, which
    // only copies, every output is a matrix of 16-bit words.
    using out_tile = st<bf16, 16, 64>;

    struct Stage {
        a_tile a;
        b_tile b;
    };
    struct Shared {
        Stage stages[C.stages];
        out_tile out[C.consumers * WARPGROUP_WARPS][2];
        sv_fl<C.block_n> bias[C.consumers];
        semaphore full[C.stages], empty[C.stages];
    };
    static_assert(sizeof(Stage) == sizeof(a_tile) + sizeof(b_tile) && sizeof(Stage) % 1024 == 0);
    static_assert(sizeof(Shared) <= MAX_SHARED_MEMORY, "too many stages");
    static_assert(sizeof(Shared) == shared_bytes(C), "gemm.h knows another size");

    struct Globals {
        gl<T, -1, 1, -1, -1, a_part> a;
        gl<T, -1, 1, -1, -1, b_part> b;
        gl<bf16, -1, 1, -1, -1, out_tile> out;
        const T* bias;
        uint32_t m, n;
        int k_blocks;
        DType out_dtype;
        bool tma_store;  // rows of the output are multiples of 16 bytes
        bool a_batched, b_batched;
        int cluster_m, cluster_n;
        TileOrder order;
    };

    static constexpr int threads = gemm::threads(C);
    // With two consumers, 65536 registers are 168 per thread at launch; the producer needs few.
    static constexpr int producer_registers = 24;
    static constexpr int consumer_registers = 240;
};

// A position in the ring of stages, and the parity of the round.
template <int stages>
struct Ring {
    int stage = 0;
    int phase = 0;
    __device__ __forceinline__ void advance() {
        if (++stage == stages) stage = 0, phase ^= 1;
    }
};

// Where this block stands in its cluster, and which tile of the matrix it computes.
struct Place {
    uint32_t rank, in_m, in_n;

    template <class Globals>
    __device__ __forceinline__ explicit Place(const Globals& g)
        : rank(g.cluster_m * g.cluster_n > 1 ? arch::cluster_rank() : 0),
          in_m(rank / g.cluster_n),
          in_n(rank % g.cluster_n) {}
    template <class Globals>
    __device__ __forceinline__ TilePosition tile(const Globals& g, uint32_t index) const {
        TilePosition at = g.order.at(index);
        at.m = at.m * g.cluster_m + in_m;
        at.n = at.n * g.cluster_n + in_n;
        return at;
    }
};

template <Config C>
__device__ __forceinline__ void produce(const typename Types<C>::Globals& g,
                                        typename Types<C>::Shared& shared, const Place place,
                                        uint32_t first, uint32_t step) {
    using K = Types<C>;
    // Blocks in the same row of the cluster share a's tile, those in the same column b's.
    const uint16_t a_blocks = static_cast<uint16_t>(((1u << g.cluster_n) - 1)
                                                    << (place.in_m * g.cluster_n));
    const uint16_t b_blocks = static_cast<uint16_t>((g.cluster_m == 2 ? 1u | 1u << g.cluster_n : 1u)
                                                    << place.in_n);
    Ring<C.stages> ring;
    for (uint32_t index = first; index < g.order.total; index += step) {
        const TilePosition at = place.tile(g, index);
        const int m = static_cast<int>(at.m) * C.block_m, n = static_cast<int>(at.n) * C.block_n;
        const int a_batch = g.a_batched ? static_cast<int>(at.batch) : 0;
        const int b_batch = g.b_batched ? static_cast<int>(at.batch) : 0;
        for (int k = 0; k < g.k_blocks; ++k, ring.advance()) {
            auto& stage = shared.stages[ring.stage];
            semaphore& full = shared.full[ring.stage];
            wait(shared.empty[ring.stage], ring.phase ^ 1);
            tma::expect(full, stage);
            auto& a_parts = reinterpret_cast<typename K::a_part(&)[K::a_parts]>(stage.a);
            auto& b_parts = reinterpret_cast<typename K::b_part(&)[K::b_parts]>(stage.b);
#pragma unroll
            for (int i = 0; i < K::a_parts; ++i) {
                const int row = m + i * K::a_part_rows, col = k * BLOCK_K;
                const element_coord from = C.a_m_major ? elements(a_batch, 0, col, row)
                                                       : elements(a_batch, 0, row, col);
                if (g.cluster_n == 1) {
                    tma::load_async(a_parts[i], g.a, from, full);
                } else if (place.in_n == i) {
                    tma::cluster::load_async(a_parts[i], g.a, from, full, a_blocks);
                }
            }
#pragma unroll
            for (int i = 0; i < K::b_parts; ++i) {
                const int row = k * BLOCK_K, col = n + i * K::b_part_cols;
                const element_coord from = C.b_n_major ? elements(b_batch, 0, row, col)
                                                       : elements(b_batch, 0, col, row);
                if (g.cluster_m == 1) {
                    tma::load_async(b_parts[i], g.b, from, full);
                } else if (place.in_m == i) {
                    tma::cluster::load_async(b_parts[i], g.b, from, full, b_blocks);
                }
            }
        }
    }
}

// Copies a warp's staged rows to an output whose rows TMA cannot store: neighbouring lanes write
// neighbouring words.
template <class Word, class Staging>
__device__ __forceinline__ void store_rows(const Staging& staging, Word* out, int64_t row_words,
                                           uint32_t rows, int64_t words) {
    constexpr int per_word = int(sizeof(Word) / sizeof(typename Staging::T));
    constexpr int width = Staging::cols / per_word;
#pragma unroll 1
    for (int row = 0; row < Staging::rows && row < rows; ++row) {
#pragma unroll
        for (int i = 0; i < width; i += WARP_THREADS) {
            const int word = i + laneid();
            if (word < words) {
                arch::store_global(
                    out + row * row_words + word,
                    arch::load_shared<Word>(staging.address_of(row, word * per_word)));
            }
        }
    }
}

// Writes a warp's 16 rows of the tile, 128 bytes wide pieces through two staging buffers in turn.
template <Config C, class O>
__device__ __forceinline__ void store_band(const typename Types<C>::Globals& g,
                                           typename Types<C>::Shared& shared,
                                           const rt_fl<16, C.block_n>& d, uint32_t batch,
                                           uint32_t row, uint32_t col) {
    using staging = st<O, 16, 128 / int(sizeof(O))>;
    const int warp = kittens::warpid();
    const auto& bias = shared.bias[warp / WARPGROUP_WARPS];
#pragma unroll
    for (int piece = 0; piece < C.block_n / staging::cols; ++piece) {
        constexpr int width = staging::cols / 16;
        rt_fl<16, staging::cols> part;
#pragma unroll
        for (int i = 0; i < width; ++i) part.tiles[0][i] = d.tiles[0][piece * width + i];
        if (g.bias != nullptr) {
#pragma unroll
            for (int i = 0; i < width; ++i) {
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const int at = piece * staging::cols + i * 16 + 8 * (j / 2) + 2 * (laneid() % 4);
                    const float2 pair = arch::load_shared<float2>(bias.address_of(at));
                    part.tiles[0][i].data[j].x += pair.x;
                    part.tiles[0][i].data[j].y += pair.y;
                }
            }
        }
        auto& out = shared.out[warp][piece % 2];
        auto& buffer = reinterpret_cast<staging&>(out);
        // The store before last has read this buffer.
        if (laneid() == 0) tma::store_async_read_wait<1>();
        arch::sync_warp();
        kittens::warp::store(buffer, part);
        const uint32_t first = col + piece * staging::cols;
        if (g.tma_store) {
            arch::fence_async_shared();
            arch::sync_warp();
            if (laneid() == 0) {
                const int words = static_cast<int>(first * (sizeof(O) / 2));
                tma::store_async(g.out, out, elements(batch, 0, row, words));
            }
        } else {
            arch::sync_warp();
            if (row < g.m && first < g.n) {
                const uint32_t rows = g.m - row, cols = g.n - first;
                O* to = reinterpret_cast<O*>(g.out.raw_ptr) +
                        ((int64_t(batch) * g.m + row) * g.n + first);
                if constexpr (sizeof(O) == 4) {
                    store_rows(buffer, to, g.n, rows, cols);
                } else if (g.n % 2 == 0) {
                    store_rows(buffer, reinterpret_cast<uint32_t*>(to), g.n / 2, rows, cols / 2);
                } else {
                    store_rows(buffer, reinterpret_cast<uint16_t*>(to), g.n, rows, cols);
                }
            }
        }
    }
}

template <Config C>
__device__ __forceinline__ void consume(const typename Types<C>::Globals& g,
                                        typename Types<C>::Shared& shared, const Place place,
                                        uint32_t first, uint32_t step) {
    using K = Types<C>;
    const int consumer = warpgroup::groupid();
    // Warp i of a consumer hands stages back to block i of the cluster, if that block fills them.
    const uint32_t peer = warpgroup::warpid();
    const bool hands_back = laneid() == 0 && peer < g.cluster_m * g.cluster_n &&
                            (peer / g.cluster_n == place.in_m || peer % g.cluster_n == place.in_n);
    const bool alone = g.cluster_m * g.cluster_n == 1;
    const auto release = [&](int stage) {
        if (hands_back) {
            if (alone) arrive(shared.empty[stage]);
            else arrive_remote_relaxed(shared.empty[stage], peer);
        }
    };

    Ring<C.stages> ring;
    rt_fl<16, C.block_n> d[K::products];
    for (uint32_t index = first; index < g.order.total; index += step) {
        const TilePosition at = place.tile(g, index);
        const uint32_t m = at.m * C.block_m, n = at.n * C.block_n;
        float bias[(C.block_n + WARPGROUP_THREADS - 1) / WARPGROUP_THREADS];
        if (g.bias != nullptr) {
#pragma unroll
            for (int i = 0; i < int(sizeof(bias) / sizeof(float)); ++i) {
                const uint32_t col = n + i * WARPGROUP_THREADS + warpgroup::laneid();
                bias[i] = col < g.n ? convert<float>(arch::load_global_readonly(g.bias + col)) : 0.f;
            }
        }

        int previous = 0;
        for (int k = 0; k < g.k_blocks; ++k, ring.advance()) {
            auto& stage = shared.stages[ring.stage];
            wait(shared.full[ring.stage], ring.phase);
#pragma unroll
            for (int i = 0; i < K::products; ++i) {
                const int band = consumer * K::products + i;
                if constexpr (C.a_m_major) {
                    warpgroup::product<true, !C.b_n_major>(
                        d[i], stage.a.template subtile<BLOCK_K, 64>({0, band}), stage.b, k > 0);
                } else {
                    warpgroup::product<false, !C.b_n_major>(
                        d[i], stage.a.template subtile<64, BLOCK_K>({band, 0}), stage.b, k > 0);
                }
            }
            warpgroup::mma_async_wait<K::products>();
            if (k > 0) release(previous);
            previous = ring.stage;
        }
#pragma unroll
        for (int i = 0; i < K::products; ++i) warpgroup::mma_async_wait(d[i]);
        release(previous);

        if (g.bias != nullptr) {
            warpgroup::sync(READY + 1 + consumer);  // the last tile's readers are done
#pragma unroll
            for (int i = 0; i < int(sizeof(bias) / sizeof(float)); ++i) {
                const int col = i * WARPGROUP_THREADS + warpgroup::laneid();
                if (col < C.block_n) shared.bias[consumer].set(col, bias[i]);
            }
            warpgroup::sync(READY + 1 + consumer);
        }
#pragma unroll
        for (int i = 0; i < K::products; ++i) {
            const uint32_t row = m + consumer * K::consumer_rows + i * 64 + warpgroup::warpid() * 16;
            if (g.out_dtype == DType::bf16) {
                store_band<C, bf16>(g, shared, d[i], at.batch, row, n);
            } else if (g.out_dtype == DType::fp16) {
                store_band<C, half>(g, shared, d[i], at.batch, row, n);
            } else {
                store_band<C, float>(g, shared, d[i], at.batch, row, n);
            }
        }
    }
    if (laneid() == 0) tma::store_async_read_wait();
}

// A template over a type: nvcc 13.0 writes host code that does not compile for a __global__ template
// over a struct's value.
template <class K>
__global__ __launch_bounds__(K::threads, 1) void gemm_kernel(
    const __grid_constant__ typename K::Globals g) {
    constexpr Config C = K::config;
    shared_allocator allocator(shared_memory());
    auto& shared = allocator.template allocate<typename K::Shared>();
    const Place place(g);
    const uint32_t cluster_blocks = g.cluster_m * g.cluster_n;

    const uint32_t first = blockIdx.x / cluster_blocks, step = gridDim.x / cluster_blocks;
    if (warpgroup::groupid() == C.consumers) {
        if (warpgroup::warpid() == 0) {
            if (arch::elect_one()) {
                tma::prefetch_map<typename K::a_part>(g.a);
                tma::prefetch_map<typename K::b_part>(g.b);
                tma::prefetch_map<typename K::out_tile>(g.out);
                for (int i = 0; i < C.stages; ++i) {
                    init_semaphore(shared.full[i], 1);
                    init_semaphore(shared.empty[i], C.consumers * (g.cluster_m + g.cluster_n - 1));
                }
                arch::mbarrier_init_fence();
            }
            arch::sync_warp();
        }
        // The other blocks of the cluster arrive at these semaphores too; of a single block only the
        // consumers must wait until they are there.
        if (cluster_blocks > 1) cluster::sync();
        else arch::named_barrier_arrive(READY, K::threads);
        if constexpr (C.consumers > 1) warpgroup::decrease_registers<K::producer_registers>();
        arch::wait_for_dependencies();
        arch::launch_dependents();
        if (warpgroup::elect_leader()) produce<C>(g, shared, place, first, step);
    } else {
        if (cluster_blocks > 1) cluster::sync();
        else arch::named_barrier_sync(READY, K::threads);
        if constexpr (C.consumers > 1) warpgroup::increase_registers<K::consumer_registers>();
        arch::wait_for_dependencies();
        consume<C>(g, shared, place, first, step);
    }
    // A block's shared memory is written, and its semaphores are arrived at, by its cluster.
    if (cluster_blocks > 1) cluster::sync();
}

inline int64_t ceil_div(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

template <Config C>
typename Types<C>::Globals make_globals(const Params& p) {
    using K = Types<C>;
    using T = typename K::T;
    const auto matrix = [&]<class GL>(const void* data, bool transposed, int64_t rows, int64_t cols,
                                      int64_t stride, int64_t batch_stride) {
        if (transposed) std::swap(rows, cols);
        return GL(static_cast<typename GL::T*>(const_cast<void*>(data)),
                  batch_stride != 0 ? p.batch : 1, nullptr, rows, cols,
                  gl_strides{batch_stride, 0, stride});
    };
    const int64_t words = p.n * size_in_bytes(p.out_dtype) / 2;
    const bool tma_store = words % 8 == 0 && words <= INT32_MAX;
    // Where TMA cannot store, the map is a stand-in that nobody uses.
    const int64_t map_words = tma_store ? words : 64;
    return {
        .a = matrix.template operator()<decltype(K::Globals::a)>(
            p.a, C.a_m_major, p.m, p.k, p.a_stride, p.a_batch_stride),
        .b = matrix.template operator()<decltype(K::Globals::b)>(
            p.b, !C.b_n_major, p.k, p.n, p.b_stride, p.b_batch_stride),
        .out = matrix.template operator()<decltype(K::Globals::out)>(
            p.out, false, p.m, map_words, map_words, p.m * map_words),
        .bias = static_cast<const T*>(p.bias),
        .m = static_cast<uint32_t>(p.m),
        .n = static_cast<uint32_t>(p.n),
        .k_blocks = static_cast<int>(ceil_div(p.k, BLOCK_K)),
        .out_dtype = p.out_dtype,
        .tma_store = tma_store,
        .a_batched = p.a_batch_stride != 0,
        .b_batched = p.b_batch_stride != 0,
        .cluster_m = p.schedule.cluster_m,
        .cluster_n = p.schedule.cluster_n,
        .order = make_order(C, p.schedule, p.m, p.n, p.batch),
    };
}

}  // namespace sm90

template <Config C>
void launch(const Params& params, Stream stream) {
    using K = sm90::Types<C>;
    const auto globals = sm90::make_globals<C>(params);
    const Schedule& s = params.schedule;
    kittens::launch(kittens::LaunchOptions{.dependent = true}, sm90::gemm_kernel<K>,
                    dim3(s.blocks), dim3(K::threads), dim3(s.cluster_m * s.cluster_n),
                    sizeof(typename K::Shared), stream, globals);
}

}  // namespace thunderkittens::gemm
