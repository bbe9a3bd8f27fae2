// Product of few rows of 16-bit activations and prepared weights of fewer bits on Hopper: what it
// costs is to read the weight, once.
//
// A tile is as many strips of 16 rows of the weight as give every SM the same, all of k, and up to
// 16 rows of a. Of 18 warps one loads the weight, in bulk copies of whole pieces where a tile has
// all strips of them, one loads a by TMA. The others divide the strips and the pieces of a stage of
// the ring, and depend on nobody: a warp makes 16-bit fragments of a strip in registers, the first
// operand of mma.sync, whose second are the rows of a. At the end the sums of those that divide k
// meet in shared memory, and are added in a fixed order: reruns give the same bits.
//
// How the work is shared, and with it the size of a stage, is known at run time (FewPlan), so that
// one kernel serves all widths.
#pragma once

#include "csrc/gemm/mixed_tiles_sm90.cuh"
#include "kittens/arch/bulk_once.cuh"

namespace thunderkittens::mixed_gemm {
namespace sm90 {

template <Config C>
struct FewTypes {
    static constexpr Config config = C;
    using T = std::conditional_t<C.dtype == DType::bf16, bf16, half>;
    using W = typename weights_of<C.format>::type;
    using rows = st<T, C.tokens, PIECE>;
    static constexpr uint32_t band = 4;
    static constexpr int piece = piece_bytes(C.format), strip = strip_bytes(C.format);
    static constexpr int threads = mixed_gemm::threads(C);
    static constexpr int eights = C.tokens / 8;  // of rows of a: columns of a product
    static constexpr int most = 4;               // strips of a warp

    struct Semaphores {
        semaphore full[FEW_STAGES], empty[FEW_STAGES];
    };
    static_assert(sizeof(Semaphores) <= 1024);

    struct Globals {
        // Of a stage's rows of a, and of some strips of a piece of rows for all of a stage's k.
        CUtensorMap rows_map, strips_map;
        const uint8_t* weight;
        const float* scale;
        const void* bias;
        const int32_t* offs;
        void* out;
        DType out_dtype;
        gemm::Activation activation;
        bool quads;  // four neighbouring elements of out are aligned
        uint32_t m, n, groups;
        uint32_t row_pieces, row_tiles, clusters;
        uint32_t splits;  // 1
        int k_pieces, k_stages, strips;
        int rows_box, strips_box;  // pieces of k of one copy of a, strips of one of the weight
        FewPlan plan;
    };
};

// A block's place in the ring: stage number `slot`, for the time `phase` says.
struct RingPlace {
    int slot = 0, phase = 0;
    __device__ __forceinline__ void advance(int count, int stages) {
        slot += count;
#pragma unroll 1
        while (slot >= stages) slot -= stages, phase ^= 1;
    }
};

// The strips of a tile, and where they lie in a stage: piece after piece of rows. Of a whole piece
// they are as in memory, of others, after the strips of a copy, its k.
template <class K>
struct Strips {
    int first, count;

