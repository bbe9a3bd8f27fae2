// Attention forward for every GPU from Ampere on: out = softmax(scale * q k^T) v, one pass over the
// keys with a running maximum and sum, by cp.async, ldmatrix and mma.sync (Dao, "FlashAttention-2",
// 2023).
//
// A block works on a tile of query rows of one head and walks the keys from the last visible block
// to the first. There are no roles: every warp has 16 or 32 of the rows to itself, multiplies all
// of a block's keys with them, and so needs no other warp for the softmax; the weights, as the
// first product leaves them in registers, are an operand of the second. All threads copy.
//
//   rows of a warp   32 where the registers hold the output of so many, for then a fragment of keys
//                    or values, which comes through shared memory, serves two products; else 16
//   query            in registers, where it passes through the memory of the rings; or in memory of
//                    its own
//   stages           2: the keys and values of the next block come during all of this one, one
//                    barrier a block. 1: values come under the product with the keys, the next keys
//                    under the product with the values, two barriers a block, half of the memory
//
// In a warp the exponentials of 16 keys stand between the products of the 16 before with their
// values, so that the tensor cores work meanwhile. A block of keys that none of a warp's rows see
// costs it nothing, and only the blocks that the band cuts for its own rows are masked. The grid
// has a block for each work tile, the longest first.
#pragma once

#include <algorithm>

#include "csrc/attention/common/layouts.cuh"
#include "csrc/attention/common/scores.cuh"
#include "csrc/attention/forward/forward.h"
#include "csrc/attention/forward/forward_work.cuh"
#include "csrc/attention/portable/copies_sm80.cuh"
#include "csrc/attention/portable/paged_rows_sm80.cuh"
#include "csrc/attention/portable/products_sm80.cuh"
#include "kittens/kittens.cuh"

namespace thunderkittens::attention {

using namespace kittens;

template <Config config>
struct PortableKernel {
    using T = std::conditional_t<config.dtype == DType::bf16, bf16, half>;
    static constexpr int head_dim = config.head_dim;
    static constexpr int value_dim = config.value_dim;
    static constexpr int warp_rows = config.warp_rows;
    static constexpr int row_tiles = warp_rows / 16;  // of a warp
    static constexpr int block_m = 64 * config.warpgroups;
    static constexpr int block_n = config.block_n;
    static constexpr int stages = config.stages;
    static constexpr bool score_mod = config.score_mod;
    static constexpr bool keeps_query = config.keeps_query;
    static constexpr bool paged = config.paged;
    static constexpr int threads = forward_threads(config);
    static constexpr int blocks_per_sm = portable_blocks_per_sm(config);
    static constexpr int shared_bytes = forward_memory(config).bytes;
    static_assert(stages == 1 || stages == 2);

