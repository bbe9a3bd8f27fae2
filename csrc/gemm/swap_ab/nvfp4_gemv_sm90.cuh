// GEMV-like swap-AB product of up to 16 rows of 16-bit activations with a prepared NVFP4 weight on
// Hopper, on mma.sync: its cost is to read the weight, once.
//
// A tile is as many strips of 16 rows of the weight as give every SM the same amount, all of k, and
// up to 16 rows of a. Roles: of 17 warps one loads, the weight in bulk copies of whole pieces where
// a tile has all strips of them, a by TMA. The others divide the strips and the pieces of a stage
// of the ring, and depend on nobody: a warp makes 16-bit fragments of a strip in registers, the
// first operand of mma.sync, whose second are the rows of a. At the end the sums of the warps that
// divide k meet in shared memory, and are added in a fixed order: reruns give the same bits.
//
// How the work is shared, and with it the size of a stage, is known at run time (GemvPlan), so that
// one kernel serves all widths. A call lasts as long as some ten waits for memory, so that what
// comes before the first copy and after the last product counts: code there comes from memory too,
// line by line, and is short.
#pragma once

#include "csrc/gemm/swap_ab/nvfp4_types_sm90.cuh"

namespace thunderkittens::nvfp4_gemm {
namespace sm90 {

template <Config C>
struct GemvTraits {
    static constexpr Config config = C;
    using T = std::conditional_t<C.dtype == DType::bf16, bf16, half>;
    using W = Nvfp4Weights;
    using rows = st<T, C.tokens, PIECE>;
    static constexpr int piece = PIECE_BYTES, strip = STRIP_BYTES;
    static constexpr int threads = nvfp4_gemm::threads(C);
    static constexpr int eights = C.tokens / 8;  // of rows of a: columns of a product
    static constexpr int most = 4;               // strips of a warp

    struct Semaphores {
        semaphore full[GEMV_STAGES], empty[GEMV_STAGES];
    };
    static_assert(sizeof(Semaphores) <= 1024);

    struct Globals {
        // The tensor maps of a stage's rows of a, and of some strips of a piece of rows for all of
        // a stage's k.
        CUtensorMap rows_map, strips_map;
        const uint8_t* weight;
        const float* scale;
        const void* bias;
        const int32_t* offs;
        void* out;
        DType out_dtype;
        gemm::Activation activation;
        bool vec4_aligned;  // four neighbouring elements of out are aligned
        uint32_t m, n, groups;
        uint32_t row_pieces, row_tiles, blocks;
        int k_pieces, k_stages;
        int strips, all_strips;    // of a tile, of a weight
        int rows_box, strips_box;  // pieces of k of one copy of a, strips of one of the weight
        GemvPlan plan;
    };
};

// A position in the ring: stage number `slot`, and the parity `phase` of the round.
struct RingPlace {
    int slot = 0, phase = 0;
    __device__ __forceinline__ void advance(int count, int stages) {
        slot += count;
#pragma unroll 1
        while (slot >= stages) slot -= stages, phase ^= 1;
    }
    // The same for at most as many stages as there are.
    __device__ __forceinline__ void advance_within(int count, int stages) {
        slot += count;
        if (slot >= stages) slot -= stages, phase ^= 1;
    }
};

// Calls work(tile) for each of this block's tiles: of each group in turn, tiles of the same rows of
// the weight one after the other.
template <class Traits, class Work>
__device__ __forceinline__ void for_each_gemv_tile(const typename Traits::Globals& g, Work work) {
    constexpr uint32_t tokens = Traits::config.tokens;
    uint32_t index = blockIdx.x, begin = 0;
    // One loop for all, so that `work` is in the code once: behind the last group are rows that
    // have none.
#pragma unroll 1
    for (uint32_t group = 0; group <= g.groups; ++group) {
        uint32_t end = g.m;
        if (g.offs != nullptr && group < g.groups) {
            const int last = arch::load_global(g.offs + group);
            end = min(max(uint32_t(max(last, 0)), begin), g.m);
        }
        const uint32_t token_tiles = (end - begin + tokens - 1) / tokens;
        const uint32_t tiles = token_tiles * g.row_tiles;
#pragma unroll 1
        for (; index < tiles; index += g.blocks) {
            uint32_t row_tile = index, token = begin;
            if (token_tiles > 1) {
                row_tile = index / token_tiles;
                token += (index - row_tile * token_tiles) * tokens;
            }
            work(Tile{group, row_tile, token, end});
        }
        index -= tiles;
        begin = end;
    }
}

// The strips of a tile, and where they lie in a stage: piece after piece of rows. Of a piece that
// the tile has whole they are as in memory, of others, after the strips of a copy, its k.
template <class Traits>
struct Strips {
    int first, count;
    int head, middle;  // those before the first whole piece, those of whole pieces