    __device__ __forceinline__ Strips(const typename K::Globals& g, const Tile& tile)
        : first(static_cast<int>(tile.row_tile) * g.strips),
          count(min(g.strips, static_cast<int>((g.n + STRIP_ROWS - 1) / STRIP_ROWS) - first)) {}
    // Of the piece of rows that has strip i of the tile: its first strip in the tile, and how many
    // there are.
    __device__ __forceinline__ int2 part(int i) const {
        const int begin = (first + i) / STRIPS * STRIPS - first;
        const int from = max(begin, 0);
        return {from, min(begin + STRIPS, count) - from};
    }
    // Where strip i is, of a piece of the stage's k.
    __device__ __forceinline__ uint32_t place(const typename K::Globals& g, int i,
                                              int piece) const {
        const int2 there = part(i);
        const int together = there.y == STRIPS ? STRIPS : g.strips_box, within = i - there.x;
        const int before = there.x + within / together * together;
        return (before * g.plan.pieces + piece * together + within % together) * K::strip;
    }
};

template <class K>
__device__ __forceinline__ uint32_t stage_of(const typename K::Globals& g, int slot) {
    return arch::shared_address(shared_memory()) + 1024 + slot * g.plan.stage_bytes;
}
// Of a stage: rows of a, then strips.
template <class K>
__device__ __forceinline__ uint32_t strips_of(const typename K::Globals& g, int slot) {
    return stage_of<K>(g, slot) + g.plan.pieces * uint32_t(sizeof(typename K::rows));
}

// Blocks begin at different k, not to read the same lines of a all at once.
template <class K, class Work>
__device__ __forceinline__ void for_each_few_stage(const typename K::Globals& g, const Tile& tile,
                                                   int begin, int by, Work work) {
    int k = (static_cast<int>(tile.row_tile * 37u % uint32_t(g.k_stages)) + begin) % g.k_stages;
    for (int step = begin; step < g.k_stages; step += by) {
        work(k);
        k += by;
#pragma unroll 1
        while (k >= g.k_stages) k -= g.k_stages;
    }
}

// The warp that loads the weight.
template <class K>
__device__ __forceinline__ void load_strips(const typename K::Globals& g,
                                            typename K::Semaphores& semaphores) {
    const int pieces = g.plan.pieces;
    RingPlace place{0, 1};
    for_each_tile<K>(g, [&](const Tile& tile) {
        if (tile.group >= g.groups) return;
        const Strips<K> strips(g, tile);
        const int line = static_cast<int>(tile.group * g.row_pieces) + strips.first / STRIPS;
        int whole = 0, boxes = 0;
        for (int i = 0; i < strips.count; i += strips.part(i).y) {
            const int count = strips.part(i).y;
            if (count == STRIPS)
                ++whole;
            else
                boxes += (count + g.strips_box - 1) / g.strips_box;
        }
        for_each_few_stage<K>(g, tile, 0, 1, [&](int k) {
            semaphore& full = semaphores.full[place.slot];
            const int first = k * pieces, there = min(pieces, g.k_pieces - first);
            const uint32_t to = strips_of<K>(g, place.slot);
            wait(semaphores.empty[place.slot], place.phase);
            // A box has all its bytes, also past the end of k.
            tma::expect_bytes(full,
                              whole * there * K::piece + boxes * g.strips_box * pieces * K::strip);
            int row = line;
#pragma unroll 1
            for (int i = 0; i < strips.count; ++row) {
                const int count = strips.part(i).y;
                const uint32_t at = to + i * pieces * K::strip;
                if (count == STRIPS) {
                    arch::bulk_load_once(at,
                                         g.weight + (int64_t(row) * g.k_pieces + first) * K::piece,
                                         there * K::piece, full.address());
                } else {
                    const int within = (strips.first + i) % STRIPS;
#pragma unroll 1
                    for (int j = 0; j < count; j += g.strips_box) {
                        arch::tma_load<tma::CachePolicy::evict_first>(
                            at + j * pieces * K::strip, &g.strips_map,
                            arch::TmaCoordinates{0, within + j, first, row}, full.address());
                    }
                }
                i += count;
            }
            place.advance(1, g.plan.stages);
        });
    });
}

// The warp that loads rows of a.
template <class K>
__device__ __forceinline__ void load_rows(const typename K::Globals& g,
                                          typename K::Semaphores& semaphores) {
    constexpr uint32_t bytes = sizeof(typename K::rows);
    RingPlace place{0, 1};
    for_each_tile<K>(g, [&](const Tile& tile) {
        if (tile.group >= g.groups) return;
        const int token = static_cast<int>(tile.token), box = g.rows_box;
        for_each_few_stage<K>(g, tile, 0, 1, [&](int k) {
            semaphore& full = semaphores.full[place.slot];
            const int first = k * g.plan.pieces, there = min(g.plan.pieces, g.k_pieces - first);
            const int copies = (there + box - 1) / box;
            wait(semaphores.empty[place.slot], place.phase);
            tma::expect_bytes(full, copies * box * bytes);
#pragma unroll 1
            for (int i = 0; i < copies; ++i) {
                const int piece = first + i * box;
                arch::tma_load<tma::CachePolicy::evict_last>(
                    stage_of<K>(g, place.slot) + i * box * bytes, &g.rows_map,
                    box > 1 ? arch::TmaCoordinates{0, token, piece, 0}
                            : arch::TmaCoordinates{piece * PIECE, token, 0, 0},
                    full.address());
            }
            place.advance(1, g.plan.stages);
        });
    });
}

// A warp that multiplies.
template <class K>
struct FewMainloop {
    static constexpr Config C = K::config;
    using T = typename K::T;
    RingPlace place;
    float d[K::most][K::eights][4];