    using q_tile = st<T, block_m, head_dim>;
    using k_tile = st<T, block_n, head_dim>;
    using v_tile = st<T, block_n, value_dim>;
};

template <class Kernel>
struct PortableGlobals {
    StridedRows<typename Kernel::T> q, k, v, out;
    float* lse;
    const float* sink;
    ForwardScheduler scheduler;
    ForwardSequences sequences;
    ScoreMod score_mod;
    int head_dim, value_dim;
    int group;  // query heads per key head
    [[no_unique_address]] PagedRows<Kernel::paged> pages;
};

template <class Kernel>
struct PortableRings {
    typename Kernel::v_tile v[Kernel::stages];
    typename Kernel::k_tile k[Kernel::stages];
};
template <class Kernel, bool KEEPS_QUERY>
struct PortableTiles {
    PortableRings<Kernel> rings;
    typename Kernel::q_tile q;
};
// Until it is in registers, the query has the place of values, and of keys if it is larger.
template <class Kernel>
struct PortableTiles<Kernel, true> {
    union {
        PortableRings<Kernel> rings;
        typename Kernel::q_tile q;
    };
};
// What the loop needs to know of a work tile, which would take a dozen registers.
template <class T>
struct alignas(16) PortableTask {
    struct alignas(16) Keys {
        const T *k, *v;  // the first ones
    } keys;
    struct alignas(16) Band {
        int k_length, low, high, diagonal;
    } band;
};
template <class Kernel>
struct PortableShared : PortableTiles<Kernel, Kernel::keeps_query> {
    PortableTask<typename Kernel::T> task;
    [[no_unique_address]] typename PagedRows<Kernel::paged>::Pages pages;
    // The key blocks that a warp's rows see.
    struct alignas(16) {
        KeyBlocks blocks;
    } warps[Kernel::threads / 32];
};

// Of the work tile's sequence: (batch, heads, rows), or of packed sequences (heads, tokens).
template <class Kernel>
__device__ __forceinline__ float* lse_rows(float* lse, const ForwardWorkTile<Kernel>& work,
                                           const SequenceTable& sequences, int heads, bool packed) {
    const int64_t line = packed ? work.head : int64_t(work.b) * heads + work.head;
    return lse + line * sequences.q_length + work.s.q_begin;
}
// By the thread that has the first columns of a row and of that 8 below. (The Hopper kernel has its
// own: with this one its machine code changes.)
__device__ __forceinline__ void store_row_lse(float* rows, float2 lse, const Lengths& s, int row) {
    if (laneid() % 4 != 0) return;
    if (row < s.q_length) arch::store_global(rows + row, lse.x);
    if (row + 8 < s.q_length) arch::store_global(rows + row + 8, lse.y);
}

// What one warp does of a work tile.
template <class Kernel>
struct PortableWarp {
    using T = typename Kernel::T;
    using Shared = PortableShared<Kernel>;
    static constexpr int row_tiles = Kernel::row_tiles;
    static constexpr int block_n = Kernel::block_n;
    static constexpr int k_steps = Kernel::head_dim / 16;  // of the product with the keys
    static constexpr int key_tiles = block_n / 16, value_tiles = Kernel::value_dim / 16;
    using scores = rt_fl<16, block_n>;
    using output = rt_fl<16, Kernel::value_dim>;
    using q_walker = operand_walker<operand_a, true, typename Kernel::q_tile>;
    using k_walker = operand_walker<operand_b, true, typename Kernel::k_tile>;
    using v_walker = operand_walker<operand_b, false, typename Kernel::v_tile>;
    using part = rt_fl<16, 16>;  // of scores or of the output
    template <class Tile>
    using copy = TileCopy<Tile, Kernel::threads>;
    using Pages = typename PagedRows<Kernel::paged>::Pages;

    const PortableGlobals<Kernel>& g;
    Shared& shared;
    const ForwardWorkTile<Kernel>& work;

    template <class X>
    static __device__ __forceinline__ X read(const X& x) {
        return arch::load_shared<X>(arch::shared_address(&x));
    }
    template <class X>
    static __device__ __forceinline__ void write(X& to, const X& x) {
        arch::store_shared(arch::shared_address(&to), x);
    }
    static __device__ __forceinline__ int first_row_of_warp() {
        return Kernel::warp_rows * arch::warp_uniform(warpid());
    }
    __device__ __forceinline__ auto& of_warp() { return shared.warps[warpid()]; }

    // ---- copies, by all threads of the block ----

