// Matrix product on Hopper whose tiles have the size that the problem asks for: few waves, and
// clusters of up to eight blocks that share loads by multicast. A kernel of a type has all layouts
// of the operands, and tiles whose width is known at run time; the main loop of each of them
// stands in the kernel. The operands may change places, and the consumers' tiles stand above each
// other or side by side.
//
// A block is persistent and warp-specialised, in the cooperative schedule: four warps load, two
// warpgroups multiply. Where a row of the operands does not begin at a line of the L2 cache, every
// row of a box touches two lines, and clusters halve or quarter those requests.
#pragma once

#include "csrc/gemm/dense/runtime_tile_store_sm90.cuh"
#include "csrc/gemm/dense/runtime_tile_types_sm90.cuh"

namespace thunderkittens::gemm {
namespace sm90 {

// A box that one thread loads in each step of k: the coordinates of the first one, and their steps.
struct RuntimeTileBox {
    const CUtensorMap* map;
    uint32_t to;  // in a stage
    int x, y, step_x, step_y, batch;
    uint16_t blocks;  // of the cluster, that get it
};
// A tile of an operand is one box, or one for each stripe of 64 rows that are contiguous in memory.
// Blocks that share it load a slice each.
struct RuntimeTileBoxes {
    const CUtensorMap* map;
    bool along_k;
    int stripes, slice, rank;
    uint16_t blocks;

    __device__ __forceinline__ int count(int tiles) const {
        return tiles * (along_k ? 1 : stripes);
    }
    // The box `i` of tiles of so many rows and bytes.
    __device__ __forceinline__ RuntimeTileBox box(int i, int row, int rows, int bytes,
                                                  int batch) const {
        constexpr int line = 128, stripe_rows = 64;
        const int first = slice * rank;
        if (along_k)
            return {map,     uint32_t(i * bytes + first * line),
                    0,       row + i * rows + first,
                    BLOCK_K, 0,
                    batch,   blocks};
        const int tile = i / stripes, stripe = i % stripes;
        return {map,
                uint32_t(tile * bytes + (stripe * BLOCK_K + first) * line),
                row + tile * rows + stripe * stripe_rows,
                first,
                0,
                BLOCK_K,
                batch,
                blocks};
    }
};

// Boxes are dealt out to the warps of the producer, one thread of each. One thread for all took
// some 800 cycles a step, longer than the products of a narrow tile: 1.5 times the time of 4096
// cubed in tiles of 128 x 128.
template <class Traits>
__device__ __forceinline__ void produce_runtime_tiles(const typename Traits::Globals& g,
                                                      typename Traits::Shared& shared,
                                                      uint32_t ring, const RuntimeTilePlace& place,
                                                      int warp) {
    constexpr int most = 2;
    const RuntimeTileBoxes of_a{&g.a,           g.a_along_k,       Traits::tiles,
                                g.ring.a_slice, int(place.column), place.a_blocks};
    const RuntimeTileBoxes of_b{
        &g.b,           g.b_along_k,    (g.width + Traits::stripe - 1) / Traits::stripe,
        g.ring.b_slice, int(place.row), place.b_blocks};
    const int a_boxes = of_a.count(g.a_tiles()), all_boxes = a_boxes + of_b.count(g.b_tiles());
    if (warp >= all_boxes) return;
    const bool two = warp + WARPGROUP_WARPS < all_boxes;
    const int stages = g.ring.stages, steps = g.steps, stage_bytes = g.ring.stage_bytes;
    int slot = 0, phase = 1;
    for (uint32_t i = place.first_cluster(g); i < g.order.total; i += g.clusters) {
        const TilePosition at = place.tile(g, i);
        const int m = at.m * g.a_tiles() * Traits::rows, n = at.n * g.b_tiles() * g.width;
        RuntimeTileBox boxes[most];
#pragma unroll
        for (int j = 0; j < most; ++j) {
            const int box = warp + j * WARPGROUP_WARPS;
            boxes[j] = box < a_boxes ? of_a.box(box, m, Traits::rows, g.ring.a_bytes,
                                                g.a_batched ? at.batch : 0)
                                     : of_b.box(box - a_boxes, n, g.width, g.ring.b_bytes,
                                                g.b_batched ? at.batch : 0);
            boxes[j].to += ring + (box < a_boxes ? 0 : g.a_tiles() * g.ring.a_bytes);
        }
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
            const uint32_t full = shared.full[slot].address(), offset = slot * stage_bytes;
            wait(shared.empty[slot], phase);
            if (warp == 0) tma::expect_bytes(shared.full[slot], stage_bytes);
#pragma unroll
            for (int j = 0; j < most; ++j) {
                RuntimeTileBox& box = boxes[j];
                if (j == 0 || two) {
                    const arch::TmaCoordinates from{box.x, box.y, 0, box.batch};
                    if ((box.blocks & (box.blocks - 1)) != 0)
                        arch::tma_load_multicast<tma::CachePolicy::normal>(box.to + offset, box.map,
                                                                           from, full, box.blocks);
                    else
                        arch::tma_load<tma::CachePolicy::normal>(box.to + offset, box.map, from,
                                                                 full);
                }
                box.x += box.step_x, box.y += box.step_y;
            }
            if (++slot == stages) slot = 0, phase ^= 1;
        }
    }
}

// The first rows or columns of a tile in shared memory.
template <class Tile, bool of_rows, int count>
struct FirstOf : Tile {
    static constexpr int rows = of_rows ? count : Tile::rows;
    static constexpr int cols = of_rows ? Tile::cols : count;
};

// A consumer's place in the ring of stages, and its main loops: one for each layout and width,
// because a branch inside of a loop, and what it has to compute anew, costs as much as the products
// of a narrow tile.
template <class Traits>
struct RuntimeTileLoop {
    using Sums = typename Traits::Sums;
    using T = typename Traits::T;
    const typename Traits::Globals& g;
    typename Traits::Shared& shared;
    const char *ring_a, *ring_b;
    int peer;  // the block whose stages this thread releases, or -1
    bool alone;
    int slot = 0, phase = 0;
    int previous = -1;  // the stage that the last products may still read

