// Matrix product for every GPU from compute capability 8.0 on: cp.async, ldmatrix, mma.sync. No
// roles: all warps copy, multiply and store. A block has one tile; each warp has a rectangle of it.
//
// The tensor cores wait for nobody if all else is issued between products. So a warp has the
// fragments of 16 of k twice: while it multiplies one set, it loads the other, and it copies a part
// of a stage that comes `stages - 1` later. Loads, copies and products take turns in the source, as
// they are to be issued. Before the last 16 of k of a stage the next stage has to be there, because
// its first fragments are loaded then:
//
//   16 of k        0              1              2              3
//   products       fragments 0    fragments 1    fragments 2    fragments 3
//   loads          fragments 1    fragments 2    fragments 3    fragments 0 of the next stage
//   copies         the stage before this one's slot is filled anew
//
// Blocks of four warps meet at a barrier before the last 16 of k. Larger ones, of which a
// multiprocessor has one, hand stages over by semaphores: a warp then waits for the others only
// where one of them is nearly a stage behind.
#pragma once

#include "csrc/gemm/common/launch_sm90.cuh"
#include "csrc/gemm/portable/copies_sm80.cuh"
#include "csrc/gemm/portable/epilogue_sm80.cuh"

namespace thunderkittens::gemm {
namespace sm80 {

// How b comes to shared memory, and from there to fragments. Traits of weights of few bits have a
// `Weights` that says it: its walker begins a stage by loading codes, and makes fragments of them.
template <class Traits>
struct OperandB {
    static constexpr PortableConfig C = Traits::config;
    using Walker = operand_walker<operand_b, !C.b_n_major, typename Traits::b_tile>;
    using Copies =
        sm80::Copies<typename Traits::b_tile, Traits::threads, !C.b_n_major, Traits::b_unit>;
};
template <class Traits>
    requires requires { typename Traits::Weights; }
struct OperandB<Traits> {
    using Walker = typename Traits::Weights::Walker;
    using Copies = typename Traits::Weights::Copies;
};

template <class Traits>
struct Multistage {
    static constexpr PortableConfig C = Traits::config;
    using T = typename Traits::T;
    using Shared = typename Traits::Shared;
    static constexpr int height = Traits::height, width = Traits::width, stages = Traits::stages;
    static constexpr int k_steps = BLOCK_K / 16;
    static constexpr uint32_t slot_bytes = sizeof(typename Traits::Stage);

    using ACopies = Copies<typename Traits::a_tile, Traits::threads, !C.a_m_major, C.block_m>;
    using BCopies = typename OperandB<Traits>::Copies;
    using AWalker = operand_walker<operand_a, !C.a_m_major, typename Traits::a_tile>;
    using BWalker = typename OperandB<Traits>::Walker;
    // 16 of k.
    struct Fragments {
        operand_a<T> a[height];
        operand_b<T> b[width];
    };
    using Sums = rt_fl<16, 16>[height][width];

    const typename Traits::Globals& g;
    Shared& shared;
    TileOrigin at;
    ACopies a;
    BCopies b;
    AWalker a_tiles;
    BWalker b_tiles;
    int k_left;          // behind the beginning of the stage that is copied next
    int steps;           // stages of k
    uint32_t read = 0;   // offset of the slot that is multiplied, and its number
    uint32_t write = 0;  // and of the one that is copied to next
    uint32_t marks = 0;  // of codes, see Traits::Codes
    pipeline_state<stages> reads{}, writes{};

    __device__ __forceinline__ Multistage(const typename Traits::Globals& globals, Shared& memory,
                                          const TileOrigin& origin)
        : g(globals),
          shared(memory),
          at(origin),
          a(memory.ring[0].a, globals.a, origin.batch, origin.m, origin.m_end - origin.m, 0),
          b(memory.ring[0].b, globals.b, origin.batch, first_column(), columns_left(), to_values()),
          a_tiles(memory.ring[0].a, C.a_m_major ? 0 : warp_row(), C.a_m_major ? warp_row() : 0),
          b_tiles(memory.ring[0].b, C.b_n_major ? 0 : warp_col(), C.b_n_major ? warp_col() : 0),
          k_left(static_cast<int>(origin.k)),
          steps(static_cast<int>((origin.k + BLOCK_K - 1) / BLOCK_K)) {
        if constexpr (Traits::divides_k) {
            static_assert(C.a_m_major && C.b_n_major);
            a.from += origin.k_begin * globals.a.stride;
            b.from += origin.k_begin * globals.b.stride;
        }
    }