    // Second operands for the four products of a piece, of eight rows of a each.
    static __device__ __forceinline__ void load_a(uint32_t piece, uint32_t (&to)[4][K::eights][2]) {
        const int lane = laneid();
        if constexpr (K::eights == 2) {
            const int row = lane / 16 * 8 + lane % 8, column = lane / 8 % 2 * 8;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                arch::load_matrix_x4(to[i][0][0], to[i][0][1], to[i][1][0], to[i][1][1],
                                     K::rows::idx(piece, {row, i * 16 + column}));
            }
        } else {
            const int row = lane % 8, column = lane / 8 * 8;
#pragma unroll
            for (int i = 0; i < 4; i += 2) {
                arch::load_matrix_x4(to[i][0][0], to[i][0][1], to[i + 1][0][0], to[i + 1][0][1],
                                     K::rows::idx(piece, {row, i * 16 + column}));
            }
        }
    }

    // Strips row_group, row_group + row_groups, ... of the tile, pieces k_group, k_group +
    // k_groups, ... of k, in the order in which stages come.
    __device__ __forceinline__ void run(const typename K::Globals& g,
                                        typename K::Semaphores& semaphores, const Tile& tile,
                                        int row_group, int k_group) {
        const FewPlan& plan = g.plan;
        const Strips<K> strips(g, tile);
        const int piece = k_group % plan.pieces;
        uint32_t offset[K::most];
        int mine = 0;
#pragma unroll
        for (int s = 0; s < K::most; ++s) {
            const int i = row_group + s * plan.row_groups;
            if (i < strips.count) mine = s + 1;
            offset[s] = strips.place(g, min(i, strips.count - 1), piece);
#pragma unroll
            for (int e = 0; e < K::eights; ++e) {
#pragma unroll
                for (int j = 0; j < 4; ++j) d[s][e][j] = 0.f;
            }
        }
        const int first = k_group / plan.pieces, by = plan.k_groups / plan.pieces;
        RingPlace at = place;
        at.advance(first, plan.stages);
        for_each_few_stage<K>(g, tile, first, by, [&](int k) {
            wait(semaphores.full[at.slot], at.phase);
            if (k * plan.pieces + piece < g.k_pieces) {
                const uint32_t codes = strips_of<K>(g, at.slot);
                const auto load = [&](int s) {
                    return K::W::load_strip(codes + offset[s], laneid());
                };
                // Of 16 rows, all loads first, where a warp has fewer strips its last again: 1 %
                // faster. Of eight it is 2 % slower.
                constexpr bool early = K::eights > 1;
                typename K::W::Words strip[K::most];
#pragma unroll
                for (int s = 0; early && s < K::most; ++s) strip[s] = load(s);
                uint32_t a[4][K::eights][2];
                load_a(stage_of<K>(g, at.slot) + piece * uint32_t(sizeof(typename K::rows)), a);
#pragma unroll
                for (int s = 0; s < K::most; ++s) {
                    if (s >= mine) break;
                    if constexpr (!early) strip[s] = load(s);
                    rt<T, 16, PIECE> fragments;
                    K::W::fragments(strip[s], fragments);
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        uint32_t words[4];
#pragma unroll
                        for (int j = 0; j < 4; ++j) {
                            words[j] = arch::bit_cast<uint32_t>(fragments.tiles[0][i].data[j]);
                        }
#pragma unroll
                        for (int e = 0; e < K::eights; ++e) {
                            arch::mma_sync<T, T>::fma(d[s][e], words, a[i][e], d[s][e]);
                        }
                    }
                }
            }
            arch::sync_warp();
            if (laneid() == 0) arrive(semaphores.empty[at.slot]);
            at.advance(by, plan.stages);
        });
        place.advance(g.k_stages, plan.stages);
    }
};