    __device__ __forceinline__ void release() {
        if (previous >= 0 && peer >= 0) {
            if (alone)
                arrive(shared.empty[previous]);
            else
                arrive_remote_relaxed(shared.empty[previous], peer);
        }
    }
    // The products of a step stay in flight while those of the next are issued.
    template <bool transpose_a, bool transpose_b, int width>
    __device__ __forceinline__ void multiply(Sums& d) {
        constexpr int stripes = (width + Traits::stripe - 1) / Traits::stripe;
        using A = st<T, 64, BLOCK_K>;
        using B = std::conditional_t<transpose_b, st<T, width, BLOCK_K>,
                                     st<T, BLOCK_K, stripes * Traits::stripe>>;
#pragma unroll 1
        for (int i = 0; i < g.steps; ++i) {
            const int offset = slot * g.ring.stage_bytes;
            wait(shared.full[slot], phase);
            // One group for all accumulators, or ptxas serialises the products.
#pragma unroll
            for (int j = 0; j < Traits::tiles; ++j)
                warpgroup::mma_fence(reinterpret_cast<rt_fl<16, width>&>(d[j]));
#pragma unroll
            for (int j = 0; j < Traits::tiles; ++j)
                kittens::detail::wgmma_product<transpose_a, transpose_b>(
                    reinterpret_cast<rt_fl<16, width>&>(d[j]),
                    reinterpret_cast<const A*>(ring_a + offset)[j],
                    reinterpret_cast<const FirstOf<B, transpose_b, width>&>(*(ring_b + offset)),
                    i > 0);
            warpgroup::mma_commit_group();
            const int current = slot;
            if (++slot == g.ring.stages) slot = 0, phase ^= 1;
            warpgroup::mma_async_wait<1>();
            release();
            previous = current;
        }
    }
    template <bool transpose_a, bool transpose_b, int low, int high>
    __device__ __forceinline__ void of_width(Sums& d) {
        if constexpr (low == high) {
            multiply<transpose_a, transpose_b, low>(d);
        } else {
            constexpr int step = Traits::width_step, middle = (low + high) / (2 * step) * step;
            if (g.width <= middle)
                of_width<transpose_a, transpose_b, low, middle>(d);
            else
                of_width<transpose_a, transpose_b, middle + step, high>(d);
        }
    }
    template <bool transpose_a>
    __device__ __forceinline__ void of_layout(Sums& d) {
        if (g.b_along_k)
            of_width<transpose_a, true, Traits::least_width, Traits::most_width>(d);
        else
            of_width<transpose_a, false, Traits::least_width, Traits::most_width>(d);
    }
    __device__ __forceinline__ void operator()(Sums& d) {
        if (g.a_along_k)
            of_layout<false>(d);
        else
            of_layout<true>(d);
        warpgroup::mma_async_wait<0>();
#pragma unroll
        for (int j = 0; j < Traits::tiles; ++j) kittens::detail::pin_accumulator(d[j]);
        release();
        previous = -1;
    }
};

template <class Traits>
__device__ __forceinline__ void consume_runtime_tiles(const typename Traits::Globals& g,
                                                      typename Traits::Shared& shared,
                                                      char* buffers, const char* ring,
                                                      const RuntimeTilePlace& place) {
    const int consumer = warpgroup::groupid();
    // One arrival stands for the warpgroup, because wgmma reads shared memory for all of it. Each
    // block that fills this one's stages gets its arrival from another thread.
    const int peer = warpgroup::warpid() + laneid() * WARPGROUP_WARPS;
    const bool releases =
        peer < int(g.cluster_blocks()) && ((place.a_blocks | place.b_blocks) >> peer & 1) != 0;
    RuntimeTileLoop<Traits> multiply{
        .g = g,
        .shared = shared,
        .ring_a = ring + (g.side_by_side ? 0 : consumer * g.ring.a_bytes),
        .ring_b =
            ring + g.a_tiles() * g.ring.a_bytes + (g.side_by_side ? consumer * g.ring.b_bytes : 0),
        .peer = releases ? peer : -1,
        .alone = g.cluster_blocks() == 1};
    RuntimeTileStore<Traits> store{.g = g,
                                   .buffers = buffers,
                                   .consumer = consumer,
                                   .sends = (g.transposed ? warpgroup::laneid() : laneid()) == 0};
    typename Traits::Sums d;
#pragma unroll
    for (int j = 0; j < Traits::tiles; ++j) warp::zero(d[j]);  // else ptxas serialises them (C7515)
#pragma unroll 1
    for (uint32_t i = place.first_cluster(g); i < g.order.total; i += g.clusters) {
        const TilePosition at = place.tile(g, i);
        multiply(d);
        store.batch = at.batch;
        store.row = (at.m * g.a_tiles() + (g.side_by_side ? 0 : consumer)) * Traits::rows;
        store.col = (at.n * g.b_tiles() + (g.side_by_side ? consumer : 0)) * g.width;
        const bool last = i + g.clusters >= g.order.total;
        if (last) store.begin_last();
#pragma unroll
        for (int j = 0; j < Traits::tiles; ++j) {
            if (g.alpha != 1.f || g.bias != nullptr)
                scale_and_add_bias<Traits>(g, d[j], store.row + j * 64, store.col);
            if (last)
                store.last(j, d[j]);
            else
                store.followed(j, d[j]);
        }
        if (last) store.end_last();
    }
}

template <class Traits>
__global__ __launch_bounds__(Traits::threads,
                             1) void runtime_tile_kernel(const __grid_constant__
                                                         typename Traits::Globals g) {
    shared_allocator allocator(shared_memory());
    auto& shared = allocator.template allocate<typename Traits::Shared>();
    const int before_ring = Traits::consumers * g.ring.buffers * Traits::buffer_bytes;
    char* const buffers = reinterpret_cast<char*>(&shared) + RUNTIME_TILE_SEMAPHORE_BYTES;
    const bool alone = g.cluster_blocks() == 1;
    const bool produces = warpgroup::groupid() == Traits::consumers;
    const RuntimeTilePlace place = RuntimeTilePlace::of(g);
    if (produces && warpgroup::warpid() == 0) {
        if (arch::elect_one()) {
            for (int i = 0; i < g.ring.stages; ++i) {
                init_semaphore(shared.full[i], 1);
                init_semaphore(shared.empty[i], Traits::consumers * (g.share_a + g.share_b - 1));
            }
            arch::mbarrier_init_fence();
            arch::tma_prefetch_map(&g.a);
            arch::tma_prefetch_map(&g.b);
        }
        arch::sync_warp();
    }
    if (alone) {
        arch::sync_block();
    } else {
        arch::cluster_arrive();
        arch::cluster_wait();
    }
    arch::wait_for_dependencies();
    if (produces) {
        warpgroup::decrease_registers<Traits::producer_registers>();
        arch::launch_dependents();
        const uint32_t ring = shared.full[0].address() + RUNTIME_TILE_SEMAPHORE_BYTES + before_ring;
        if (arch::elect_one())
            produce_runtime_tiles<Traits>(g, shared, ring, place, warpgroup::warpid());
    } else {
        warpgroup::increase_registers<Traits::consumer_registers>();
        consume_runtime_tiles<Traits>(g, shared, buffers, buffers + before_ring, place);
    }
    // The other blocks load into this one's stages and arrive at its semaphores.
    if (!alone) {
        arch::sync_warp();
        arch::cluster_arrive();
        arch::cluster_wait();
    }
}

}  // namespace sm90

