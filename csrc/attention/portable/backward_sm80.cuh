// Attention backward for every GPU from Ampere on, by cp.async, ldmatrix and mma.sync (Dao,
// "FlashAttention-2", 2023, section 3.1.2):
//
//   P = exp(scale * Q K^T - LSE)     dV = P^T dO     dP = dO V^T
//   dS = P * (dP - delta)            dQ = scale * dS K     dK = scale * dS^T Q
//
// A block owns the keys of one work tile, whose K and V are in shared memory and whose dK and dV
// are in registers, and walks the query blocks that see them, over its query heads of the group.
// There are no roles: all threads copy, and all warps multiply.
//
//   S^T, dP^T  a warp has 16 or 32 keys and, of warps that share keys, a part of the queries. As
//              the scores are transposed, P^T and dS^T are left in registers as operands of the
//              next two
//   dV, dK     a warp has its keys and a part of the columns, in turns of 16. With its own queries
//              it begins from registers; what others have of P^T and dS^T comes through shared
//              memory, behind the only barrier of a step beside that of the copies
//   dQ         all warps divide the tile, and add it to memory by reductions of single floats
//
// Between the instructions of dP^T stand the exponentials, between those of dV the elements of dS.
// A second stage of Q and dO comes during all of a step; where there is one stage, while dQ is
// computed. dQ is summed in tiles of 16 x 16 in the order of the accumulators' registers, so that a
// warp's reduction is of 128 neighbouring bytes; backward_prepost_sm80.cuh puts the elements in
// order. In the deterministic mode key blocks add to a tile of dQ in ascending order, by its
// semaphore, and work tiles are claimed, so that each waits for earlier ones alone.
#pragma once

#include "csrc/attention/backward/backward_scores.cuh"
#include "csrc/attention/portable/backward_types_sm80.cuh"
#include "csrc/attention/portable/copies_sm80.cuh"
#include "csrc/attention/portable/products_sm80.cuh"

namespace thunderkittens::attention {

using namespace kittens;

template <class Kernel>
struct PortableBackwardWarp {
    using T = typename Kernel::T;
    static constexpr int key_tiles = Kernel::key_tiles, column_warps = Kernel::column_warps;
    static constexpr int query_tiles = Kernel::queries / 16;  // at a time
    using scores = rt_fl<16, Kernel::queries>;                // transposed: rows are keys
    using weights = rt<T, 16, Kernel::queries>;
    using part = rt_fl<16, 16>;
    using key_gradient = rt_fl<16, Kernel::head_dim / column_warps>;
    using value_gradient = rt_fl<16, Kernel::value_dim / column_warps>;
    // What is done to 16 x 16 scores.
    struct Tile {
        using T = typename Kernel::T;
        static constexpr int block_m = 16;
        static constexpr bool score_mod = Kernel::score_mod;
    };
    using Weighing = Weights<Tile, PortableBackwardGlobals<Kernel>>;
    template <class X>
    using copy = TileCopy<X, Kernel::threads>;

    const PortableBackwardGlobals<Kernel>& g;
    PortableBackwardShared<Kernel>& shared;
    Weighing weighing{g};

    // The warp's keys in the block, and its place among those that share them.
    static __device__ __forceinline__ int first_key() {
        return Kernel::warp_keys * (arch::warp_uniform(warpid()) / column_warps);
    }
    static __device__ __forceinline__ int share() {
        return arch::warp_uniform(warpid()) % column_warps;
    }
    __device__ __forceinline__ const BackwardWorkTile& work() const { return shared.work; }

    // ---- the steps, each a query block of a head ----

    struct Step {
        int head, j;  // of the group; of the work tile
    };
    // In the deterministic mode the last comes first: key blocks further on, which begin later and
    // wait for this one, then have the tiles that it has left.
    __device__ __forceinline__ int query_block(const Step& at) const {
        return g.deterministic ? read(work().begin) + read(work().end) - 1 - at.j : at.j;
    }
    __device__ __forceinline__ Step next(Step at) const {
        if (++at.j == read(work().end)) at = {at.head + 1, read(work().begin)};
        return at;
    }
    // Of dQ, and of the statistics of its rows.
    __device__ __forceinline__ int64_t tile_of(const Step& at) const {
        return read(work().dq_tile) + int64_t{at.head} * g.scheduler.tiles_of_head() +
               query_block(at);
    }

    // ---- copies, by all threads of the block ----