    static __device__ __forceinline__ int warp_row() {
        return kittens::warpid() / C.warps_n * Traits::warp_m;
    }
    static __device__ __forceinline__ int warp_col() {
        return kittens::warpid() % C.warps_n * Traits::warp_n;
    }
    // Of b's columns, the first that the tile has, and how many there are from it on. Of a blocked
    // gate these are gates, and values lie `to_values` behind.
    __device__ __forceinline__ bool takes_pairs() const {
        return g.epilogue.gate == Gate::interleaved;
    }
    __device__ __forceinline__ uint32_t first_column() const {
        return takes_pairs() ? 2 * at.n : at.n;
    }
    __device__ __forceinline__ uint32_t columns_left() const {
        return (takes_pairs() ? g.n : at.n_end) - first_column();
    }
    __device__ __forceinline__ uint32_t to_values() const {
        return g.epilogue.gate == Gate::blocked ? g.out_n : 0;
    }

    // ---- copies ----

    // Whether no vector reaches over the end of a row, where columns do not lie along k.
    __device__ __forceinline__ bool has_whole_columns() const {
        return (!C.a_m_major || g.a_whole || at.m + C.block_m <= at.m_end) &&
               (!C.b_n_major || g.b_whole || columns_left() >= uint32_t(C.block_n));
    }
    __device__ __forceinline__ void copy_ragged() const {
        a.copy_ragged(g.a, write, k_left, at.m_end - at.m, 0);
        b.copy_ragged(g.b, write, k_left, columns_left(), to_values());
    }
    // The pointers of a stage's copies, which are issued in parts.
    struct Cursor {
        const uint8_t *a, *b;
    };
    // Issues the part `first` to `last` of the vectors of both operands, the a's before the b's.
    __device__ __forceinline__ void copy_part(Cursor& from, int first, int last) const {
#pragma unroll
        for (int i = 0; i < ACopies::count + BCopies::count; ++i) {
            if (i < first || i >= last) continue;
            if (i < ACopies::count) {
                a.copy_whole(from.a, i, write);
                ACopies::advance(from.a, g.a, i);
            } else {
                b.copy_whole(from.b, i - ACopies::count, write);
                BCopies::advance(from.b, g.b, i - ACopies::count);
            }
        }
    }
    // After the last vector of a stage: the next stage is the next slot's.
    __device__ __forceinline__ void finish_copies() {
        if constexpr (Traits::has_semaphores)
            arch::cp_async_mbarrier_arrive(shared.full[writes.stage].address());
        else
            arch::cp_async_commit();
        a.from += g.a.k_step, b.from += g.b.k_step;
        k_left -= BLOCK_K;
        writes.advance();
        write = writes.stage == 0 ? 0 : write + slot_bytes;
    }
    // The first stages.
    __device__ __forceinline__ void fill() {
#pragma unroll 1
        for (int s = 0; s < stages - 1; ++s) {
            if (k_left <= 0) {
                if constexpr (!Traits::has_semaphores) arch::cp_async_commit();
                continue;
            }
            copy_ragged();
            finish_copies();
        }
    }

    // ---- stages ----

    // Until the stage at `reads` is there for all threads; with barriers of the block, until all
    // have done with the stage before the last, too.
    __device__ __forceinline__ void await_stage() {
        if constexpr (Traits::has_semaphores) {
            wait(shared.full[reads.stage], reads.phase);
        } else {
            arch::cp_async_wait<stages - 2>();
            arch::sync_block();
        }
    }
    // The same, and what has to be done before its first fragments are loaded.
    __device__ __forceinline__ void enter_stage() {
        await_stage();
        if constexpr (requires { b_tiles.begin(read); }) b_tiles.begin(read);
    }
    // Until the slot that is copied to next is free.
    __device__ __forceinline__ void await_slot() {
        if constexpr (Traits::has_semaphores) {
            wait(shared.empty[writes.stage], writes.phase ^ 1);
        }
    }
    __device__ __forceinline__ void release_stage() {
        if constexpr (Traits::has_semaphores) {
            arch::sync_warp();
            if (laneid() == 0) arrive(shared.empty[reads.stage]);
        }
    }
    __device__ __forceinline__ void next_stage() {
        reads.advance();
        read = reads.stage == 0 ? 0 : read + slot_bytes;
    }

    // ---- products ----

