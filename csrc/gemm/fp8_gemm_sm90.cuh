// Product of fp8 matrices on Hopper: out = activation(scale * (a @ b^T) + bias).
//
// A block is persistent and warp-specialised, as in gemm_sm90.cuh: one thread of the producer
// warpgroup keeps a ring of stages (128 of k of a tile of a and of b) filled by TMA, running ahead
// across tiles; two consumer warpgroups share the tile's rows.
//
// `fast`: the tensor cores keep the sums of all k; one product is in flight while a consumer hands
// back the stage of the one before, and a finished tile leaves in the shadow of the next. Or the
// consumers take turns, fp8_turns_sm90.cuh.
//
// `promoted` and `fine`: a product of 64 x 128 x 128 (k) goes to registers of its own and is added
// to the sums in fp32, times the scales of its 128 of k where there are such. A consumer computes
// its 64 x 256 as two such products with the same a, one after the other: the second set of
// registers is then half as large as the sums, and while one consumer adds, the other one's
// products keep the tensor cores busy. The first step of a tile has no sums yet: in their place the
// registers still hold the tile before, which leaves in the shadow of its products.
#pragma once

#include "csrc/gemm/fp8_turns_sm90.cuh"

namespace thunderkittens::fp8_gemm {
namespace sm90 {

template <Config C>
__device__ __forceinline__ void produce(const typename Types<C>::Globals& g,
                                        typename Types<C>::Shared& shared) {
    using K = Types<C>;
    const Place place(g);
    const uint16_t a_blocks = place.a_blocks(g), b_blocks = place.b_blocks(g);
    Ring<C.stages> ring;
    for_each_tile<C>(g, place, [&](const Tile& tile) {
        if (tile.nothing) return;
        for (int k = 0; k < g.k_blocks; ++k, ring.advance()) {
            auto& stage = shared.stages[ring.stage];
            semaphore& full = shared.full[ring.stage];
            wait(shared.empty[ring.stage], ring.phase ^ 1);
            tma::expect_bytes(full, sizeof(stage) - (tile.narrow ? K::less * BLOCK_K : 0));
            auto& a_parts = reinterpret_cast<typename K::a_part(&)[2]>(stage.a);
            constexpr int b_count = C.block_n / K::b_part::rows;
            auto& b_parts = reinterpret_cast<typename K::b_part(&)[b_count]>(stage.b);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const element_coord from =
                    elements(0, 0, tile.row + i * K::a_part::rows, k * BLOCK_K);
                if (!K::fast || g.cluster_n == 1) {
                    tma::load_async(a_parts[i], g.a, from, full);
                } else if (place.in_n == uint32_t(i)) {
                    tma::cluster::load_async(a_parts[i], g.a, from, full, a_blocks);
                }
            }
#pragma unroll
            for (int i = 0; i < b_count; ++i) {
                const element_coord from =
                    elements(tile.group, 0, tile.col + i * K::b_part::rows, k * BLOCK_K);
                const auto load = [&](auto& part) {
                    if (!K::fast || g.cluster_m == 1) {
                        tma::load_async(part, g.b, from, full);
                    } else if (place.in_m == uint32_t(i)) {
                        tma::cluster::load_async(part, g.b, from, full, b_blocks);
                    }
                };
                if (K::two_widths && tile.narrow && i == b_count - 1)
                    load(reinterpret_cast<typename K::b_last&>(b_parts[i]));
                else
                    load(b_parts[i]);
            }
        }
    });
}

// The scales of blocks: one warp copies those of a stage from wherever they lie, far ahead as the
// tiles. Rows that are not there take the scale of the last one. Where a consumer reads scales only
// before it issues the products of their stage, they are handed back with the stage.
template <Config C>
__device__ __forceinline__ void produce_scales(const typename Types<C>::Globals& g,
                                               typename Types<C>::Shared& shared) {
    using K = Types<C>;
    Ring<C.stages> ring;
    for_each_tile<C>(g, Place(g), [&](const Tile& tile) {
        if (tile.nothing) return;
        const float* of_a = g.scale_a.data;
        const float* of_b = g.scale_b.data + int64_t(tile.group) * g.scale_b.group;
        for (int k = 0; k < g.k_blocks; ++k, ring.advance()) {
            const uint32_t to = shared.scales[ring.stage].address();
            wait(K::fine ? shared.scales_read[ring.stage] : shared.empty[ring.stage],
                 ring.phase ^ 1);
            // Four rows per lane, at once where they are adjacent in memory.
#pragma unroll
            for (int i = 4 * laneid(); i < C.block_m; i += 4 * WARP_THREADS) {
                const uint32_t row = tile.row + i;
                const float* four = of_a + int64_t(row) * g.scale_a.outer;
                if (g.scale_a.outer == 1 && row + 4 <= tile.end &&
                    reinterpret_cast<uintptr_t>(four) % 16 == 0) {
                    arch::cp_async<16>(to + i * 4, four);
                } else {
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        const uint32_t there = row + j < tile.end ? row + j : tile.end - 1;
                        arch::cp_async<4>(to + (i + j) * 4,
                                          of_a + int64_t(there) * g.scale_a.outer);
                    }
                }
            }
            const uint32_t first = K::fine ? tile.col : tile.col / 128;
            const uint32_t count = K::fine ? g.n : (g.n + 127) / 128;
            constexpr int copied = K::fine ? C.block_n : K::column_scales;
#pragma unroll
            for (int i = laneid(); i < copied; i += WARP_THREADS) {
                const uint32_t col = first + i < count ? first + i : count - 1;
                arch::cp_async<4>(to + (C.block_m + i) * 4, of_b + int64_t(col) * g.scale_b.outer);
            }
            arch::cp_async_mbarrier_arrive(shared.full[ring.stage].address());
            of_a += g.scale_a.inner, of_b += g.scale_b.inner;
        }
    });
}