    __device__ __forceinline__ void load_keys() {
        const int row = read(work().block) * Kernel::block_n;
        const int rows = read(work().k_length) - row;
        const auto load = [&](auto& tile, const StridedRows<T>& x, int columns) {
            copy<std::remove_reference_t<decltype(tile)>>::load(
                tile, x.at(read(work().b), read(work().key_head), read(work().k_begin) + row, 0),
                x.row_stride, rows, columns);
        };
        load(shared.k, g.k, g.head_dim);
        load(shared.v, g.v, g.value_dim);
    }
    // Nothing where there is no such step.
    __device__ __forceinline__ void load_step(const Step& at, int stage) {
        if (at.head >= g.scheduler.group) return;
        const int row = query_block(at) * Kernel::block_m;
        const int rows = read(work().q_length) - row;
        const int head = read(work().head) * g.scheduler.group + at.head;
        const auto load = [&](auto& tile, const StridedRows<T>& x, int columns) {
            copy<std::remove_reference_t<decltype(tile)>>::load(
                tile, x.at(read(work().b), head, read(work().q_begin) + row, 0), x.row_stride, rows,
                columns);
        };
        load(shared.q[stage], g.q, g.head_dim);
        load(shared.grad_out[stage], g.grad_out, g.value_dim);
        const int first = 4 * static_cast<int>(threadIdx.x);
        if (first < Kernel::block_m) {
            const int64_t from = tile_of(at) * Kernel::block_m + first;
            arch::cp_async<16>(shared.lse[stage].address_of(first), g.lse_log2 + from);
            arch::cp_async<16>(shared.delta[stage].address_of(first), g.delta + from);
        }
    }

    // ---- the products ----

    template <class Rows>
    using k_adjacent_b = operand_walker<operand_b, true, Rows>;
    template <class Rows>
    using rows_b = operand_walker<operand_b, false, Rows>;

    // S^T or dP^T: the warp's keys with queries from `query` on.
    template <class Keys, class Queries, class Between>
    static __device__ __forceinline__ void multiply_keys(scores (&s)[key_tiles], const Keys& keys,
                                                         const Queries& queries, int query,
                                                         Between between) {
        const operand_walker<operand_a, true, Keys> a_walker(keys, first_key(), 0);
        const k_adjacent_b<Queries> b_walker(queries, query, 0);
#pragma unroll
        for (int m = 0; m < key_tiles; ++m) zero_tile(s[m]);
        Product<T, key_tiles, query_tiles, Keys::cols / 16>::add(
            [&](auto& a, int m, int step) { a_walker.load(a, 16 * m, 16 * step, 0); },
            [&](auto& b, int n, int step) { b_walker.load(b, 16 * n, 16 * step, 0); },
            [&](int m, int n) -> part& { return tile_at(s[m], n); }, between);
    }
    // dV or dK += a times the rows from `query` on, in the warp's columns.
    template <class Gradient, class LoadA, class Rows, class Between>
    static __device__ __forceinline__ void add_rows(Gradient (&sum)[key_tiles], LoadA load_a,
                                                    const Rows& rows, int query, Between between) {
        // The walker's columns are bits beside those of its origin: a multiple of all shares.
        const rows_b<Rows> walker(rows, query, 16 * share());
        Product<T, key_tiles, Gradient::width, query_tiles>::add(
            load_a,
            [&](auto& b, int n, int step) { walker.load(b, 16 * step, 16 * column_warps * n, 0); },
            [&](int m, int n) -> part& { return tile_at(sum[m], n); }, between);
    }
    template <class Gradient, class Rows, class Between>
    static __device__ __forceinline__ void add_own(Gradient (&sum)[key_tiles],
                                                   const weights (&w)[key_tiles], const Rows& rows,
                                                   int query, Between between) {
        add_rows(
            sum,
            [&](auto& a, int m, int step) {
                const auto& words =
                    reinterpret_cast<const uint32_t(&)[4]>(w[m].tiles[0][step].data);
#pragma unroll
                for (int i = 0; i < 4; ++i) a.words[i] = words[i];
            },
            rows, query, between);
    }
    template <class Gradient, class Rows>
    static __device__ __forceinline__ void add_others(Gradient (&sum)[key_tiles],
                                                      const typename Kernel::p_tile& w,
                                                      const Rows& rows, int query) {
        const operand_walker<operand_a, true, typename Kernel::p_tile> walker(w, first_key(),
                                                                              query);
        add_rows(
            sum, [&](auto& a, int m, int step) { walker.load(a, 16 * m, 16 * step, 0); }, rows,
            query, [](int) {});
    }