    static __device__ __forceinline__ int stage_of(int block) { return block % Kernel::stages; }
    // A block's rows of keys or of values, `from` the first of all on, or the first of the cache.
    template <class Tile>
    __device__ __forceinline__ void load_rows(Tile (&ring)[Kernel::stages], const T* from,
                                              int64_t row_stride, int block, int k_length,
                                              int columns) {
        const int first = block * block_n;
        copy<Tile>::load(ring[stage_of(block)], from + first * row_stride, row_stride,
                         k_length - first, columns);
    }
    template <class Tile>
    __device__ __forceinline__ void load_paged_rows(Tile (&ring)[Kernel::stages], const T* from,
                                                    int64_t row_stride, int block, int k_length,
                                                    int columns, const Pages& pages,
                                                    int page_rows) {
        const int first = block * block_n;
        const auto address = [&](int row) {
            return from + g.pages.row_of(pages, first + row, page_rows) * row_stride;
        };
        copy<Tile>::load_scattered(ring[stage_of(block)], address, k_length - first, columns);
    }
    __device__ __forceinline__ void load_k(int block, const T* from, int k_length,
                                           const Pages& pages) {
        if constexpr (Kernel::paged)
            load_paged_rows(shared.rings.k, from, g.k.row_stride, block, k_length, g.head_dim,
                            pages, g.pages.k_page_rows);
        else
            load_rows(shared.rings.k, from, g.k.row_stride, block, k_length, g.head_dim);
    }
    __device__ __forceinline__ void load_v(int block, const T* from, int k_length,
                                           const Pages& pages) {
        if constexpr (Kernel::paged)
            load_paged_rows(shared.rings.v, from, g.v.row_stride, block, k_length, g.value_dim,
                            pages, g.pages.v_page_rows);
        else
            load_rows(shared.rings.v, from, g.v.row_stride, block, k_length, g.value_dim);
    }
    __device__ __forceinline__ Pages known_pages() const {
        if constexpr (Kernel::paged)
            return read(shared.pages);
        else
            return {};
    }
    // Behind a work tile's first barrier; there are none before its first block.
    __device__ __forceinline__ void load_next_k(int block) {
        if (block < work.keys.begin) return;
        load_k(block, read(shared.task.keys.k), read(shared.task.band.k_length), known_pages());
    }
    __device__ __forceinline__ void load_next_v(int block) {
        if (block < work.keys.begin) return;
        load_v(block, read(shared.task.keys.v), read(shared.task.band.k_length), known_pages());
    }
    __device__ __forceinline__ void load_query() {
        copy<typename Kernel::q_tile>::load(shared.q,
                                            g.q.at(work.b, work.head, work.s.q_begin + work.row, 0),
                                            g.q.row_stride, work.s.q_length - work.row, g.head_dim);
    }

    // ---- the query's operands ----

    struct Query {
        operand_a<T> of[Kernel::keeps_query ? k_steps : 1][row_tiles];
    };
    __device__ __forceinline__ q_walker query_walker() {
        return q_walker(shared.q, first_row_of_warp(), 0);
    }
    static __device__ __forceinline__ void load_step(operand_a<T> (&to)[row_tiles],
                                                     const q_walker& walker, int step) {
#pragma unroll
        for (int m = 0; m < row_tiles; ++m) walker.load(to[m], 16 * m, 16 * step, 0);
    }

    // Everything that the first block of keys needs is on its way, and a query that is kept is in
    // registers.
    __device__ __forceinline__ void begin(Query& query) {
        const int last = work.keys.end - 1;
        const Lengths& s = work.s;
        const auto first_of = [&](const StridedRows<T>& x) {
            return x.at(work.b, work.head / g.group, s.k_begin, 0);
        };
        const T *const k = first_of(g.k), *const v = first_of(g.v);
        Pages pages;
        if constexpr (Kernel::paged) {
            pages = g.pages.pages_of(work.b);
            if (threadIdx.x == 0) write(shared.pages, pages);
        }
        if (threadIdx.x == 0) {
            write(shared.task.keys, {k, v});
            write(shared.task.band, {s.k_length, s.low, s.high, s.diagonal});
        }
        const int row = work.row + first_row_of_warp();
        const KeyBlocks own =
            key_blocks<block_n>(s, row, ::min(row + Kernel::warp_rows, s.q_length) - 1);
        if (laneid() == 0) write(of_warp(), {own});
        load_query();
        if constexpr (Kernel::keeps_query) {
            constexpr bool keys_have_room =
                sizeof(typename Kernel::q_tile) <= sizeof(shared.rings.v);
            arch::cp_async_commit();
            if constexpr (keys_have_room) {
                load_k(last, k, s.k_length, pages);
                arch::cp_async_commit();
            }
            arch::cp_async_wait<keys_have_room ? 1 : 0>();
            arch::sync_block();
            const q_walker walker = query_walker();
#pragma unroll
            for (int step = 0; step < k_steps; ++step) load_step(query.of[step], walker, step);
            if constexpr (!keys_have_room || Kernel::stages > 1) arch::sync_block();
            if constexpr (!keys_have_room) load_k(last, k, s.k_length, pages);
        } else {
            load_k(last, k, s.k_length, pages);
        }
        if constexpr (Kernel::stages > 1) load_v(last, v, s.k_length, pages);
        arch::cp_async_commit();
    }