template <Config C>
__device__ __forceinline__ void consume_fast(const typename Types<C>::Globals& g,
                                             typename Types<C>::Shared& shared) {
    using K = Types<C>;
    const Place place(g);
    const gemm::sm90::HandBack hand_back(g, place);
    const auto release = [&](int stage) { hand_back(shared.empty[stage]); };
    const int consumer = warpgroup::groupid();
    Ring<C.stages> ring;
    rt_fl<16, C.block_n> sums[K::products];
    Finished<C> finished;
    for_each_tile<C>(g, place, [&](const Tile& tile) {
        const uint32_t row = tile.row + consumer * (K::products_m * 64) + warpgroup::warpid() * 16;
        const bool narrow = K::two_widths && tile.narrow;
        int previous = 0;
        for (int k = 0; k < g.k_blocks; ++k, ring.advance()) {
            auto& stage = shared.stages[ring.stage];
            wait(shared.full[ring.stage], ring.phase);
            multiply<K>(sums, stage, consumer * K::products_m, k > 0, narrow);
            if (finished.any && k < finished.pieces) {
#pragma unroll
                for (int piece = 0; piece < finished.pieces; ++piece) {
                    if (k == piece) finished.send(g, shared, piece);
                }
            }
            warpgroup::mma_async_wait<1>();
            if (k > 0) release(previous);
            previous = ring.stage;
        }
        // Here the registers are free, and the last product hides the latency.
        Epilogue<C> epilogue;
        epilogue.fetch(g, tile, row + laneid() / 4);
#pragma unroll
        for (int i = 0; i < K::products_m; ++i) warpgroup::mma_async_wait(sums[i]);
        release(previous);

        if (finished.any && g.k_blocks < finished.pieces) {
#pragma unroll
            for (int piece = 1; piece < finished.pieces; ++piece) {
                if (g.k_blocks <= piece) finished.send(g, shared, piece);
            }
        }
        epilogue.apply(g, shared, sums);
        if (g.out_dtype == DType::fp32 || !g.tma_store) {
#pragma unroll
            for (int i = 0; i < K::products_m; ++i) {
                store_now<C>(g, shared, sums[i], row + i * 64, tile.col, tile.end, i);
            }
            return;
        }
        finished.keep(g, sums, row, tile.col);
        finished.narrow = narrow;
    });
    finished.send(g, shared, 0, finished.pieces);
    if (laneid() == 0) tma::store_async_read_wait();
}