    __device__ __forceinline__ Strips(const typename Traits::Globals& g, const Tile& tile)
        : first(static_cast<int>(tile.row_tile) * g.strips),
          count(min(g.strips, g.all_strips - first)),
          head(min(-first & (STRIPS - 1), count)),
          middle((count - head) & -STRIPS) {}
    __device__ __forceinline__ bool whole(int i) const {
        return static_cast<uint32_t>(i - head) < static_cast<uint32_t>(middle);
    }
    // Copies of those that are in no whole piece, of `box` strips each, one or two.
    __device__ __forceinline__ int boxes(int box) const {
        const int tail = count - head - middle;
        return box == 1 ? head + tail : (head + 1) / 2 + (tail + 1) / 2;
    }
    // Where strip i is, of a piece of the stage's k.
    __device__ __forceinline__ uint32_t place(const typename Traits::Globals& g, int i,
                                              int piece) const {
        const int together = whole(i) ? STRIPS : g.strips_box;
        const int within = (first + i) & (together - 1);
        return ((i - within) * g.plan.pieces + piece * together + within) * Traits::strip;
    }
};

// How row groups divide the strips of a tile: each has `all` of its own, and where the strips that
// are left are half as many as the groups, two groups alternate at each. Those of a warp are
// numbers first, first + row groups, ...; the last may be shared.
struct Share {
    int all, left;
    bool alternate;

    __device__ __forceinline__ Share(const GemvPlan& plan, int count)
        : all(count >> plan.row_groups_bits),
          left(count & (plan.row_groups - 1)),
          alternate(2 * left == plan.row_groups) {}
    __device__ __forceinline__ int strip(const GemvPlan& plan, int row_group, int s) const {
        return s * plan.row_groups + (alternate && s == all ? row_group & (left - 1) : row_group);
    }
    // The number of places for sums: each of the groups that share a strip has one.
    __device__ __forceinline__ int places(const GemvPlan& plan, int count) const {
        return alternate ? (all + 1) * plan.row_groups : count;
    }
};

template <class Traits>
__device__ __forceinline__ uint32_t stage_of(const typename Traits::Globals& g, int slot) {
    return arch::shared_address(shared_memory()) + 1024 + slot * g.plan.stage_bytes;
}
// The strips of a stage lie behind its rows of a.
template <class Traits>
__device__ __forceinline__ uint32_t strips_of(const typename Traits::Globals& g, int slot) {
    return stage_of<Traits>(g, slot) + g.plan.pieces * uint32_t(sizeof(typename Traits::rows));
}

// Blocks begin at different k, so that not all of them read the same lines of a at the same time.
template <class Traits, class Work>
__device__ __forceinline__ void for_each_gemv_stage(const typename Traits::Globals& g,
                                                    const Tile& tile, int begin, int by,
                                                    Work work) {
    const uint64_t place = tile.row_tile * 0x9e3779b9u;  // as a fraction of 2^32
    int k = static_cast<int>(place * static_cast<uint32_t>(g.k_stages) >> 32) + begin;
#pragma unroll 1
    for (int step = begin; step < g.k_stages; step += by) {
#pragma unroll 1
        while (k >= g.k_stages) k -= g.k_stages;
        work(k);
        k += by;
    }
}

// The thread that loads.
template <class Traits>
__device__ __forceinline__ void produce_gemv(const typename Traits::Globals& g,
                                             typename Traits::Semaphores& semaphores) {
    constexpr int rows_bytes = sizeof(typename Traits::rows);
    const int pieces = g.plan.pieces, rows_box = g.rows_box, strips_box = g.strips_box;
    RingPlace place{0, 1};
    for_each_gemv_tile<Traits>(g, [&](const Tile& tile) {
        if (tile.group >= g.groups) return;
        const Strips<Traits> strips(g, tile);
        const int line = static_cast<int>(tile.group * g.row_pieces) + strips.first / STRIPS;
        // A box has all its bytes, also past the end of k.
        const int boxes = strips.boxes(strips_box) * strips_box * pieces * Traits::strip;
        for_each_gemv_stage<Traits>(g, tile, 0, 1, [&](int k) {
            semaphore& full = semaphores.full[place.slot];
            const int first = k * pieces, there = min(pieces, g.k_pieces - first);
            const uint32_t rows = stage_of<Traits>(g, place.slot);
            const uint32_t codes = strips_of<Traits>(g, place.slot);
            wait(semaphores.empty[place.slot], place.phase);
            tma::expect_bytes(full, max(there, rows_box) * rows_bytes + boxes +
                                        strips.middle * there * Traits::strip);
#pragma unroll 1
            for (int i = 0; i < there; i += rows_box) {
                const int piece = first + i;
                arch::tma_load<tma::CachePolicy::evict_last>(
                    rows + i * rows_bytes, &g.rows_map,
                    rows_box > 1
                        ? arch::TmaCoordinates{0, static_cast<int>(tile.token), piece, 0}
                        : arch::TmaCoordinates{piece * PIECE, static_cast<int>(tile.token), 0, 0},
                    full.address());
            }
#pragma unroll 1
            for (int i = 0; i < strips.count;) {
                const uint32_t at = codes + i * pieces * Traits::strip;
                const int within = (strips.first + i) % STRIPS;
                const int row = line + (strips.first % STRIPS + i) / STRIPS;
                if (strips.whole(i)) {
                    arch::bulk_load_evict_first(
                        at, g.weight + (int64_t(row) * g.k_pieces + first) * Traits::piece,
                        there * Traits::piece, full.address());
                    i += STRIPS;
                } else {
                    arch::tma_load<tma::CachePolicy::evict_first>(
                        at, &g.strips_map, arch::TmaCoordinates{0, within, first, row},
                        full.address());
                    // No box reaches into the next piece of rows.
                    i += strips_box;
                }
            }
            place.advance(1, g.plan.stages);
        });
    });
}

// A warp that multiplies.
template <class Traits>
struct GemvMainloop {
    static constexpr Config C = Traits::config;
    using T = typename Traits::T;
    RingPlace place;
    float d[Traits::most][Traits::eights][4];