    // ---- the products, each operand loaded one ahead ----

    __device__ __forceinline__ void multiply_keys(scores (&s)[row_tiles], const Query& query,
                                                  int block) {
        const k_walker walker(shared.rings.k[stage_of(block)], 0, 0);
        const q_walker queries = query_walker();
        operand_a<T> q[2][row_tiles];  // of this step and the next
        if constexpr (!Kernel::keeps_query) load_step(q[0], queries, 0);
#pragma unroll
        for (int m = 0; m < row_tiles; ++m) zero_tile(s[m]);
        with_operands<T, k_steps * key_tiles>(
            [&](auto& k, int i) { walker.load(k, 16 * (i % key_tiles), 16 * (i / key_tiles), 0); },
            [&](int i, const auto& k) {
                const int step = i / key_tiles, n = i % key_tiles;
                if constexpr (!Kernel::keeps_query) {
                    if (n == 0 && step + 1 < k_steps)
                        load_step(q[(step + 1) % 2], queries, step + 1);
                }
#pragma unroll
                for (int m = 0; m < row_tiles; ++m) {
                    mma_operands(reinterpret_cast<part&>(s[m].tiles[0][n]),
                                 Kernel::keeps_query ? query.of[step][m] : q[step % 2][m], k);
                }
            });
    }

    // Of 16 keys.
    struct Weights {
        operand_a<T> of[row_tiles];
    };
    __device__ __forceinline__ Weights weigh(scores (&s)[row_tiles],
                                             OnlineSoftmax (&softmax)[row_tiles],
                                             const Shift (&shift)[row_tiles], int keys_at) const {
        Weights p;
#pragma unroll
        for (int m = 0; m < row_tiles; ++m) {
            auto& x = reinterpret_cast<part&>(s[m].tiles[0][keys_at]);
            softmax[m].add_weights(x, g.score_mod.unit_log2, shift[m]);
            convert_scores(reinterpret_cast<rt<T, 16, 16>&>(p.of[m].words), x);
        }
        return p;
    }
    __device__ __forceinline__ void add_values(output (&o)[row_tiles], scores (&s)[row_tiles],
                                               OnlineSoftmax (&softmax)[row_tiles],
                                               const Shift (&shift)[row_tiles], int block) {
        const v_walker walker(shared.rings.v[stage_of(block)], 0, 0);
        Weights next = weigh(s, softmax, shift, 0), p;
        with_operands<T, key_tiles * value_tiles>(
            [&](auto& v, int i) {
                walker.load(v, 16 * (i / value_tiles), 16 * (i % value_tiles), 0);
            },
            [&](int i, const auto& v) {
                const int keys_at = i / value_tiles, n = i % value_tiles;
                if (n == 0) {
                    p = next;
                    if (keys_at + 1 < key_tiles) next = weigh(s, softmax, shift, keys_at + 1);
                }
#pragma unroll
                for (int m = 0; m < row_tiles; ++m)
                    mma_operands(reinterpret_cast<part&>(o[m].tiles[0][n]), p.of[m], v);
            });
    }

    // ---- the softmax ----