template <DType dtype, int rows>
void launch_runtime_tile(const Config& c, const Params& p, Stream stream) {
    using Traits = sm90::RuntimeTileTraits<dtype, rows>;
    using T = typename Traits::T;
    using namespace kittens;
    struct Matrix {
        const void* data;
        int64_t size, stride, batch_stride;  // size: of the dimension that is not k
        bool along_k;
    };
    Matrix a{p.a, p.m, p.a_stride, p.a_batch_stride, !c.a_m_major},
        b{p.b, p.n, p.b_stride, p.b_batch_stride, !c.b_n_major};
    const Schedule& s = p.schedule;
    int share_a = s.share_n, share_b = s.share_m;
    if (c.swap_ab) std::swap(a, b), std::swap(share_a, share_b);
    const RuntimeTile tile = runtime_tile_of(c);
    const auto cluster = static_cast<uint32_t>(share_a * share_b);
    const int64_t down = ceil_div(ceil_div(a.size, tile.block_rows()), share_b),
                  along = ceil_div(ceil_div(b.size, tile.block_width()), share_a);
    const bool followed = down * along * p.batch * cluster > s.blocks;
    const RuntimeTileRing ring = runtime_tile_ring(c, s, followed);
    const auto map_of = [&](const void* data, int64_t rows_in_memory, int64_t columns,
                            int64_t stride, int64_t batch_stride, int box_rows) {
        return host::encode_tensor_map({.data = data,
                                        .type = kittens::detail::tensor_map_type<T>(),
                                        .element_bytes = 2,
                                        .dims = {uint64_t(columns), uint64_t(rows_in_memory), 1,
                                                 uint64_t(batch_stride != 0 ? p.batch : 1)},
                                        .strides = {stride, 0, batch_stride},
                                        .box = {64, uint32_t(box_rows), 1, 1},
                                        .swizzle_bytes = 128});
    };
    const auto operand = [&](const Matrix& x, int slice) {
        return map_of(x.data, x.along_k ? x.size : p.k, x.along_k ? p.k : x.size, x.stride,
                      x.batch_stride, slice);
    };
    const typename Traits::Globals g{
        .a = operand(a, ring.a_slice),
        .b = operand(b, ring.b_slice),
        .out = map_of(p.out, p.m, p.n, p.out_stride, p.out_batch_stride, c.swap_ab ? 64 : 16),
        .ring = ring,
        .steps = static_cast<int>(ceil_div(p.k, BLOCK_K)),
        .width = tile.width,
        .side_by_side = tile.side_by_side,
        .transposed = c.swap_ab,
        .a_batched = a.batch_stride != 0,
        .b_batched = b.batch_stride != 0,
        .a_along_k = a.along_k,
        .b_along_k = b.along_k,
        .clusters = static_cast<uint32_t>(s.blocks) / cluster,
        .share_a = static_cast<uint32_t>(share_a),
        .share_b = static_cast<uint32_t>(share_b),
        .order = make_order(static_cast<uint32_t>(down), static_cast<uint32_t>(along),
                            static_cast<uint32_t>(p.batch), static_cast<uint32_t>(s.raster_group),
                            false),
        .n = static_cast<uint32_t>(p.n),
        .alpha = p.epilogue.alpha,
        .bias = p.epilogue.bias,
    };
    kittens::launch(LaunchOptions{.dependent = true}, sm90::runtime_tile_kernel<Traits>,
                    dim3(s.blocks), dim3(Traits::threads), dim3(cluster), ring.shared_bytes, stream,
                    g);
}

}  // namespace thunderkittens::gemm