    // The addresses at which a lane finds what it needs in the first stage; from one stage to the
    // next no swizzle changes. With 16 rows they are pinned, because they would else be computed
    // for every stage.
    struct Places {
        static constexpr int loads = 2 * Traits::eights;
        static constexpr bool PINNED = Traits::eights == 2;
        uint32_t a[loads], codes, scales;

        __device__ __forceinline__ Places(const typename Traits::Globals& g, int piece)
            : codes(strips_of<Traits>(g, 0) + laneid() * Traits::W::LANE_CODES),
              scales(strips_of<Traits>(g, 0) + Traits::W::scales_of(laneid())) {
            const int lane = laneid(), of_eights = lane / 8;
            const int row = lane % 8 + (Traits::eights == 2 ? of_eights / 2 * 8 : 0);
            const int column = Traits::eights == 2 ? of_eights % 2 * 8 : of_eights * 8;
            const uint32_t tile =
                stage_of<Traits>(g, 0) + piece * uint32_t(sizeof(typename Traits::rows));
#pragma unroll
            for (int i = 0; i < loads; ++i) {
                a[i] = Traits::rows::idx(tile, {row, i * (PIECE / loads) + column});
                if constexpr (PINNED) arch::pin_register(a[i]);
            }
            if constexpr (PINNED) arch::pin_register(codes), arch::pin_register(scales);
        }
        // Second operands for the four products of a piece, of eight rows of a each.
        __device__ __forceinline__ void load_a(uint32_t stage,
                                               uint32_t (&to)[4][Traits::eights][2]) const {
            auto& words = reinterpret_cast<uint32_t(&)[loads][4]>(to);
#pragma unroll
            for (int i = 0; i < loads; ++i) {
                arch::load_matrix_x4(words[i][0], words[i][1], words[i][2], words[i][3],
                                     a[i] + stage);
            }
        }
    };