    // Softcap, ALiBi and masks; then a maximum that has grown too far rescales what there is.
    __device__ __forceinline__ void prepare(scores (&s)[row_tiles], output (&o)[row_tiles],
                                            OnlineSoftmax (&softmax)[row_tiles],
                                            Shift (&shift)[row_tiles], float slope, int block) {
        const auto corner = [&](int m) -> Corner {
            return {work.row + first_row_of_warp() + 16 * m + laneid() / 4, block * block_n};
        };
        const KeyBlocks own = read(of_warp()).blocks;
        const bool masked = block >= own.unmasked_end || block < own.unmasked_begin;
        if constexpr (Kernel::score_mod) {
            const int diagonal = read(shared.task.band.diagonal);
#pragma unroll
            for (int m = 0; m < row_tiles; ++m) {
                shift[m] = g.score_mod.template apply<T>(s[m], corner(m).columns(diagonal),
                                                         {slope, slope});
            }
        }
        if (masked) {
            const auto band = read(shared.task.band);
            const Lengths lengths{0, 0, 0, band.k_length, band.low, band.high, band.diagonal};
#pragma unroll
            for (int m = 0; m < row_tiles; ++m) mask_keys(s[m], lengths, corner(m));
        }
        const float unit = g.score_mod.unit_log2;
        float2 top[row_tiles];
        bool outgrown = false;
#pragma unroll
        for (int m = 0; m < row_tiles; ++m) {
            top[m] = OnlineSoftmax::thread_maximum(s[m], shift[m]);
            outgrown |= softmax[m].outgrown(top[m], unit);
        }
        if (arch::any_lane(outgrown)) {
#pragma unroll
            for (int m = 0; m < row_tiles; ++m) scale_rows(o[m], softmax[m].raise(top[m], unit));
        }
    }

    // ---- a work tile ----