    __device__ __forceinline__ void load_a(Fragments& f, int i, int k) const {
        C.a_m_major ? a_tiles.load(f.a[i], k * 16, i * 16, read)
                    : a_tiles.load(f.a[i], i * 16, k * 16, read);
    }
    __device__ __forceinline__ void load_b(Fragments& f, int i, int k) const {
        C.b_n_major ? b_tiles.load(f.b[i], k * 16, i * 16, read)
                    : b_tiles.load(f.b[i], i * 16, k * 16, read);
    }
    __device__ __forceinline__ void load_all(Fragments& f, int k) const {
#pragma unroll
        for (int i = 0; i < height; ++i) load_a(f, i, k);
#pragma unroll
        for (int i = 0; i < width; ++i) load_b(f, i, k);
    }
    // What is loaded beside the products of column `j` of base tiles: one of b, its share of a.
    __device__ __forceinline__ void load_beside(Fragments& f, int j, int k) const {
        constexpr int a_loads = (height + width - 1) / width;
        load_b(f, j, k);
#pragma unroll
        for (int i = j * a_loads; i < (j + 1) * a_loads; ++i) {
            if (i < height) load_a(f, i, k);
        }
    }
    // The products of 16 of k, and between them the loads of the fragments `k` of the stage at
    // `read`, and what else there is to do between two columns of base tiles.
    template <bool loads, class Between>
    __device__ __forceinline__ void multiply(Sums& d, const Fragments& current, Fragments& next,
                                             int k, Between between) {
        if constexpr (requires { typename Traits::Codes; }) {
            multiply_codes<loads>(d, current, next, k, between);
        } else {
#pragma unroll
            for (int j = 0; j < width; ++j) {
                if constexpr (loads) load_beside(next, j, k);
                between(j);
#pragma unroll
                for (int i = 0; i < height; ++i) mma_operands(d[i][j], current.a[i], current.b[j]);
            }
        }
    }

    // The same of elements of 8 bits, of which fragments have four in a word: 32 of k. In either
    // half of that they become fragments of 16 bits, of a before and of b between the products.
    template <bool loads, class Between>
    __device__ __forceinline__ void multiply_codes(Sums& d, const Fragments& current,
                                                   Fragments& next, int k, Between between) {
        using Codes = typename Traits::Codes;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            operand_a<T> a[height];
#pragma unroll
            for (int i = 0; i < height; ++i) {
                Codes::widen_a(a[i], current.a[i], half, marks);
            }
#pragma unroll
            for (int j = 0; j < width; ++j) {
                if (half == 0) {
                    if constexpr (loads) load_beside(next, j, k);
                    between(j);
                }
                operand_b<T> b;
                Codes::widen_b(b, current.b[j], half, marks);
#pragma unroll
                for (int i = 0; i < height; ++i) mma_operands(d[i][j], a[i], b);
            }
        }
    }

    // The products of a stage, beside copies of a stage that is whole.
    __device__ __forceinline__ void multiply_and_copy(Sums& d, Fragments (&f)[2]) {
        // Of the copies, what is issued at a time.
        constexpr int copies = ACopies::count + BCopies::count;
        constexpr int first_k = Traits::has_semaphores ? 1 : 0, parts = (3 - first_k) * width;
        Cursor from{a.from, b.from};
#pragma unroll
        for (int k = 0; k < k_steps - 1; ++k) {
            if (k == first_k) await_slot();
            multiply<true>(d, f[k % 2], f[1 - k % 2], k + 1, [&](int j) {
                const int part = (k - first_k) * width + j;
                if (k < first_k) return;
                copy_part(from, copies * part / parts, copies * (part + 1) / parts);
            });
        }
        finish_copies();
        release_stage();
        next_stage();
        enter_stage();
        multiply<true>(d, f[1], f[0], 0, [](int) {});
    }
    // The same at the end of k, or at the end of rows: what is copied, if anything, is not whole,
    // and there need not be a stage behind.
    __device__ __forceinline__ void multiply_at_end(Sums& d, Fragments (&f)[2], bool is_last) {
        const bool copying = k_left > 0;
        if (copying) {
            await_slot();
            copy_ragged();
            finish_copies();
        } else if constexpr (!Traits::has_semaphores) {
            arch::cp_async_commit();
        }
#pragma unroll
        for (int k = 0; k < k_steps - 1; ++k) {
            multiply<true>(d, f[k % 2], f[1 - k % 2], k + 1, [](int) {});
        }
        release_stage();
        if (!is_last) {
            next_stage();
            enter_stage();
            load_all(f[0], 0);
        }
        multiply<false>(d, f[1], f[0], 0, [](int) {});
    }

