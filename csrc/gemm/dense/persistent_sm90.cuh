// Matrix product on Hopper: 16-bit operands, fp32 accumulation.
//
// A block is persistent and warp-specialised, in the cooperative schedule: the consumers share a
// tile. One thread of the producer warpgroup keeps a ring of stages (a block_m x 64 tile of a and a
// 64 x block_n tile of b) filled by TMA, running ahead across tiles, so that the loads of the next
// tile overlap the epilogue of this one. The consumer warpgroups divide the tile's rows; each
// multiplies with wgmma, with one product in flight while it releases the stage of the one before.
// The store of a finished tile of a 16-bit type is deferred: the tile is only rounded and kept in
// registers, and is stored, subtile by subtile through a small staging buffer and TMA, while the
// products of the next tile run, so that the tensor cores do not wait for it. The idle warps of the
// producer's warpgroup may be epilogue warps.
//
// Operands may lie in memory in either major order: TMA brings them into shared memory as they are,
// and wgmma reads either order. Ragged edges: TMA fills with zeros what lies outside, and writes
// nothing there.
#pragma once

#include "csrc/gemm/common/launch_sm90.cuh"
#include "csrc/gemm/common/tile_mask_sm90.cuh"
#include "csrc/gemm/dense/epilogue_warps_sm90.cuh"
#include "csrc/gemm/dense/prologue_sm90.cuh"
#include "csrc/gemm/dense/single_wave.h"