// The epilogue of a tile: `sums` are k_groups * tokens rows of plan.pitch floats.
template <class K>
__device__ __forceinline__ void few_finish(const typename K::Globals& g, uint32_t sums,
                                           const FewMainloop<K>& loop, const Tile& tile,
                                           int row_group, int k_group) {
    constexpr Config C = K::config;
    constexpr int THREADS = FEW_WARPS * WARP_THREADS;
    const FewPlan& plan = g.plan;
    const Strips<K> strips(g, tile);
    const bool empty = tile.group >= g.groups;
    if (!empty) {
        arch::named_barrier_sync(SUMS, THREADS);  // those of the last tile have been read
        const int row = laneid() / 4, token = laneid() % 4 * 2;
#pragma unroll
        for (int s = 0; s < K::most; ++s) {
            const int i = row_group + s * plan.row_groups;
            if (i >= strips.count) break;
#pragma unroll
            for (int e = 0; e < K::eights; ++e) {
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const int line = k_group * C.tokens + e * 8 + token + j % 2;
                    const int column = i * STRIP_ROWS + row + j / 2 * 8;
                    arch::store_shared(sums + (line * plan.pitch + column) * 4, loop.d[s][e][j]);
                }
            }
        }
        arch::named_barrier_sync(SUMS, THREADS);
    }
    const float scale = scale_of(g, tile.group);
    const int fours = strips.count * (STRIP_ROWS / 4);
    const int there = min(C.tokens, static_cast<int>(tile.end - tile.token));
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < there * fours; i += THREADS) {
        const int row = i / fours, column = (i - row * fours) * 4;
        const uint32_t n = strips.first * STRIP_ROWS + column;
        if (n >= g.n) continue;
        float4 sum{};
#pragma unroll 4
        for (int part = 0; part < (empty ? 0 : plan.k_groups); ++part) {
            const auto more = arch::load_shared<float4>(
                sums + ((part * C.tokens + row) * plan.pitch + column) * 4);
            sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
        }
        store_results<K>(g, tile.group, scale, tile.token + row, n, sum);
    }
}

template <class K>
__global__ __launch_bounds__(K::threads, 1) void mixed_few_kernel(const __grid_constant__
                                                                  typename K::Globals g) {
    auto& semaphores = *reinterpret_cast<typename K::Semaphores*>(shared_memory());
    const int warp = arch::warp_uniform(warpid());
    if (warp == FEW_WARPS) {
        if (arch::elect_one()) {
#pragma unroll 1
            for (int i = 0; i < g.plan.stages; ++i) {
                init_semaphore(semaphores.full[i], 2);
                init_semaphore(semaphores.empty[i], g.plan.pieces * g.plan.row_groups);
            }
            arch::mbarrier_init_fence();
        }
        arch::sync_warp();
    } else if (warp > FEW_WARPS) {
        if (arch::elect_one()) {
            arch::tma_prefetch_map(&g.rows_map);
            arch::tma_prefetch_map(&g.strips_map);
        }
        arch::sync_warp();
    }
    arch::sync_block();
    arch::wait_for_dependencies();
    arch::launch_dependents();
    if (warp == FEW_WARPS) {
        if (arch::elect_one()) load_strips<K>(g, semaphores);
        arch::sync_warp();
    } else if (warp > FEW_WARPS) {
        if (arch::elect_one()) load_rows<K>(g, semaphores);
        arch::sync_warp();
    } else {
        const int k_group = warp % g.plan.k_groups, row_group = warp / g.plan.k_groups;
        const uint32_t sums = stage_of<K>(g, g.plan.stages);
        FewMainloop<K> loop;
        for_each_tile<K>(g, [&](const Tile& tile) {
            if (tile.group < g.groups) loop.run(g, semaphores, tile, row_group, k_group);
            few_finish<K>(g, sums, loop, tile, row_group, k_group);
        });
    }
}

}  // namespace sm90