    __device__ __forceinline__ void attend() {
        OnlineSoftmax softmax[row_tiles];
        output o[row_tiles];
#pragma unroll
        for (int m = 0; m < row_tiles; ++m) zero_tile(o[m]);
        if (work.sees_keys()) walk_keys(o, softmax);
        finish(o, softmax, {g, g.scheduler.work_tile(arch::block_again())});
    }
    __device__ __forceinline__ void walk_keys(output (&o)[row_tiles],
                                              OnlineSoftmax (&softmax)[row_tiles]) {
        Query query;
        begin(query);
        const float slope = Kernel::score_mod ? g.score_mod.slope(work.b, work.head) : 0.0f;
#pragma unroll 1
        for (int block = work.keys.end - 1; block >= work.keys.begin; --block) {
            scores s[row_tiles];
            // This block's keys are here, and, for two stages, its values; nobody reads the memory
            // of the block before any more.
            arch::cp_async_wait<0>();
            arch::sync_block();
            if constexpr (Kernel::stages > 1) load_next_k(block - 1);
            load_next_v(block - (Kernel::stages - 1));
            arch::cp_async_commit();
            const KeyBlocks own = read(of_warp()).blocks;
            const bool sees = block >= own.begin && block < own.end;
            if (sees) multiply_keys(s, query, block);
            if constexpr (Kernel::stages == 1) {
                arch::cp_async_wait<0>();
                arch::sync_block();
                load_next_k(block - 1);
                arch::cp_async_commit();
            }
            if (sees) {
                Shift shift[row_tiles];
                prepare(s, o, softmax, shift, slope, block);
                add_values(o, s, softmax, shift, block);
            }
        }
    }
    // `again`: the work tile, which has not been kept in registers.
    __device__ __forceinline__ void finish(output (&o)[row_tiles],
                                           OnlineSoftmax (&softmax)[row_tiles],
                                           const ForwardWorkTile<Kernel>& again) const {
        const auto& s = again.s;
        float2 sink{};
        if (g.sink != nullptr) {
            sink.x = sink.y = arch::load_global_readonly(g.sink + again.head) * LOG2_E;
        }
#pragma unroll
        for (int m = 0; m < row_tiles; ++m) {
            softmax[m].reduce_sum();
            float2 factor = {1.0f, 1.0f};
            if (g.sink != nullptr) factor = softmax[m].add_sink(sink);
            const float2 reciprocal = softmax[m].reciprocal_sum();
            scale_rows(o[m], {factor.x * reciprocal.x, factor.y * reciprocal.y});
            const int row = again.row + Kernel::warp_rows * warpid() + 16 * m;
            store_rows<T>(o[m], g.out.at(again.b, again.head, s.q_begin + row, 0), g.out.row_stride,
                          s.q_length - row, g.value_dim);
            if (g.lse == nullptr) continue;
            store_row_lse(lse_rows(g.lse, again, g.sequences, g.scheduler.heads, g.out.packed),
                          softmax[m].lse(), s, row + laneid() / 4);
        }
    }
};

// Rows behind the last packed sequence.
template <class Kernel>
__device__ __forceinline__ void clear_rest(const PortableGlobals<Kernel>& g) {
    ForwardWorkTile<Kernel> work(g, {0, 0, g.sequences.batch});
    const int row_stores = g.value_dim / 8;
    const int64_t stores = int64_t(g.scheduler.heads) * work.s.q_length * row_stores;
    const int64_t step = int64_t(gridDim.x) * Kernel::threads;
    for (int64_t i = int64_t(blockIdx.x) * Kernel::threads + threadIdx.x; i < stores; i += step) {
        const int column = static_cast<int>(i % row_stores);
        const int row = static_cast<int>(i / row_stores % work.s.q_length);
        work.head = static_cast<int>(i / row_stores / work.s.q_length);
        auto* const to = g.out.at(0, work.head, work.s.q_begin + row, 8 * column);
        arch::store_global(reinterpret_cast<uint4*>(to), make_uint4(0, 0, 0, 0));
        if (column == 0 && g.lse != nullptr) {
            arch::store_global(lse_rows(g.lse, work, g.sequences, g.scheduler.heads, true) + row,
                               -INFINITY);
        }
    }
}

template <class Kernel>
__global__ __launch_bounds__(Kernel::threads, Kernel::blocks_per_sm) void portable_forward_kernel(
    const __grid_constant__ PortableGlobals<Kernel> g) {
    shared_allocator<128> allocator(shared_memory());
    using Warp = PortableWarp<Kernel>;
    auto& shared = allocator.template allocate<typename Warp::Shared>();
    const int index = static_cast<int>(blockIdx.x);
    if (index < g.scheduler.work_tiles()) {
        const ForwardWorkTile<Kernel> work(g, g.scheduler.work_tile(index));
        if (work.row >= 0) Warp{g, shared, work}.attend();
    }
    if (g.out.packed) clear_rest(g);
}

template <Config config>
void launch_portable(const ForwardParams& params, Stream stream) {
    using Kernel = PortableKernel<config>;
    static_assert(sizeof(typename PortableWarp<Kernel>::Shared) == Kernel::shared_bytes,
                  "forward_memory() must count all of the block's shared memory");
    const Problem& p = params.problem;
    const auto rows = [&](const Operand& x) {
        return StridedRows<typename Kernel::T>(x, p.varlen);
    };
    const PortableGlobals<Kernel> globals{
        .q = rows(params.q),
        .k = rows(params.k),
        .v = rows(params.v),
        .out = rows(params.out),
        .lse = params.lse,
        .sink = params.scores.sink,
        .scheduler = ForwardScheduler(
            {.blocks = std::max(1, int((p.q_length + Kernel::block_m - 1) / Kernel::block_m)),
             .heads = int(p.q_heads),
             .batch = int(p.batch),
             .section_heads = params.section_heads}),
        .sequences = {p, params.sequences, params.pages},
        .score_mod = ScoreMod(params.scores),
        .head_dim = int(p.head_dim),
        .value_dim = int(p.value_dim),
        .group = int(p.q_heads / p.kv_heads),
        .pages = PagedRows<Kernel::paged>(params.pages)};
    const auto blocks = unsigned(std::max(globals.scheduler.work_tiles(), 1));
    kittens::launch({.blocks_per_sm = Kernel::blocks_per_sm}, portable_forward_kernel<Kernel>,
                    dim3(blocks), dim3(Kernel::threads), dim3(1), Kernel::shared_bytes, stream,
                    globals);
}

}  // namespace thunderkittens::attention