// sum += part * the factors of a thread's two rows; the first part is the sum so far. Row by row:
// the register file has to serve the tensor cores, too, and a factor that an instruction shares
// with the one before it is not read again.
template <bool begins, int cols>
__device__ __forceinline__ void promote(rt_fl<16, cols>& sum, const rt_fl<16, cols>& part,
                                        int first, int last, float (&factor)[2]) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
#pragma unroll
        for (int j = first / 16; j < last / 16; ++j) {
#pragma unroll
            for (int r = row; r < 4; r += 2) {
                const float2 x = part.tiles[0][j].data[r];
                float2& s = sum.tiles[0][j].data[r];
                const float2 before = begins ? make_float2(0.f, 0.f) : s;
                s = make_float2(fmaf(x.x, factor[row], before.x), fmaf(x.y, factor[row], before.y));
            }
        }
    }
}

// Where the operands of a product lie, as the low words of descriptors. The compiler knows that
// they are the same in all lanes, and keeps them in uniform registers: nothing has to be moved
// there between the end of a product and the start of the next, or between its parts.
template <Config C>
struct Operands {
    using K = Types<C>;
    static constexpr int step = int(sizeof(typename K::Stage)) >> 4;
    uint32_t first_a, first_b, a, b;

    __device__ __forceinline__ Operands(typename K::Shared& shared, int consumer) {
        auto& stage = shared.stages[0];
        const auto rows = stage.a.template subtile<64, BLOCK_K>({consumer * K::products_m, 0});
        first_a = arch::shuffle(
            static_cast<uint32_t>(descriptor(kittens::detail::operand_origin(rows))), 0);
        first_b = static_cast<uint32_t>(descriptor(stage.b.address()));
    }
    static __device__ __forceinline__ uint64_t descriptor(uint32_t origin) {
        return kittens::detail::k_major_descriptor<typename K::a_tile>(origin);
    }
    __device__ __forceinline__ void find(int stage) {
        a = first_a + stage * step, b = first_b + stage * step;
    }
    // Starts product i of the stage: in_m of 64 rows, in_n of product_cols columns.
    // `less` columns fewer: those of `d` stay as they are.
    template <int less = 0>
    __device__ __forceinline__ void multiply(rt_fl<16, K::product_cols>& d, int in_m,
                                             int in_n) const {
        constexpr int cols = K::product_cols - less;
        using instruction = arch::wgmma<cols, float, typename K::TA, typename K::TB>;
        constexpr int words = rt_fl<16, cols>::elements_per_thread;
        constexpr uint64_t row_bytes = BLOCK_K;
        const uint64_t high = descriptor(0) & 0xFFFFFFFF00000000;
        const uint64_t rows = high | (a + uint32_t(in_m * 64 * row_bytes >> 4));
        const uint64_t columns = high | (b + uint32_t(in_n * K::product_cols * row_bytes >> 4));
        warpgroup::mma_fence(d);
#pragma unroll
        for (int k = 0; k < BLOCK_K / 32; ++k) {
            instruction::template from_shared<false, false>(
                reinterpret_cast<float(&)[words]>(d), arch::wgmma_advance(rows, 32 * k),
                arch::wgmma_advance(columns, 32 * k), k > 0);
        }
        warpgroup::mma_commit_group();
    }
};