    // Stores tiles of 16 x 16 into P^T or dS^T. 16 rows further the swizzle is the same, and
    // columns further it exchanges bits of the address alone.
    struct Writer {
        uint32_t first;  // this thread's upper left element of the tile at the origin

        __device__ __forceinline__ Writer(const typename Kernel::p_tile& to, int key, int query)
            : first(to.address_of(key + laneid() / 4, query + 2 * (laneid() % 4))) {}
        __device__ __forceinline__ void store(const rt<T, 16, 16>& tile, int rows,
                                              int columns) const {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const uint32_t at = (first ^ uint32_t(2 * (columns + 8 * (i / 2)))) +
                                    (rows + 8 * (i % 2)) * Kernel::p_tile::swizzle_bytes;
                arch::store_shared(at, tile.tiles[0][0].data[i]);
            }
        }
    };
    static_assert(Kernel::p_tile::stripes == 1);

    // S^T, dP^T, P^T and dS^T of queries from `query` on, and what they add to dV and dK.
    __device__ __forceinline__ void multiply_own(key_gradient (&dk)[key_tiles],
                                                 value_gradient (&dv)[key_tiles], int m, int stage,
                                                 int query) {
        const auto& q = shared.q[stage];
        const auto& grad_out = shared.grad_out[stage];
        const bool masked = m < read(work().unmasked_begin) || m >= read(work().unmasked_end);
        scores s[key_tiles], dp[key_tiles];
        weights p[key_tiles], ds[key_tiles];
        constexpr int tiles = key_tiles * query_tiles;
        const int of_tile = (m * Kernel::block_m + query) / 16;
        const auto first_key_of = [](int row) {
            return [row](const BackwardWorkTile& of) {
                // Of one warp: those of other warps are not behind each other.
                return read(of.block) * Kernel::block_n + first_key() + 16 * row -
                       16 * warpgroup::warpid();
            };
        };
        const auto statistics = [&](const typename Kernel::statistics& rows, int tile) {
            return QueryStatistics{rows.address_of(query + 16 * (tile % query_tiles))};
        };
        // One of several pieces of work before every so many of COUNT products.
        const auto spread = [](auto count, auto work) {
            return [work](int i) {
                constexpr int products = decltype(count)::value;
                constexpr int every = products > tiles ? products / tiles : 1;
                if (i % every == 0 && i / every < tiles) work(i / every);
            };
        };
        const auto weigh = [&](int tile) {
            const int row = tile / query_tiles, n = tile % query_tiles;
            auto& x = tile_at(s[row], n);
            auto& w = tile_at(p[row], n);
            weighing.weigh(x, w, work(), of_tile + n, Kernel::score_mod && masked,
                           statistics(shared.lse[stage], tile), first_key_of(row));
            if constexpr (!Kernel::score_mod) convert_scores(w, x);
            if constexpr (Kernel::shares_keys)
                Writer(shared.p, first_key(), query).store(w, 16 * row, 16 * n);
        };
        const auto differentiate = [&](int tile) {
            const int row = tile / query_tiles, n = tile % query_tiles;
            auto& x = tile_at(dp[row], n);
            const auto& w = tile_at(s[row], n);
            auto& to = tile_at(ds[row], n);
            with_row_statistic(x, statistics(shared.delta[stage], tile),
                               [](float& y, float delta) { y -= delta; });
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 a = w.tiles[0][0].data[i], b = x.tiles[0][0].data[i];
                to.tiles[0][0].data[i] = pack_pair<T>(a.x * b.x, a.y * b.y);
            }
            Writer(shared.ds, first_key(), query).store(to, 16 * row, 16 * n);
        };
        using counts_keys = std::integral_constant<int, query_tiles * Kernel::value_dim / 16>;
        using counts_rows = std::integral_constant<int, query_tiles * value_gradient::width>;
        multiply_keys(s, shared.k, q, query, [](int) {});
        // Softcap comes before the mask; else it is done here, with no branch among the products.
        if (!Kernel::score_mod && masked) {
#pragma unroll
            for (int tile = 0; tile < tiles; ++tile) {
                const int row = tile / query_tiles, n = tile % query_tiles;
                Weighing::mask(tile_at(s[row], n), work(), of_tile + n, first_key_of(row));
            }
        }
        multiply_keys(dp, shared.v, grad_out, query, spread(counts_keys(), weigh));
        add_own(dv, p, grad_out, query, spread(counts_rows(), differentiate));
        add_own(dk, ds, q, query, [](int) {});
    }

    // ---- dQ ----

    __device__ __forceinline__ void multiply_dq(
        rt_fl<16, 16 * Kernel::dq_tiles> (&dq)[Kernel::dq_rows / 16], int row, int column) {
        const operand_walker<operand_a, false, typename Kernel::p_tile> a_walker(shared.ds, 0, row);
        const rows_b<typename Kernel::k_tile> b_walker(shared.k, 0, column);
#pragma unroll
        for (auto& x : dq) zero_tile(x);
        Product<T, Kernel::dq_rows / 16, Kernel::dq_tiles, Kernel::block_n / 16>::add(
            [&](auto& a, int m, int step) { a_walker.load(a, 16 * step, 16 * m, 0); },
            [&](auto& b, int n, int step) {
                b_walker.load(b, 16 * step, 16 * Kernel::dq_column_warps * n, 0);
            },
            [&](int m, int n) -> part& { return tile_at(dq[m], n); });
    }
    __device__ __forceinline__ void add_dq(const Step& at) {
        rt_fl<16, 16 * Kernel::dq_tiles> dq[Kernel::dq_rows / 16];
        const int warp = arch::warp_uniform(warpid());
        const int row = warp / Kernel::dq_column_warps * Kernel::dq_rows;
        const int column = warp % Kernel::dq_column_warps * 16;
        multiply_dq(dq, row, column);
        const int64_t tile = tile_of(at);
        float* const to = g.dq + (tile * Kernel::block_m + row) * Kernel::head_dim + 16 * column;
        const auto add = [&](auto f) {
#pragma unroll
            for (int m = 0; m < Kernel::dq_rows / 16; ++m) {
#pragma unroll
                for (int n = 0; n < Kernel::dq_tiles; ++n) {
                    with_sums(tile_at(dq[m], n),
                              to + 16 * m * Kernel::head_dim + 256 * Kernel::dq_column_warps * n,
                              f);
                }
            }
        };
        const auto reduce = [](float* x, float value) { arch::reduce_add_global(x, value); };
        if (!g.deterministic) {
            add(reduce);
            return;
        }
        const int place =
            read(work().block) - Kernel::Scheduler::first_block(query_block(at), read(work().low));
        int* const semaphore = g.dq_semaphores + tile;
        if (threadIdx.x == 0) {
            while (arch::load_acquire_global(semaphore) < place) {
            }
        }
        arch::sync_block();
        if (place == 0)
            add([](float* x, float value) { arch::store_global(x, value); });
        else
            add(reduce);
        arch::sync_block();
        if (threadIdx.x == 0) arch::store_release_global(semaphore, place + 1);
    }

    // ---- a work tile ----

    __device__ __forceinline__ void walk(key_gradient (&dk)[key_tiles],
                                         value_gradient (&dv)[key_tiles]) {
        Step at{0, read(work().begin)};
        load_keys();
        load_step(at, 0);
        arch::cp_async_commit();
        int stage = 0;
#pragma unroll 1
        while (at.head < g.scheduler.group) {
            if (Kernel::score_mod) weighing.find_slope(work(), at.head);
            // This step's operands are here, and nobody reads those of the step before any more.
            arch::cp_async_wait<0>();
            arch::sync_block();
            if constexpr (Kernel::stages > 1) {
                load_step(next(at), stage ^ 1);
                arch::cp_async_commit();
            }
            const int m = query_block(at);
#pragma unroll
            for (int query = 0; query < Kernel::warp_queries; query += Kernel::queries) {
                multiply_own(dk, dv, m, stage, query + share() * Kernel::warp_queries);
            }
            if (Kernel::shares_keys || g.dq != nullptr) arch::sync_block();
            if constexpr (Kernel::shares_keys) {
#pragma unroll
                for (int other = 1; other < column_warps; ++other) {
                    const int query = (share() ^ other) * Kernel::warp_queries;
                    add_others(dv, shared.p, shared.grad_out[stage], query);
                    add_others(dk, shared.ds, shared.q[stage], query);
                }
            }
            if constexpr (Kernel::stages == 1) {
                arch::sync_block();
                load_step(next(at), 0);
                arch::cp_async_commit();
            }
            if (g.dq != nullptr) add_dq(at);
            if constexpr (Kernel::stages > 1) stage ^= 1;
            at = next(at);
        }
    }
    template <class Gradient>
    __device__ __forceinline__ void store(const Gradient (&sum)[key_tiles],
                                          const StridedRows<T>& to, float* partial, int columns) {
        const bool split = g.scheduler.head_splits > 1;
        if (split ? partial == nullptr : to.data == nullptr) return;
        const int block = read(work().block) * Kernel::block_n;
#pragma unroll
        for (int m = 0; m < key_tiles; ++m) {
            const int key = block + first_key() + 16 * m;
            const int rows = read(work().k_length) - key;
            if (rows <= 0) return;
#pragma unroll
            for (int n = 0; n < Gradient::width; ++n) {
                const int column = 16 * (n * column_warps + share());
                const auto& tile = tile_at(sum[m], n);
                if (split) {
                    const int64_t row =
                        g.scheduler.key_rows.first(read(work().b), read(work().k_begin),
                                                   read(work().head)) +
                        key;
                    with_sums(tile,
                              partial + row * (16 * Gradient::width * column_warps) + 16 * column,
                              [](float* x, float value) { arch::store_global(x, value); });
                } else {
                    store_tile<T>(tile,
                                  to.at(read(work().b), read(work().key_head),
                                        read(work().k_begin) + key, column),
                                  to.row_stride, rows, columns - column);
                }
            }
        }
    }
    __device__ __forceinline__ void process() {
        key_gradient dk[key_tiles];
        value_gradient dv[key_tiles];
#pragma unroll
        for (int m = 0; m < key_tiles; ++m) {
            zero_tile(dk[m]);
            zero_tile(dv[m]);
        }
        if (read(work().begin) < read(work().end)) walk(dk, dv);
#pragma unroll
        for (int m = 0; m < key_tiles; ++m) scale_rows(dk[m], make_float2(g.scale, g.scale));
        store(dv, g.dv, g.partial_dv, g.value_dim);
        store(dk, g.dk, g.partial_dk, g.head_dim);
    }
};