    // Strips row_group, row_group + row_groups, ... of the tile, pieces k_group, k_group +
    // k_groups, ... of k, in the order in which stages come.
    __device__ __forceinline__ void run(const typename Traits::Globals& g,
                                        typename Traits::Semaphores& semaphores, const Tile& tile,
                                        int row_group, int k_group) {
        const GemvPlan& plan = g.plan;
        const Strips<Traits> strips(g, tile);
        const int piece = k_group & (plan.pieces - 1);
        const Share share(plan, strips.count);
        const int mine = share.all + (!share.alternate && row_group < share.left);
        // Whether a shared strip is this warp's in the next stage.
        int turn = share.alternate && row_group < share.left;
        uint32_t offset[Traits::most];
#pragma unroll
        for (int s = 0; s < Traits::most; ++s) {
            offset[s] =
                strips.place(g, min(share.strip(plan, row_group, s), strips.count - 1), piece);
#pragma unroll
            for (int e = 0; e < Traits::eights; ++e) {
#pragma unroll
                for (int j = 0; j < 4; ++j) d[s][e][j] = 0.f;
            }
        }
        const Places places(g, piece);
        const int first = k_group >> plan.pieces_bits, by = plan.k_groups >> plan.pieces_bits;
        RingPlace at = place;
        at.advance(first, plan.stages);
        for_each_gemv_stage<Traits>(g, tile, first, by, [&](int k) {
            const auto release = [&] {
                gemm::sm90::arrive_by_warp(semaphores.empty[at.slot]);
                at.advance_within(by, plan.stages);
            };
            wait(semaphores.full[at.slot], at.phase);
            if (k * plan.pieces + piece >= g.k_pieces) return release();
            // All loads come first (a warp with fewer strips loads its last one again), so that the
            // stage is free for the next copy while the warp multiplies.
            const uint32_t stage = at.slot * plan.stage_bytes;
            typename Traits::W::Words strip[Traits::most];
#pragma unroll
            for (int s = 0; s < Traits::most; ++s) {
                const uint32_t from = stage + offset[s];
                strip[s] = Traits::W::load_words(places.codes + from, places.scales + from);
            }
            uint32_t a[4][Traits::eights][2];
            places.load_a(stage, a);
            release();
            const int now = mine + turn;
            turn = share.alternate && turn == 0;
#pragma unroll
            for (int s = 0; s < Traits::most; ++s) {
                if (s >= now) break;
                rt<T, 16, PIECE> fragments;
                Traits::W::fragments(strip[s], fragments);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    uint32_t words[4];
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        words[j] = arch::bit_cast<uint32_t>(fragments.tiles[0][i].data[j]);
                    }
#pragma unroll
                    for (int e = 0; e < Traits::eights; ++e) {
                        arch::mma_sync<T, T>::fma(d[s][e], words, a[i][e], d[s][e]);
                    }
                }
            }
        });
        place.advance(g.k_stages, plan.stages);
    }
};

// The epilogue of a tile: `sums` are k_groups * tokens rows of plan.pitch floats.
template <class Traits>
__device__ __forceinline__ void gemv_epilogue(const typename Traits::Globals& g, uint32_t sums,
                                              const GemvMainloop<Traits>& loop, const Tile& tile,
                                              float scale, int row_group, int k_group) {
    constexpr Config C = Traits::config;
    constexpr int THREADS = GEMV_WARPS * WARP_THREADS;
    const GemvPlan& plan = g.plan;
    const Strips<Traits> strips(g, tile);
    const Share share(plan, strips.count);
    const bool empty = tile.group >= g.groups;
    if (!empty) {
        arch::named_barrier_sync(SUMS, THREADS);  // those of the last tile have been read
        // A lane has two neighbouring rows of a, and rows r and r + 8 of the weight.
        const int line = k_group * C.tokens + laneid() % 4 * 2;
        const uint32_t pitch = plan.pitch * 4;
        uint32_t to = sums + line * pitch + (row_group * STRIP_ROWS + laneid() / 4) * 4;
#pragma unroll
        for (int s = 0; s < Traits::most; ++s, to += plan.row_groups * STRIP_ROWS * 4) {
            if (row_group + s * plan.row_groups >= share.places(plan, strips.count)) break;
#pragma unroll
            for (int e = 0; e < Traits::eights; ++e) {
                const uint32_t first = to + e * 8 * pitch, second = first + pitch;
                arch::store_shared(first, loop.d[s][e][0]);
                arch::store_shared(second, loop.d[s][e][1]);
                arch::store_shared(first + 32, loop.d[s][e][2]);
                arch::store_shared(second + 32, loop.d[s][e][3]);
            }
        }
        arch::named_barrier_sync(SUMS, THREADS);
    }
    const int there = min(C.tokens, static_cast<int>(tile.end - tile.token));
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < there << plan.fours_bits; i += THREADS) {
        const int row = i >> plan.fours_bits, column = (i & ((1 << plan.fours_bits) - 1)) * 4;
        const uint32_t n = strips.first * STRIP_ROWS + column;
        if (column >= strips.count * STRIP_ROWS || n >= g.n) continue;
        float4 sum{};
        const bool two = share.alternate && column >= share.all * plan.row_groups * STRIP_ROWS;
#pragma unroll 1
        for (int half = 0; half <= two; ++half) {
            uint32_t from = sums + (row * plan.pitch + column + half * share.left * STRIP_ROWS) * 4;
#pragma unroll 1
            for (int group = 0; group < (empty ? 0 : plan.k_groups); group += 4) {
                float4 more[4];
#pragma unroll
                for (int j = 0; j < 4; ++j, from += C.tokens * plan.pitch * 4) {
                    more[j] = arch::load_shared<float4>(from);
                }
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    sum.x += more[j].x, sum.y += more[j].y, sum.z += more[j].z, sum.w += more[j].w;
                }
            }
        }
        store_results<Traits>(g, tile.group, scale, tile.token + row, n, sum);
    }
}