template <Config C>
__device__ __forceinline__ void consume_promoted(const typename Types<C>::Globals& g,
                                                 typename Types<C>::Shared& shared) {
    using K = Types<C>;
    const Place place(g);
    // One arrival stands for the warpgroup, which wgmma reads shared memory as.
    const bool hands_back = warpgroup::warpid() == 0 && laneid() == 0;
    const auto release = [&](int stage) {
        if (hands_back) arrive(shared.empty[stage]);
    };
    const int consumer = warpgroup::groupid();
    Ring<C.stages> ring;
    constexpr int cols = K::product_cols;
    rt_fl<16, cols> sums[K::products], part;
    Operands<C> operands(shared, consumer);
    Finished<C> finished;
    const bool keeps = g.out_dtype != DType::fp32 && g.tma_store && g.offs == nullptr;

    for_each_tile<C>(g, place, [&](const Tile& tile) {
        // The same in all lanes, as the compiler then knows: descriptors stay in uniform registers.
        ring.stage = arch::shuffle(ring.stage, 0), ring.phase = arch::shuffle(ring.phase, 0);
        const uint32_t row = tile.row + consumer * (K::products_m * 64) + warpgroup::warpid() * 16;
        const uint32_t own_row = row + laneid() / 4;
        const int in_tile = int(own_row - tile.row);
        const int k_blocks = tile.nothing ? 0 : g.k_blocks;
        const bool narrow = K::two_widths && arch::shuffle(int(tile.narrow), 0) != 0;
        int stage = ring.stage;
        Epilogue<C> epilogue;
        const auto release_with_scales = [&](int which) {
            release(which);
            if constexpr (K::fine) {  // each warp has read them itself
                arch::sync_warp();
                if (laneid() == 0) arrive(shared.scales_read[which]);
            }
        };
        // The factors of a stage's products, for each of its blocks of columns: found while the
        // last product of the stage before runs.
        constexpr int factor_sets = K::fine ? 1 : K::column_scales;
        float factors[factor_sets][2 * K::products_m];
        const auto read_scales = [&](int which) {
            float rows[2 * K::products_m], columns[factor_sets];
            const uint32_t scales = shared.scales[which].address();
#pragma unroll
            for (int r = 0; r < 2 * K::products_m; ++r) {
                const int at = in_tile + r / 2 * 64 + r % 2 * 8;
                rows[r] = arch::load_shared<float>(scales + at * 4);
            }
#pragma unroll
            for (int c = 0; c < factor_sets; ++c) {
                if (!K::fine) columns[c] = arch::load_shared<float>(scales + (C.block_m + c) * 4);
            }
#pragma unroll
            for (int c = 0; c < factor_sets; ++c) {
#pragma unroll
                for (int r = 0; r < 2 * K::products_m; ++r) {
                    factors[c][r] = K::fine ? rows[r] : rows[r] * columns[c];
                    arch::pin_register(factors[c][r]);
                }
            }
        };
        const auto step = [&]<bool blocks, bool begins>(int left) {
            const int previous = stage;
            stage = ring.stage;
#pragma unroll
            for (int i = 0; i < K::products; ++i) {
                const int in_m = i / K::products_n, in_n = i % K::products_n;
                if (K::two_widths && !blocks && narrow && in_n == K::products_n - 1)
                    operands.template multiply<K::less>(part, in_m, in_n);
                else
                    operands.multiply(part, in_m, in_n);
                // While the product runs: what comes before and after it.
                if (begins) {
                    finished.send(g, shared, finished.pieces * i / K::products,
                                  finished.pieces * (i + 1) / K::products);
                } else if (i == 0) {
                    release_with_scales(previous);
                }
                // Of its first and of its second block of columns.
                float first[2] = {1.f, 1.f}, second[2];
                if constexpr (blocks) {
                    constexpr bool wide = cols > 128;
#pragma unroll
                    for (int r = 0; r < 2; ++r) {
                        first[r] = factors[K::fine || wide ? 0 : in_n][2 * in_m + r];
                        second[r] = factors[wide ? 1 : 0][2 * in_m + r];
                    }
                }
                if (i == K::products - 1) {
                    ring.advance();
                    operands.find(ring.stage);
                    if (left > 0) {
                        wait(shared.full[ring.stage], ring.phase);
                        if constexpr (blocks) read_scales(ring.stage);
                    } else {
                        epilogue.fetch(g, tile, own_row);
                    }
                }
                warpgroup::mma_async_wait(part);
                if constexpr (K::fine) {
                    with_columns(part, shared.scales[stage], C.block_m + in_n * cols,
                                 [&](float2& x, float2 s, int r) {
                                     x.x *= s.x * first[r];
                                     x.y *= s.y * first[r];
                                 });
                    first[0] = first[1] = 1.f;
                }
                if constexpr (!blocks || K::fine || cols <= 128) {
                    promote<begins>(sums[i], part, 0, cols, first);
                } else if (tile.col % 128 == 0) {
                    promote<begins>(sums[i], part, 0, 128, first);
                    promote<begins>(sums[i], part, 128, cols, second);
                } else {
                    promote<begins>(sums[i], part, 0, 64, first);
                    promote<begins>(sums[i], part, 64, cols, second);
                }
            }
        };
        const auto multiply = [&]<bool blocks>() {
            wait(shared.full[ring.stage], ring.phase);
            if constexpr (blocks) read_scales(ring.stage);
            operands.find(ring.stage);
            int left = arch::shuffle(k_blocks, 0) - 1;  // steps after this one
            step.template operator()<blocks, true>(left);
            for (--left; left >= 0; --left) step.template operator()<blocks, false>(left);
            release_with_scales(stage);
        };
        if (k_blocks == 0) {
#pragma unroll
            for (int i = 0; i < K::products; ++i) kittens::warp::zero(sums[i]);
            finished.send(g, shared, 0, finished.pieces);
            if (!tile.nothing) epilogue.fetch(g, tile, own_row);
        } else if (g.blocks) {
            multiply.template operator()<true>();
        } else if constexpr (!K::fine) {
            multiply.template operator()<false>();
        }
        if (!tile.nothing) epilogue.apply(g, shared, sums);
        if (keeps) {
            finished.keep(g, sums, row, tile.col);
            finished.narrow = narrow;
            return;
        }
#pragma unroll
        for (int i = 0; i < K::products; ++i) {
            store_now<C>(g, shared, sums[i], row + i / K::products_n * 64,
                         tile.col + i % K::products_n * cols, tile.end, i);
        }
        finished.clear();
    });
    finished.send(g, shared, 0, finished.pieces);
    if (laneid() == 0) tma::store_async_read_wait();
}