template <class Kernel>
__global__ __launch_bounds__(Kernel::threads, Kernel::blocks_per_sm) void portable_backward_kernel(
    const __grid_constant__ PortableBackwardGlobals<Kernel> g) {
    shared_allocator<128> allocator(shared_memory());
    auto& shared = allocator.template allocate<PortableBackwardShared<Kernel>>();
    if (threadIdx.x == 0) {
        int index = static_cast<int>(blockIdx.x);
        if (g.deterministic) index = arch::fetch_add_global(g.scheduler.next_work_tile, 1);
        g.scheduler.describe(shared.work, index);
    }
    arch::sync_block();
    PortableBackwardWarp<Kernel>{g, shared}.process();
}

template <BackwardConfig config>
void launch_portable_backward(const BackwardParams& params, Stream stream) {
    using Kernel = PortableBackwardKernel<config>;
    static_assert(sizeof(PortableBackwardShared<Kernel>) == Kernel::shared_bytes,
                  "portable_backward_memory() must count all of the block's shared memory");
    const Problem& p = params.problem;
    const Workspace workspace(params, config);
    launch_portable_preprocess<config.dtype>(params, workspace, config, stream);
    const auto rows = [&](const Operand& x) {
        return StridedRows<typename Kernel::T>(x, p.varlen);
    };
    const PortableBackwardGlobals<Kernel> globals{
        .q = rows(params.q),
        .k = rows(params.k),
        .v = rows(params.v),
        .grad_out = rows(params.grad_out),
        .dk = rows(params.dk),
        .dv = rows(params.dv),
        .scheduler = typename Kernel::Scheduler(params, workspace.next_work_tile),
        .lse_log2 = workspace.lse_log2,
        .delta = workspace.delta,
        .dq = workspace.dq,
        .partial_dk = workspace.dk,
        .partial_dv = workspace.dv,
        .dq_semaphores = workspace.dq_semaphores,
        .score_mod = ScoreMod(params.scores),
        .scale = params.scores.scale,
        .scale_log2 = params.scores.scale * LOG2_E,
        .head_dim = int(p.head_dim),
        .value_dim = int(p.value_dim),
        .deterministic = params.deterministic};
    const auto blocks = unsigned(globals.scheduler.tiles.work_tiles());
    if (blocks > 0) {
        kittens::launch({.blocks_per_sm = Kernel::blocks_per_sm}, portable_backward_kernel<Kernel>,
                        dim3(blocks), dim3(Kernel::threads), dim3(1), Kernel::shared_bytes, stream,
                        globals);
    }
    launch_portable_postprocess<config.dtype>(params, workspace, config, stream);
}

}  // namespace thunderkittens::attention