template <class Traits>
__global__ __launch_bounds__(Traits::threads,
                             1) void nvfp4_gemv_kernel(const __grid_constant__
                                                       typename Traits::Globals g) {
    auto& semaphores = *reinterpret_cast<typename Traits::Semaphores*>(shared_memory());
    const int warp = arch::warp_uniform(warpid());
    // Two branches and not one with an else, so that ptxas lays what comes before the first copy at
    // the kernel's beginning: elsewhere it would be fetched from memory on its own.
    if (warp == GEMV_WARPS) {
        if (arch::elect_one()) {
            arch::tma_prefetch_map(&g.rows_map);
#pragma unroll 1
            for (int i = 0; i < g.plan.stages; ++i) {
                init_semaphore(semaphores.full[i], 1);
                init_semaphore(semaphores.empty[i], g.plan.pieces * g.plan.row_groups);
            }
            arch::mbarrier_init_fence();
        }
        arch::sync_warp();
        arch::named_barrier_arrive(READY, Traits::threads);
        arch::wait_for_dependencies();
        arch::launch_dependents();
        if (arch::elect_one()) produce_gemv<Traits>(g, semaphores);
        arch::sync_warp();
    }
    if (warp < GEMV_WARPS) {
        const int row_group = warp >> g.plan.k_groups_bits;
        const int k_group = warp & (g.plan.k_groups - 1);
        const uint32_t sums = stage_of<Traits>(g, g.plan.stages);
        GemvMainloop<Traits> loop;
        arch::named_barrier_sync(READY, Traits::threads);
        arch::wait_for_dependencies();
        arch::launch_dependents();
        for_each_gemv_tile<Traits>(g, [&](const Tile& tile) {
            const float scale = scale_of(g, tile.group);  // on its way during the products
            if (tile.group < g.groups) loop.run(g, semaphores, tile, row_group, k_group);
            gemv_epilogue<Traits>(g, sums, loop, tile, scale, row_group, k_group);
        });
    }
}

}  // namespace sm90

template <Config C>
void launch_gemv(const Params& p, const GemvPlan& plan, Stream stream) {
    using Traits = sm90::GemvTraits<C>;
    using T = typename Traits::T;
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
        .swizzle_bytes = Traits::rows::swizzle_bytes,
    };
    constexpr int WORDS = Traits::strip / 4;
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
    typename Traits::Globals globals{
        .rows_map = kittens::host::encode_tensor_map(rows),
        .strips_map = kittens::host::encode_tensor_map(strips),
        .weight = static_cast<const uint8_t*>(p.weight),
        .row_pieces = static_cast<uint32_t>(pieces(p.n)),
        .row_tiles = static_cast<uint32_t>(ceil_div(p.n, STRIP_ROWS * p.schedule.strips)),
        .blocks = static_cast<uint32_t>(p.schedule.blocks),
        .k_pieces = static_cast<int>(k_pieces),
        .k_stages = static_cast<int>(ceil_div(k_pieces, plan.pieces)),
        .strips = p.schedule.strips,
        .all_strips = static_cast<int>(ceil_div(p.n, STRIP_ROWS)),
        .rows_box = whole ? plan.pieces : 1,
        .strips_box = strips_box,
        .plan = plan,
    };
    set_results(globals, p);
    kittens::launch(kittens::LaunchOptions{.dependent = true}, sm90::nvfp4_gemv_kernel<Traits>,
                    dim3(p.schedule.blocks), dim3(Traits::threads), dim3(1), GEMV_SHARED_BYTES,
                    stream, globals);
}
template <Config C>
void launch_gemv(const Params& p, Stream stream) {
    launch_gemv<C>(p, gemv_plan(C, p.schedule.strips), stream);
}

}  // namespace thunderkittens::nvfp4_gemm