    // All products of the tile. after() is called behind those of each stage.
    __device__ __forceinline__ void run(Sums& d) {
        run(d, [] {});
    }
    template <class After>
    __device__ __forceinline__ void run(Sums& d, After after) {
        Fragments f[2];
        fill();
        enter_stage();
        load_all(f[0], 0);
        // The stage of an element that is not whole is none of them.
        const int whole = has_whole_columns() ? max(k_left - g.a.k_short, 0) / BLOCK_K : 0;
#pragma unroll 1
        for (int i = 0; i < whole; ++i) {
            multiply_and_copy(d, f);
            after();
        }
#pragma unroll 1
        for (int left = steps - whole; left > 0; --left) {
            multiply_at_end(d, f, left == 1);
            after();
        }
    }
};

// The semaphores of a ring that has some. Called by all threads.
template <class Traits>
__device__ __forceinline__ void init_ring(typename Traits::Shared& shared) {
    if constexpr (Traits::has_semaphores) {
        if (threadIdx.x == 0) {
            for (int s = 0; s < Traits::stages; ++s) {
                init_semaphore(shared.full[s], Traits::threads);
                init_semaphore(shared.empty[s], Traits::warps);
            }
        }
        arch::sync_block();
    }
}

// The tile at a place, if it has products; else it is zero, or what the epilogue makes of that.
template <class Traits>
__device__ __forceinline__ void compute_tile(const typename Traits::Globals& g,
                                             const TileOrigin& at, bool has_products = true) {
    auto& shared = *reinterpret_cast<typename Traits::Shared*>(shared_memory());
    init_ring<Traits>(shared);
    typename Multistage<Traits>::Sums d;
#pragma unroll
    for (int i = 0; i < Traits::height; ++i) {
#pragma unroll
        for (int j = 0; j < Traits::width; ++j) zero(d[i][j]);
    }
    if (has_products) Multistage<Traits>(g, shared, at).run(d);
    arch::sync_block();  // the ring becomes the memory of the sums
    const WarpTile<Traits> tile_of_warp(g, arch::shared_address(&shared), at);
    tile_of_warp.share(d);
    if (g.only_rounds)
        tile_of_warp.store_rounded();
    else
        tile_of_warp.store_fused();
}

template <class Traits>
__global__ __launch_bounds__(Traits::threads, Traits::blocks_per_sm) void portable_kernel(
    const __grid_constant__ typename Traits::Globals g) {
    constexpr PortableConfig C = Traits::config;
    const TilePosition tile = g.order.at(blockIdx.x);
    const uint32_t columns = g.epilogue.gate == Gate::none ? C.block_n : C.block_n / 2;
    compute_tile<Traits>(g,
                         {tile.batch, tile.m * C.block_m, tile.n * columns, g.m, g.out_n, 0, g.k});
}

// The parameters of a product, whose tiles blocks take in an order.
template <PortableConfig C>
typename Traits<C>::Globals make_globals(const Params& p, const TileOrder& order) {
    const Epilogue& e = p.epilogue;
    const bool gated = e.gate != Gate::none;
    const int64_t out_n = gated ? p.n / 2 : p.n;
    const int64_t to_values = e.gate == Gate::blocked ? out_n : 0;
    constexpr int row_step = C.threads() / 8;
    const auto aligned = [&](const void* data, int64_t stride, int64_t batch_stride) {
        return is_vec4_aligned(data, stride, p.out_dtype) && batch_stride % 4 == 0;
    };
    return {
        .a = make_source(p.a, p.a_stride, p.a_batch_stride, !C.a_m_major, row_step, C.block_m, 0),
        .b = make_source(p.b, p.b_stride, p.b_batch_stride, !C.b_n_major, row_step, C.warp_n(),
                         to_values),
        .m = static_cast<uint32_t>(p.m),
        .n = static_cast<uint32_t>(p.n),
        .k = static_cast<uint32_t>(p.k),
        .out_n = static_cast<uint32_t>(out_n),
        .order = order,
        .a_whole = p.m % 8 == 0,
        .b_whole = p.n % 8 == 0,
        .out_aligned = aligned(p.out, p.out_stride, p.out_batch_stride),
        .residual_aligned = aligned(e.residual, e.residual_stride, e.residual_batch_stride),
        .aux_aligned = aligned(e.aux, p.n, 0) && out_n % 4 == 0,
        .only_rounds =
            !gated && e.aux == nullptr && e.residual == nullptr && e.activation == Activation::none,
        .out_dtype = p.out_dtype,
        .out = p.out,
        .out_stride = p.out_stride,
        .out_batch_stride = p.out_batch_stride,
        .epilogue = e};
}

}  // namespace sm80

template <PortableConfig C>
void launch_portable(const Params& p, Stream stream) {
    using Traits = sm80::Traits<C>;
    const bool gated = p.epilogue.gate != Gate::none;
    const TileWalk walk{.block_m = C.block_m,
                        .block_n = gated ? C.block_n / 2 : C.block_n,
                        .raster_group = p.schedule.raster_group,
                        .raster_along_m = p.schedule.raster_along_m};
    const auto globals =
        sm80::make_globals<C>(p, make_order(walk, p.m, gated ? p.n / 2 : p.n, p.batch));
    kittens::launch(kittens::LaunchOptions{.blocks_per_sm = Traits::blocks_per_sm},
                    sm80::portable_kernel<Traits>, dim3(globals.order.total), dim3(C.threads()),
                    dim3(1), sizeof(typename Traits::Shared), stream, globals);
}

}  // namespace thunderkittens::gemm