namespace thunderkittens::gemm {
namespace sm90 {

// Loads a tile's residual into the stages that follow its last step.
template <Config C>
__device__ __forceinline__ void produce_residual(const typename KernelTraits<C>::Globals& g,
                                                 typename KernelTraits<C>::Shared& shared,
                                                 Ring<C.stages>& ring, const auto& at) {
    using Traits = KernelTraits<C>;
    using residual_tile = typename Residual<C>::residual_tile;
    constexpr int each = Residual<C>::subtiles_per_stage;
    const bool interleaved = g.epilogue.gate == Gate::interleaved;
    // Columns count words of 16 bits.
    const int words = g.out_dtype == DType::fp32 ? 2 : 1;
    const int col = static_cast<int>(Traits::first_column(g, at) >> interleaved) * words;
    const int subtiles = FusedEpilogue<C>::residual_subtiles(g);
    for (int first = 0; first < subtiles; first += each, ring.advance()) {
        auto& stage = shared.stages[ring.stage];
        static_assert(sizeof(stage) >= each * sizeof(residual_tile));
        semaphore& full = shared.full[ring.stage];
        wait(shared.empty[ring.stage], ring.phase ^ 1);
        const int count = min(each, subtiles - first);
        tma::expect_bytes(full, count * sizeof(residual_tile));
        auto& tiles = reinterpret_cast<residual_tile(&)[each]>(stage);
        for (int i = 0; i < count; ++i) {
            tma::load_async(tiles[i], g.residual.map,
                            elements(static_cast<int>(at.batch), 0,
                                     static_cast<int>(at.m) * C.block_m, col + (first + i) * 64),
                            full);
        }
    }
}

template <Config C>
__device__ __forceinline__ void produce(const typename KernelTraits<C>::Globals& g,
                                        typename KernelTraits<C>::Shared& shared) {
    using Traits = KernelTraits<C>;
    Ring<C.stages> ring;
    [[maybe_unused]] uint32_t bias_parities = ~0u;  // of what has to be read from each row first
    for_each_loaded_tile(g, [&](const auto at) {
        if constexpr (C.masked) {
            if (!in_mask<C.block_m, C.block_n>(g, at)) return;
        }
        const int m = static_cast<int>(Traits::first_row(g, at.m));
        const uint32_t n = Traits::first_column(g, at);
        const bool narrow = Traits::is_narrow(at);
        for (int step = 0; step < g.k_blocks; ++step, ring.advance()) {
            auto& stage = shared.stages[ring.stage];
            semaphore& full = shared.full[ring.stage];
            wait(shared.empty[ring.stage], ring.phase ^ 1);
            const int bytes = sizeof(stage) - (narrow ? Traits::narrow_by * BLOCK_K * 2 : 0);
            bool brings = false;
            if constexpr (Traits::has_epilogue_warps)
                brings = step == 0 && g.store_pipeline.brings_bias;
            if (!brings) tma::expect_bytes(full, bytes);
            if constexpr (Traits::has_epilogue_warps) {
                if (brings) {
                    const uint32_t row = 1u << ring.stage;
                    wait(shared.empty[Traits::first_bias_row + ring.stage],
                         (bias_parities & row) != 0);
                    bias_parities ^= row;
                    RegisterBias<C>::bring(g, shared.bias[ring.stage], full, n, bytes);
                }
            }
            load_step<Traits>(g, stage, full, at.batch, m, n, step * BLOCK_K, narrow);
        }
        if constexpr (C.fused) {
            if (g.epilogue.residual != nullptr && g.store_pipeline.store_interval == 0)
                produce_residual<C>(g, shared, ring, at);
        }
    });
}

// The first columns of b's tile in shared memory; they need not be whole stripes of it.
template <class Tile, bool transposed>
struct NarrowB : Tile {
    static constexpr int rows = transposed ? Tile::rows - int(NARROW_BY) : Tile::rows;
    static constexpr int cols = transposed ? Tile::cols : Tile::cols - int(NARROW_BY);
};

// A consumer's product of a step; for a narrow tile, of the first columns alone.
template <class Traits, bool two_widths, class D>
__device__ __forceinline__ void multiply(const typename Traits::Globals& g, D& d,
                                         typename Traits::Stage& stage, int consumer,
                                         bool accumulate, bool narrow) {
    constexpr bool transpose_a = Traits::config.a_m_major, transpose_b = !Traits::config.b_n_major;
    using B = typename Traits::b_tile;
    const auto a = Traits::rows_of(stage, consumer);
    const B& b = stage.b;
    if constexpr (two_widths) {
        if constexpr (Traits::config.fused) {
            if (narrow && g.epilogue.gate == Gate::blocked) {
                // A narrow tile with a blocked gate has the first columns of either half, one
                // product each.
                constexpr int halves = 2, columns = D::cols / halves - int(NARROW_BY);
                using Half = NarrowB<typename Traits::b_part, transpose_b>;
                static_assert(Traits::b_parts == halves);
                auto& parts = reinterpret_cast<const typename Traits::b_part(&)[halves]>(b);
                warpgroup::mma_fence(d);
#pragma unroll
                for (int i = 0; i < halves; ++i) {
                    auto& sums =
                        reinterpret_cast<rt_fl<16, columns>&>(d.tiles[0][i * D::width / 2]);
                    kittens::detail::wgmma_product<transpose_a, transpose_b>(
                        sums, a, reinterpret_cast<const Half&>(parts[i]), accumulate);
                }
                return warpgroup::mma_commit_group();
            }
        }
        if (narrow) {
            auto& sums = reinterpret_cast<rt_fl<16, D::cols - int(NARROW_BY)>&>(d);
            const auto& columns = reinterpret_cast<const NarrowB<B, transpose_b>&>(b);
            return warpgroup::product<transpose_a, transpose_b>(sums, a, columns, accumulate);
        }
    }
    warpgroup::product<transpose_a, transpose_b>(d, a, b, accumulate);
}

// The factor of the sums, and whether they are activated where the epilogue is not fused.
struct HostFactor {
    static constexpr bool activates = false;
    __device__ __forceinline__ float times(float alpha) const { return alpha; }
};

// `dequantized`: the operands are dequantized by the kernel itself, as many rows at a time.
template <Config C, bool dequantized = false, class Factor = HostFactor>
__device__ __forceinline__ void consume(const typename KernelTraits<C>::Globals& g,
                                        typename KernelTraits<C>::Shared& shared,
                                        const Factor factor = {}) {
    using Traits = KernelTraits<C>;
    constexpr bool two_widths = !dequantized && Traits::two_widths;
    const int consumer = warpgroup::groupid();
    const auto release = [&](int stage) { release_stage(shared.empty[stage]); };
    int tail_steps = C.stages - 1, steps = 1;
    if constexpr (!dequantized && Traits::has_single_wave)
        tail_steps = g.store_pipeline.tail_steps, steps = g.store_pipeline.steps;

    constexpr int TAIL = READY + 1 + C.consumers;  // named barrier
    Ring<C.stages> ring;
    rt_fl<16, C.block_n> d;
    DeferredStore<C> deferred;
    for_each_tile(g, [&](const auto at, const bool last) {
        if constexpr (C.masked) {
            if (!in_mask<C.block_m, C.block_n>(g, at)) return;
        }
        const uint32_t col = Traits::first_column(g, at);
        bool narrow = false;
        if constexpr (two_widths) narrow = Traits::is_narrow(at);
        [[maybe_unused]] Bias<C> bias;
        if constexpr (!Traits::has_epilogue_warps) {
            if (g.epilogue.bias != nullptr) bias.fetch(g, col);
        }

        // Staggered tail: the consumers end the last tile one after the other. SMs that store whole
        // tiles at once wait for the L2 cache, and the tensor cores can work for the second
        // consumer meanwhile. All of the last steps are in the ring by then.
        const int tail_begin = last && consumer > 0 ? max(0, g.k_blocks - tail_steps) : -1;
        int previous = 0;
        for (int k = 0; k < g.k_blocks; ++k, ring.advance()) {
            if (C.consumers > 1 && k == tail_begin) {
                arch::named_barrier_sync(TAIL, C.consumers * WARPGROUP_THREADS);
            }
            auto& stage = shared.stages[ring.stage];
            wait(shared.full[ring.stage], ring.phase);
            multiply<Traits, two_widths>(g, d, stage, consumer, k > 0, narrow);
            if constexpr (Traits::has_epilogue_warps) {
                if (deferred.any && k <= g.store_pipeline.last_store) {
#pragma unroll
                    for (int subtile = 0; subtile < deferred.subtiles; ++subtile) {
                        if (k !=
                            subtile * g.store_pipeline.apart - subtile % 2 * g.store_pipeline.early)
                            continue;
                        if (g.store_pipeline.store_interval != 0)
                            EpilogueWarps<C>::hand_to_epilogue(g, shared, deferred, subtile);
                        else
                            deferred.send(g, shared, subtile);
                    }
                }
                if (k == g.store_pipeline.last_store && g.store_pipeline.brings_bias) {
                    // The bias lies in the row of the stage that was the tile's first.
                    static_assert(C.stages == 4);
                    const uint32_t row = (ring.stage - k) % 4u;
                    RegisterBias<C>::load(shared.bias[row], deferred.values);
                    // The release of the row's stage, one arrival for the warpgroup, does not tell
                    // that all warps have read the row. A barrier here would serialise the products
                    // (C7511).
                    arrive_by_warp(shared.empty[Traits::first_bias_row + row]);
                }
            } else if (deferred.any && k < deferred.sent(g) * steps) {
#pragma unroll
                for (int subtile = 0; subtile < deferred.subtiles; ++subtile) {
                    if (k == subtile * steps) deferred.send(g, shared, subtile);
                }
            }
            warpgroup::mma_async_wait<1>();
            if (k > 0) release(previous);
            previous = ring.stage;
        }
        if (C.consumers > 1 && last && consumer == 0) {
            arch::named_barrier_arrive(TAIL, C.consumers * WARPGROUP_THREADS);
        }
        warpgroup::mma_async_wait(d);
        release(previous);

        const uint32_t first_row = dequantized ? at.m * C.block_m : Traits::first_row(g, at.m);
        const uint32_t row =
            first_row + consumer * Traits::consumer_rows + warpgroup::warpid() * 16;
        WarpRows to{at.batch, row, col};
        // The commonest store comes first and by itself, because a short kernel waits for code that
        // it jumps over.
        if constexpr (!C.fused && !Factor::activates) {
            if (g.store_only) {
                if (last) {
                    deferred.any = false;
                    // Where a's rows are adjacent in memory, a warp's share of a stage holds rows
                    // of other warps.
                    if constexpr (C.a_m_major) warpgroup::sync(READY + 1 + consumer);
                    return DeferredStore<C>::template send_last<typename Traits::T>(g, shared, d,
                                                                                    to, narrow);
                }
                return deferred.template defer<typename Traits::T>(d, to, narrow);
            }
        }
        if (g.epilogue.alpha != 1.f) scale(d, factor.times(g.epilogue.alpha));
        if (g.epilogue.bias != nullptr) {
            if constexpr (Traits::has_epilogue_warps) {
                if (!g.store_pipeline.brings_bias) {
                    RegisterBias<C>::fetch(g, shared.bias[consumer], col);
                    RegisterBias<C>::load(shared.bias[consumer], deferred.values);
                }
                RegisterBias<C>::add(deferred.values, d);
            } else {
                bias.add(shared.bias[consumer], d);
            }
        }
        if constexpr (Traits::has_epilogue_warps) {
            if (g.store_pipeline.store_interval != 0) {
                return deferred.template defer<typename Traits::T>(d, to, narrow);
            }
        }
        if constexpr (Factor::activates) {
            auto& sums = reinterpret_cast<float(&)[C.block_n / 2]>(d);
            activate(g.epilogue.activation, sums);
        }
        if constexpr (C.fused) {
            FusedEpilogue<C>::apply(g, d, to);
            if (g.epilogue.gate == Gate::interleaved) to.col /= 2;
            if (g.epilogue.residual != nullptr) {
                FusedEpilogue<C>::add_residual(g, shared, d, ring, release);
            }
        }
        if (g.out_dtype == DType::fp32) {
            store_wide<C>(g, shared, d, to.batch, to.row, to.col);
        } else {
            if (C.fused && g.packed) {
                if constexpr (C.fused) {
                    FusedEpilogue<C>::pack(g.epilogue.activation, deferred.values, d);
                }
            } else if (g.out_dtype == DType::bf16) {
                deferred.template pack<bf16>(d);
            } else {
                deferred.template pack<half>(d);
            }
            deferred.at = to;
            deferred.narrow = narrow;
            deferred.any = g.tma_store && g.k_blocks >= deferred.sent(g);
            if (!deferred.any) deferred.store_now(g, shared);
        }
    });
    if (!deferred.any) {
    } else if (g.store_pipeline.store_interval == 0) {
        if constexpr (C.a_m_major) warpgroup::sync(READY + 1 + consumer);
        deferred.send_last(g, shared);
    } else if constexpr (Traits::has_epilogue_warps) {
        EpilogueWarps<C>::epilogue_of_last_tile(g, shared, deferred);
    }
    if (laneid() == 0) tma::store_async_read_wait();
}

// A template over a type: nvcc 13.0 writes host code that does not compile for a __global__
// template over a struct's value.
template <class Traits>
__global__ __launch_bounds__(Traits::threads,
                             1) void persistent_gemm_kernel(const __grid_constant__
                                                            typename Traits::Globals g) {
    constexpr Config C = Traits::config;
    shared_allocator allocator(shared_memory());
    auto& shared = allocator.template allocate<typename Traits::Shared>();

    if (warpgroup::groupid() == C.consumers) {
        if constexpr (C.consumers > 1) warpgroup::decrease_registers<Traits::producer_registers>();
        const bool loads = start_producer<Traits>(g, shared);
        const bool work = loads && (!C.masked || any_in_mask(g.mask, g.m, g.n));
        if (work && arch::elect_one()) produce<C>(g, shared);
        if constexpr (Traits::has_epilogue_warps) {
            if (!loads && g.store_pipeline.store_interval != 0)
                EpilogueWarps<C>::work(g, shared, warpgroup::warpid() - 1);
        }
    } else {
        arch::named_barrier_sync(READY, READY_THREADS<Traits>);
        if constexpr (C.consumers > 1) warpgroup::increase_registers<Traits::consumer_registers>();
        arch::wait_for_dependencies();
        if (!C.masked || any_in_mask(g.mask, g.m, g.n)) consume<C>(g, shared);
    }
}

// The timing of the deferred store or of the epilogue pipeline. With a gate there are half as many
// subtiles; with epilogue warps a pair of those that are handed over becomes one, and the two
// follow each other. `bias`: there is one that bulk copies can bring.
template <Config C>
constexpr StorePipeline<C> store_pipeline_of(bool gated, int store_interval, int64_t steps,
                                             bool one_wave, bool bias) {
    if constexpr (has_epilogue_warps(C)) {
        constexpr int subtiles = DeferredStore<C>::subtiles;
        static_assert(subtiles == 4, "which leave in seven steps");
        // With eight steps the bias would otherwise be late, see below.
        const int every = KernelTraits<C>::spreads && steps > (bias ? 8 : 6) ? 2 : 1;
        const int apart = std::max(store_interval, every);
        const int early = store_interval != 0 && gated ? apart - 1 : 0;
        const int last = ((store_interval == 0 && gated ? subtiles / 2 : subtiles) - 1) * apart;
        // By then all subtiles have been stored and the bias has been read, before its row can be
        // filled again.
        constexpr int stages = C.stages, later = 16;
        const int64_t again = steps % stages == 0 ? steps : steps % 2 == 0 ? 2 * steps : 4 * steps;
        const int latest = static_cast<int>(std::min(steps, again - stages)) - 1;
        const int wanted = store_interval != 0 ? last + apart : gated ? last : later;
        const int last_store = std::max(last, std::min(wanted, latest));
        return {store_interval, apart, early, last_store, bias && last_store <= latest};
    } else if constexpr (has_single_wave(C)) {
        // SMs that write all the time do better than SMs that write a whole tile at once; and after
        // several short tiles each they do not end together, so that the staggered tail is short
        // then.
        const bool every_second = steps >= 2 * DeferredStore<C>::subtiles - 1;
        return {0, every_second ? 2 : 1, one_wave || steps >= 12 ? C.stages - 1 : 1};
    } else {
        return {store_interval};
    }
}

// The tensor map of the residual, as a matrix of words of 16 bits; without a residual, a stand-in.
template <Config C>
Residual<C> residual_of(const Params& p, int64_t out_n) {
    if constexpr (C.fused) {
        using GL = decltype(Residual<C>::map);
        const Epilogue& e = p.epilogue;
        const int64_t words = size_in_bytes(p.out_dtype) / 2;
        if (e.residual == nullptr) return {matrix_of<GL>(p.a, 1, 64, 64)};
        return {matrix_of<GL>(e.residual, p.m, out_n * words, e.residual_stride * words, p.batch,
                              e.residual_batch_stride * words)};
    } else {
        return {};
    }
}

// The same for the aux output, whose rows are multiples of 16 bytes.
template <Config C>
AuxOutput<C> aux_of(const Params& p, bool stores_aux) {
    if constexpr (has_epilogue_warps(C)) {
        using GL = decltype(AuxOutput<C>::map);
        if (!stores_aux) return {matrix_of<GL>(p.a, 1, 64, 64)};
        return {matrix_of<GL>(p.epilogue.aux, p.m, p.n, p.n, p.batch, p.m * p.n)};
    } else {
        return {};
    }
}

template <Config C>
typename KernelTraits<C>::Globals make_globals(const Params& p) {
    using Traits = KernelTraits<C>;
    using Globals = typename Traits::Globals;
    const Epilogue& e = p.epilogue;
    const int64_t out_n = e.gate == Gate::none ? p.n : p.n / 2;
    const int64_t size = size_in_bytes(p.out_dtype);
    const bool tma_store = tma_stores(p);
    const auto in_pairs = [](const void* data, int64_t bytes, int64_t stride,
                             int64_t batch_stride) {
        return reinterpret_cast<uintptr_t>(data) % bytes == 0 && stride % 2 == 0 &&
               batch_stride % 2 == 0;
    };
    const bool pairs = in_pairs(p.out, 4, p.out_stride, p.out_batch_stride) && out_n % 2 == 0;
    const bool aux_vec2_aligned = (!e.aux || in_pairs(e.aux, 2 * size, p.n, 0)) && out_n % 2 == 0;
    // Epilogue warps, where the consumers would take long and rows are multiples of 16 bytes.
    const bool by_epilogue_warps =
        has_epilogue_warps(C) && p.out_dtype == C.dtype && tma_store && out_n % 8 == 0 &&
        ceil_div(p.k, BLOCK_K) > 3 * p.schedule.store_interval && p.schedule.store_interval > 0 &&
        (e.residual != nullptr || e.aux != nullptr || e.activation > Activation::relu ||
         e.gate != Gate::none);
    // Bulk copies take multiples of 16 bytes.
    const bool bulk_bias =
        e.bias != nullptr && out_n % 8 == 0 && reinterpret_cast<uintptr_t>(e.bias) % 16 == 0;
    // To TMA the output is a matrix of 16-bit words. Where TMA does not store, the map is a
    // stand-in that nobody uses.
    const int64_t words = size / 2;
    using OutMap = decltype(Globals::out_map);
    const auto out = tma_store
                         ? matrices_of<OutMap>(p.out, p.m, out_n * words, p.out_stride * words,
                                               p.batch, p.out_batch_stride * words)
                         : matrix_of<OutMap>(p.a, 1, 64, 64);
    const auto order = [&] {
        if constexpr (Traits::two_widths) {
            // Subtiles of a narrow tile overlap: what they read must not be what they write.
            const bool no_alias =
                by_epilogue_warps ? e.residual != p.out : e.gate == Gate::none && e.aux == nullptr;
            const bool allowed = tma_store && p.out_dtype == C.dtype && no_alias;
            return make_two_width_order(tile_walk(C, p.schedule), p.m, p.n, p.batch, allowed,
                                        e.gate == Gate::blocked);
        } else {
            return make_order(tile_walk(C, p.schedule), p.m, p.n, p.batch);
        }
    }();
    const bool one_wave = is_one_wave(p.schedule, order);
    return {
        .k_blocks = static_cast<int>(ceil_div(p.k, BLOCK_K)),
        .blocks = static_cast<uint32_t>(p.schedule.blocks),
        .a_batched = p.a_batch_stride != 0,
        .b_batched = p.b_batch_stride != 0,
        .evict_first_b = p.schedule.evict_first_b,
        .one_wave = one_wave,
        .store_only = is_store_only(C, p),
        .tma_store = tma_store,
        .vec2_aligned = pairs,
        .aux_vec2_aligned = aux_vec2_aligned,
        .packed = C.fused && !C.masked && p.out_dtype == DType::bf16 && e.gate == Gate::none &&
                  e.residual == nullptr && !by_epilogue_warps,
        .store_pipeline = store_pipeline_of<C>(e.gate != Gate::none,
                                               by_epilogue_warps ? p.schedule.store_interval : 0,
                                               ceil_div(p.k, BLOCK_K), one_wave, bulk_bias),
        .order = order,
        .epilogue = e,
        .m = static_cast<uint32_t>(p.m),
        .n = static_cast<uint32_t>(p.n),
        .out_n = static_cast<uint32_t>(out_n),
        .out_dtype = p.out_dtype,
        .out = p.out,
        .out_stride = p.out_stride,
        .out_batch_stride = p.out_batch_stride,
        .mask = p.mask,
        .a =
            matrices_of<decltype(Globals::a)>(p.a, C.a_m_major ? p.k : p.m, C.a_m_major ? p.m : p.k,
                                              p.a_stride, p.batch, p.a_batch_stride),
        .b =
            matrices_of<decltype(Globals::b)>(p.b, C.b_n_major ? p.k : p.n, C.b_n_major ? p.n : p.k,
                                              p.b_stride, p.batch, p.b_batch_stride),
        .out_map = out,
        .residual = residual_of<C>(p, out_n),
        .aux = aux_of<C>(p, by_epilogue_warps && e.aux != nullptr),
    };
}

// The grid: in a single wave, the tiles themselves.
template <Config C>
dim3 grid_of(const Params& p, bool one_wave) {
    if (!one_wave) return dim3(p.schedule.blocks);
    return dim3(static_cast<unsigned>(ceil_div(p.m, C.block_m)),
                static_cast<unsigned>(ceil_div(p.n, C.block_n)), static_cast<unsigned>(p.batch));
}

}  // namespace sm90

template <Config C>
void launch(const Params& params, Stream stream) {
    using Traits = sm90::KernelTraits<C>;
    const auto globals = sm90::make_globals<C>(params);
    launch_dependent<Traits>(sm90::persistent_gemm_kernel<Traits>,
                             sm90::grid_of<C>(params, globals.one_wave), dim3(1), stream, globals);
}

}  // namespace thunderkittens::gemm