template <Config C>
void launch_few(const Params& p, const FewPlan& plan, Stream stream) {
    using K = sm90::FewTypes<C>;
    using T = typename K::T;
    const auto ceil_div = [](int64_t x, int64_t y) {
        return static_cast<uint32_t>((x + y - 1) / y);
    };
    const int64_t quad = 4 * size_in_bytes(p.out_dtype);
    // A stage's rows of a come in one copy, if no part of it has to be filled with zeros.
    const bool whole = p.k % PIECE == 0;
    const auto count = static_cast<uint32_t>(plan.pieces);
    const int strips_box = p.schedule.strips % 2 == 0 ? 2 : 1;
    const kittens::host::TensorMapSpec rows{
        .data = p.a,
        .type = kittens::detail::tensor_map_type<T>(),
        .element_bytes = 2,
        .dims = {uint64_t(whole ? PIECE : p.k), uint64_t(p.m), uint64_t(whole ? p.k / PIECE : 1),
                 1},
        .strides = {p.a_stride, PIECE, 0},
        .box = {PIECE, uint32_t(C.tokens), whole ? count : 1, 1},
        .swizzle_bytes = K::rows::swizzle_bytes,
    };
    constexpr int WORDS = K::strip / 4;
    const int64_t k_pieces = pieces(p.k);
    const kittens::host::TensorMapSpec strips{
        .data = p.weight,
        .type = kittens::detail::tensor_map_type<float>(),
        .element_bytes = 4,
        .dims = {WORDS, STRIPS, uint64_t(k_pieces), uint64_t(pieces(p.n) * p.groups)},
        .strides = {WORDS, STRIPS * WORDS, k_pieces * STRIPS * WORDS},
        .box = {WORDS, uint32_t(strips_box), count, 1},
        .swizzle_bytes = 0,
    };
    const typename K::Globals globals{
        .rows_map = kittens::host::encode_tensor_map(rows),
        .strips_map = kittens::host::encode_tensor_map(strips),
        .weight = static_cast<const uint8_t*>(p.weight),
        .scale = p.scale,
        .bias = p.bias,
        .offs = p.offs,
        .out = p.out,
        .out_dtype = p.out_dtype,
        .activation = static_cast<gemm::Activation>(p.activation),
        .quads = reinterpret_cast<uintptr_t>(p.out) % quad == 0 && p.n % 4 == 0,
        .m = static_cast<uint32_t>(p.m),
        .n = static_cast<uint32_t>(p.n),
        .groups = static_cast<uint32_t>(p.groups),
        .row_pieces = static_cast<uint32_t>(pieces(p.n)),
        .row_tiles = ceil_div(p.n, STRIP_ROWS * p.schedule.strips),
        .clusters = static_cast<uint32_t>(p.schedule.blocks),
        .splits = 1,
        .k_pieces = static_cast<int>(k_pieces),
        .k_stages = static_cast<int>(ceil_div(k_pieces, plan.pieces)),
        .strips = p.schedule.strips,
        .rows_box = whole ? plan.pieces : 1,
        .strips_box = strips_box,
        .plan = plan,
    };
    kittens::launch(kittens::LaunchOptions{.dependent = true}, sm90::mixed_few_kernel<K>,
                    dim3(p.schedule.blocks), dim3(K::threads), dim3(1), FEW_SHARED_BYTES, stream,
                    globals);
}
template <Config C>
void launch_few(const Params& p, Stream stream) {
    launch_few<C>(p, few_plan(C, p.schedule.strips), stream);
}

}  // namespace thunderkittens::mixed_gemm