// A template over a type: nvcc 13.0 writes host code that does not compile for a __global__
// template over a struct's value.
template <class K>
__global__ __launch_bounds__(K::threads, 1) void fp8_gemm_kernel(const __grid_constant__
                                                                 typename K::Globals g) {
    constexpr Config C = K::config;
    shared_allocator allocator(shared_memory());
    auto& shared = allocator.template allocate<typename K::Shared>();
    const bool alone = g.cluster_m * g.cluster_n == 1;
    const bool copies_scales = !K::fast && g.blocks;

    if (warpgroup::groupid() == K::consumers) {
        if (warpgroup::warpid() == 0) {
            if (arch::elect_one()) {
                tma::prefetch_map<typename K::a_part>(g.a);
                tma::prefetch_map<typename K::b_part>(g.b);
                tma::prefetch_map<typename K::out_tile>(g.out);
                for (int i = 0; i < C.stages; ++i) {
                    init_semaphore(shared.full[i], 1 + (copies_scales ? WARP_THREADS : 0));
                    const int blocks = K::fast ? g.cluster_m + g.cluster_n - 1 : 1;
                    init_semaphore(shared.empty[i], K::consumers_of_tile * blocks);
                    init_semaphore(shared.scales_read[i], K::consumers * WARPGROUP_WARPS);
                }
                arch::mbarrier_init_fence();
            }
            arch::sync_warp();
        }
        if (!alone)
            cluster::sync();
        else if (!K::fast && warpgroup::warpid() == 1)  // which waits for semaphores too
            arch::named_barrier_sync(READY, K::threads);
        else
            arch::named_barrier_arrive(READY, K::threads);
        warpgroup::decrease_registers<K::producer_registers>();
        arch::wait_for_dependencies();
        arch::launch_dependents();
        if (warpgroup::elect_leader()) produce<C>(g, shared);
        if constexpr (!K::fast) {
            if (copies_scales && warpgroup::warpid() == 1) produce_scales<C>(g, shared);
        }
    } else {
        if (alone)
            arch::named_barrier_sync(READY, K::threads);
        else
            cluster::sync();
        warpgroup::increase_registers<K::consumer_registers>();
        arch::wait_for_dependencies();
        if constexpr (K::turns)
            consume_in_turns<C>(g, shared);
        else if constexpr (K::fast)
            consume_fast<C>(g, shared);
        else
            consume_promoted<C>(g, shared);
    }
    // A block's shared memory is written, and its semaphores are arrived at, by its cluster.
    if (!alone) cluster::sync();
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <class GL>
GL make_matrix(const void* data, int64_t batch, int64_t rows, int64_t cols, int64_t stride,
               int64_t batch_stride) {
    return GL(static_cast<typename GL::T*>(const_cast<void*>(data)), batch, nullptr, rows, cols,
              gl_strides{batch_stride, 0, stride});
}

template <Config C>
typename Types<C>::Globals make_globals(const Params& p) {
    using K = Types<C>;
    using Globals = typename K::Globals;
    const int64_t words = p.n * size_in_bytes(p.out_dtype) / 2;
    const bool tma_store = p.n * size_in_bytes(p.out_dtype) % 16 == 0 && words <= INT32_MAX;
    // Where TMA cannot store, the map is a stand-in that nobody uses; so is that of the fine scales
    // of a kernel without.
    const int64_t map_words = tma_store ? words : 64;
    const int64_t k_blocks = ceil_div(p.k, BLOCK_K);
    const Schedule& s = p.schedule;
    const auto tiles = [](int64_t size, int64_t tile) {
        return static_cast<uint32_t>(ceil_div(size, tile));
    };
    // Narrow tiles leave by TMA alone, and begin anywhere in a block of scales.
    const bool two_widths = tma_store && p.out_dtype != DType::fp32 && !p.blocks &&
                            p.offs == nullptr && s.cluster_n == 1;
    const auto order = [&] {
        const uint32_t rows = tiles(p.m, int64_t{C.block_m} * s.cluster_m);
        if constexpr (K::two_widths) {
            return gemm::make_uneven_order(
                {.block_m = C.block_m * s.cluster_m, .block_n = C.block_n * s.cluster_n},
                {.band = s.band, .columns = s.columns, .longer = s.longer}, p.m, p.n, 1,
                two_widths);
        } else {
            return gemm::make_order(rows, tiles(p.n, int64_t{C.block_n} * s.cluster_n), 1,
                                    static_cast<uint32_t>(s.band), false);
        }
    }();
    return {
        .a = make_matrix<decltype(Globals::a)>(p.a, 1, p.m, p.k, p.a_stride, 0),
        .b = make_matrix<decltype(Globals::b)>(p.b, p.groups, p.n, p.k, p.b_stride,
                                               p.b_group_stride),
        .out = make_matrix<decltype(Globals::out)>(p.out, 1, p.m, map_words, map_words, 0),
        .scale_a = p.scale_a,
        .scale_b = p.scale_b,
        .bias = p.bias,
        .offs = p.offs,
        .m = static_cast<uint32_t>(p.m),
        .n = static_cast<uint32_t>(p.n),
        .groups = static_cast<uint32_t>(p.groups),
        .k_blocks = static_cast<int>(k_blocks),
        .blocks = p.blocks,
        .out_dtype = p.out_dtype,
        .bias_dtype = p.bias_dtype,
        .activation = static_cast<gemm::Activation>(p.activation),
        .tma_store = tma_store,
        .cluster_m = s.cluster_m,
        .cluster_n = s.cluster_n,
        .clusters = static_cast<uint32_t>(s.blocks / (s.cluster_m * s.cluster_n)),
        .columns = tiles(p.n, C.block_n),
        .order = order,
    };
}

}  // namespace sm90

template <Config C>
void launch(const Params& params, Stream stream) {
    using K = sm90::Types<C>;
    const auto globals = sm90::make_globals<C>(params);
    const Schedule& s = params.schedule;
    kittens::launch(kittens::LaunchOptions{.dependent = true}, sm90::fp8_gemm_kernel<K>,
                    dim3(s.blocks), dim3(K::threads), dim3(s.cluster_m * s.cluster_n),
                    sizeof(typename K::Shared), stream, globals);
}

}  // namespace thunderkittens::fp8_gemm
