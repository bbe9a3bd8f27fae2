// Matrix product on Hopper: 16-bit operands, fp32 accumulation.
//
// A block is persistent and warp-specialised. One thread of the producer warpgroup keeps a ring of
// stages (a block_m x 64 tile of a and a 64 x block_n tile of b) filled by TMA, running ahead
// across tiles, so that the loads of the next tile overlap the epilogue of this one. The consumer
// warpgroups divide the tile's rows; each multiplies with wgmma, one product in flight while it
// hands back the stage of the one before. A finished tile of a 16-bit type is only rounded and kept
// in registers; it leaves, piece by piece through a small staging buffer and TMA, while the
// products of the next tile run, so that the tensor cores do not wait for it.
//
// Operands may lie in memory in either major order: TMA brings them into shared memory as they are,
// and wgmma reads either order. Ragged edges: TMA fills with zeros what lies outside, and writes
// nothing there.
#pragma once

#include "csrc/gemm/common/tile_mask_sm90.cuh"
#include "csrc/gemm/dense/epilogue_warps_sm90.cuh"
#include "csrc/gemm/dense/prologue_sm90.cuh"
#include "csrc/gemm/dense/single_wave.h"

namespace thunderkittens::gemm {
namespace sm90 {

// Loads a tile's residual into the stages that follow.
template <Config C>
__device__ __forceinline__ void produce_residual(const typename Types<C>::Globals& g,
                                                 typename Types<C>::Shared& shared,
                                                 Ring<C.stages>& ring, const auto& at) {
    using K = Types<C>;
    using part = typename Residual<C>::part;
    constexpr int each = Residual<C>::parts_per_stage;
    const bool interleaved = g.epilogue.gate == Gate::interleaved;
    // In words of 16 bits.
    const int words = g.out_dtype == DType::fp32 ? 2 : 1;
    const int col = static_cast<int>(K::first_column(g, at) >> interleaved) * words;
    const int parts = FusedEpilogue<C>::residual_parts(g);
    for (int first = 0; first < parts; first += each, ring.advance()) {
        auto& stage = shared.stages[ring.stage];
        static_assert(sizeof(stage) >= each * sizeof(part));
        semaphore& full = shared.full[ring.stage];
        wait(shared.empty[ring.stage], ring.phase ^ 1);
        const int count = min(each, parts - first);
        tma::expect_bytes(full, count * sizeof(part));
        auto& tiles = reinterpret_cast<part(&)[each]>(stage);
        for (int i = 0; i < count; ++i) {
            tma::load_async(tiles[i], g.residual.map,
                            elements(static_cast<int>(at.batch), 0,
                                     static_cast<int>(at.m) * C.block_m, col + (first + i) * 64),
                            full);
        }
    }
}

template <Config C>
__device__ __forceinline__ void produce(const typename Types<C>::Globals& g,
                                        typename Types<C>::Shared& shared) {
    using K = Types<C>;
    Ring<C.stages> ring;
    for_each_loaded_tile(g, [&](const auto at) {
        if constexpr (C.marked) {
            if (!is_marked<C.block_m, C.block_n>(g, at)) return;
        }
        const int m = static_cast<int>(K::first_row(g, at.m));
        const uint32_t n = K::first_column(g, at);
        const typename K::Narrow narrow = K::is_narrow(at);
        for (int step = 0; step < g.k_blocks; ++step, ring.advance()) {
            auto& stage = shared.stages[ring.stage];
            semaphore& full = shared.full[ring.stage];
            wait(shared.empty[ring.stage], ring.phase ^ 1);
            if constexpr (C.varied) {
                load_varied_step<K>(g, stage, full, at, step * BLOCK_K);
            } else {
                const int bytes = sizeof(stage) - (narrow ? K::less * BLOCK_K * 2 : 0);
                bool brings = false;
                if constexpr (K::has_finishers) brings = step == 0 && g.pace.brings_bias;
                if (!brings) tma::expect_bytes(full, bytes);
                if constexpr (K::has_finishers) {
                    if (brings) KeptBias<C>::bring(g, shared.bias[ring.stage], full, n, bytes);
                }
                load_step<K>(g, stage, full, at.batch, m, n, step * BLOCK_K, narrow);
            }
        }
        if constexpr (C.fused) {
            if (g.epilogue.residual != nullptr && g.pace.spacing == 0)
                produce_residual<C>(g, shared, ring, at);
        }
    });
}

// The first columns of b's tile in shared memory, which need not be whole stripes of it.
template <class Tile, bool transposed, int lack = int(NARROWER)>
struct NarrowB : Tile {
    static constexpr int rows = transposed ? Tile::rows - lack : Tile::rows;
    static constexpr int cols = transposed ? Tile::cols : Tile::cols - lack;
};

// The product of a step of a tile whose width varies: the first of those that it can be, from
// `lack` on.
template <class K, bool transpose_a, bool transpose_b, int lack, class D, class A, class B>
__device__ __forceinline__ void multiply_varied(D& d, const A& a, const B& b, bool accumulate,
                                                uint32_t lacking) {
    constexpr int next = lack + varied_unit(K::config);
    if (!K::has_lack(next) || lacking == lack) {
        auto& sums = reinterpret_cast<rt_fl<16, D::cols - lack>&>(d);
        const auto& columns = reinterpret_cast<const NarrowB<B, transpose_b, lack>&>(b);
        warpgroup::product<transpose_a, transpose_b>(sums, a, columns, accumulate);
    } else if constexpr (K::has_lack(next)) {
        multiply_varied<K, transpose_a, transpose_b, next>(d, a, b, accumulate, lacking);
    }
}

// The product of a step; of a narrow tile the first columns alone.
template <class K, bool two_widths, bool transpose_a, bool transpose_b, class D, class A, class B>
__device__ __forceinline__ void multiply(const typename K::Globals& g, D& d, const A& a, const B& b,
                                         bool accumulate, typename K::Narrow narrow) {
    if constexpr (K::config.varied) {
        constexpr int least = D::cols - widest(K::config);
        return multiply_varied<K, transpose_a, transpose_b, least>(d, a, b, accumulate, narrow);
    } else if constexpr (two_widths) {
        if constexpr (K::config.fused) {
            if (narrow && g.epilogue.gate == Gate::blocked) {
                // Of either half the first columns, one product each.
                constexpr int halves = 2, columns = D::cols / halves - int(NARROWER);
                using Half = NarrowB<typename K::b_part, transpose_b>;
                static_assert(K::b_parts == halves);
                auto& parts = reinterpret_cast<const typename K::b_part(&)[halves]>(b);
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
            auto& sums = reinterpret_cast<rt_fl<16, D::cols - int(NARROWER)>&>(d);
            const auto& columns = reinterpret_cast<const NarrowB<B, transpose_b>&>(b);
            return warpgroup::product<transpose_a, transpose_b>(sums, a, columns, accumulate);
        }
    }
    warpgroup::product<transpose_a, transpose_b>(d, a, b, accumulate);
}

// By what sums are multiplied, and whether they are activated where the epilogue is not fused.
struct HostFactor {
    static constexpr bool activates = false;
    __device__ __forceinline__ float times(float alpha) const { return alpha; }
};

// `expanded`: tiles of an operand that the kernel itself has expanded, as many rows at a time.
template <Config C, bool expanded = false, class Factor = HostFactor>
__device__ __forceinline__ void consume(const typename Types<C>::Globals& g,
                                        typename Types<C>::Shared& shared,
                                        const Factor factor = {}) {
    using K = Types<C>;
    constexpr bool two_widths = !expanded && K::two_widths;
    const int consumer = warpgroup::groupid();
    const auto release = [&](int stage) { release_stage(shared.empty[stage]); };
    int held = C.stages - 1, steps = 1;
    if constexpr (!expanded && K::has_once) held = g.pace.held, steps = g.pace.steps;

    constexpr int FIRST_DONE = READY + 1 + C.consumers;  // named barrier
    Ring<C.stages> ring;
    rt_fl<16, C.block_n> d;
    Finished<C> finished;
    for_each_tile(g, [&](const auto at, const bool last) {
        if constexpr (C.marked) {
            if (!is_marked<C.block_m, C.block_n>(g, at)) return;
        }
        const uint32_t col = K::first_column(g, at);
        typename K::Narrow narrow = false;
        if constexpr (two_widths) narrow = K::is_narrow(at);
        [[maybe_unused]] Bias<C> bias;
        if constexpr (!K::has_finishers) {
            if (g.epilogue.bias != nullptr) bias.fetch(g, col);
        }

        // The last tile's consumers end one after the other: SMs that store whole tiles at once
        // wait for the L2 cache, and the tensor cores can work for the second consumer meanwhile.
        // All of the last steps are in the ring by then.
        const int hold = last && consumer > 0 ? max(0, g.k_blocks - held) : -1;
        int previous = 0;
        for (int k = 0; k < g.k_blocks; ++k, ring.advance()) {
            if (C.consumers > 1 && k == hold) {
                arch::named_barrier_sync(FIRST_DONE, C.consumers * WARPGROUP_THREADS);
            }
            auto& stage = shared.stages[ring.stage];
            wait(shared.full[ring.stage], ring.phase);
            if constexpr (C.a_m_major) {
                auto rows = stage.a.template subtile<BLOCK_K, K::consumer_rows>({0, consumer});
                multiply<K, two_widths, true, !C.b_n_major>(g, d, rows, stage.b, k > 0, narrow);
            } else {
                auto rows = stage.a.template subtile<K::consumer_rows, BLOCK_K>({consumer, 0});
                multiply<K, two_widths, false, !C.b_n_major>(g, d, rows, stage.b, k > 0, narrow);
            }
            if constexpr (K::has_finishers) {
                if (finished.any && k <= g.pace.sending) {
#pragma unroll
                    for (int piece = 0; piece < finished.pieces; ++piece) {
                        if (k != piece * g.pace.apart - piece % 2 * g.pace.early) continue;
                        if (g.pace.spacing != 0)
                            Finishing<C>::hand_over(g, shared, finished, piece);
                        else
                            finished.send(g, shared, piece);
                    }
                }
                if (k == g.pace.sending && g.pace.brings_bias) {
                    // The row of the stage that was the tile's first.
                    static_assert(C.stages == 4);
                    KeptBias<C>::load(shared.bias[(ring.stage - k) % 4u], finished.values);
                    // One arrival that hands the row's stage back stands for all warps.
                    warpgroup::sync(READY + 1 + consumer);
                }
            } else if (finished.any && k < finished.sent(g) * steps) {
#pragma unroll
                for (int piece = 0; piece < finished.pieces; ++piece) {
                    if (k == piece * steps) finished.send(g, shared, piece);
                }
            }
            warpgroup::mma_async_wait<1>();
            if (k > 0) release(previous);
            previous = ring.stage;
        }
        if (C.consumers > 1 && last && consumer == 0) {
            arch::named_barrier_arrive(FIRST_DONE, C.consumers * WARPGROUP_THREADS);
        }
        warpgroup::mma_async_wait(d);
        release(previous);

        const uint32_t first_row = expanded ? at.m * C.block_m : K::first_row(g, at.m);
        const uint32_t row = first_row + consumer * K::consumer_rows + warpgroup::warpid() * 16;
        Place16 to{at.batch, row, col};
        // The usual way first and by itself: a short kernel waits for code that it jumps over.
        if constexpr (!C.fused && !C.varied && !Factor::activates) {
            if (g.plain) {
                if (last) {
                    finished.any = false;
                    // A warp's part of a stage holds rows of others where those are adjacent.
                    if constexpr (C.a_m_major) warpgroup::sync(READY + 1 + consumer);
                    return Finished<C>::template send_last<typename K::T>(g, shared, d, to, narrow);
                }
                return finished.template keep<typename K::T>(d, to, narrow);
            }
        }
        if (g.epilogue.alpha != 1.f) scale(d, factor.times(g.epilogue.alpha));
        if (g.epilogue.bias != nullptr) {
            if constexpr (K::has_finishers) {
                if (!g.pace.brings_bias) {
                    KeptBias<C>::fetch(g, shared.bias[consumer], col);
                    KeptBias<C>::load(shared.bias[consumer], finished.values);
                }
                KeptBias<C>::add(finished.values, d);
            } else {
                bias.add(shared.bias[consumer], d);
            }
        }
        if constexpr (C.varied) {
            if (last)
                return Finished<C>::template send_last<typename K::T>(g, shared, d, to, narrow);
            return finished.template keep<typename K::T>(d, to, narrow);
        }
        if constexpr (K::has_finishers) {
            if (g.pace.spacing != 0) {
                return finished.template keep<typename K::T>(d, to, narrow);
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
                    FusedEpilogue<C>::pack(g.epilogue.activation, finished.values, d);
                }
            } else if (g.out_dtype == DType::bf16) {
                finished.template pack<bf16>(d);
            } else {
                finished.template pack<half>(d);
            }
            finished.at = to;
            finished.narrow = narrow;
            finished.any = g.tma_store && g.k_blocks >= finished.sent(g);
            if (!finished.any) finished.send_now(g, shared);
        }
    });
    if (C.varied || !finished.any) {
    } else if (g.pace.spacing == 0) {
        if constexpr (C.a_m_major) warpgroup::sync(READY + 1 + consumer);
        finished.send_last(g, shared);
    } else if constexpr (K::has_finishers) {
        Finishing<C>::finish_last(g, shared, finished);
    }
    if (laneid() == 0) tma::store_async_read_wait();
}

// A template over a type: nvcc 13.0 writes host code that does not compile for a __global__
// template over a struct's value.
template <class K>
__global__ __launch_bounds__(K::threads,
                             1) void gemm_kernel(const __grid_constant__ typename K::Globals g) {
    constexpr Config C = K::config;
    shared_allocator allocator(shared_memory());
    auto& shared = allocator.template allocate<typename K::Shared>();

    if (warpgroup::groupid() == C.consumers) {
        if constexpr (C.consumers > 1) warpgroup::decrease_registers<K::producer_registers>();
        const bool loads = start_producer<K>(g, shared);
        const bool work = loads && (!C.marked || any_mark(g.marks, g.m, g.n));
        if (work && arch::elect_one()) produce<C>(g, shared);
        if constexpr (K::has_finishers) {
            if (!loads && g.pace.spacing != 0)
                Finishing<C>::work(g, shared, warpgroup::warpid() - 1);
        }
    } else {
        arch::named_barrier_sync(READY, READY_THREADS<K>);
        if constexpr (C.consumers > 1) warpgroup::increase_registers<K::consumer_registers>();
        arch::wait_for_dependencies();
        if (!C.marked || any_mark(g.marks, g.m, g.n)) consume<C>(g, shared);
    }
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// With a gate there are half as many pieces; where other warps finish them, a pair of those that
// are handed over becomes one, and comes in steps that follow each other. `bias`: there is one that
// bulk copies can bring.
template <Config C>
constexpr Pace<C> pace_of(bool gated, int spacing, int64_t steps, bool one_round, bool bias) {
    if constexpr (has_finishers(C)) {
        constexpr int pieces = Finished<C>::pieces;
        static_assert(pieces == 4, "which leave in seven steps");
        // In eight steps the bias would otherwise be late, see below.
        const int every = Types<C>::spreads && steps > (bias ? 8 : 6) ? 2 : 1;
        const int apart = std::max(spacing, every);
        const int early = spacing != 0 && gated ? apart - 1 : 0;
        const int last = ((spacing == 0 && gated ? pieces / 2 : pieces) - 1) * apart;
        // Then all have left, and the bias is taken, before its row can be brought again.
        constexpr int stages = C.stages, later = 16;
        const int64_t again = steps % stages == 0 ? steps : steps % 2 == 0 ? 2 * steps : 4 * steps;
        const int latest = static_cast<int>(std::min(steps, again - stages)) - 1;
        const int wanted = spacing != 0 ? last + apart : gated ? last : later;
        const int sending = std::max(last, std::min(wanted, latest));
        return {spacing, apart, early, sending, bias && sending <= latest};
    } else if constexpr (has_once(C)) {
        // SMs that write all the time do better than SMs that write a whole tile at once; and after
        // several short tiles each they do not end together.
        const bool every_second = steps >= 2 * Finished<C>::pieces - 1;
        return {0, every_second ? 2 : 1, one_round || steps >= 12 ? C.stages - 1 : 1};
    } else {
        return {spacing};
    }
}

// The map of the residual, as a matrix of words of 16 bits; without one, a stand-in.
template <Config C>
Residual<C> residual_of(const Params& p, int64_t out_n) {
    if constexpr (C.fused) {
        using GL = decltype(Residual<C>::map);
        const Epilogue& e = p.epilogue;
        const int64_t words = size_in_bytes(p.out_dtype) / 2;
        const auto at = [](const void* data) {
            return static_cast<bf16*>(const_cast<void*>(data));
        };
        if (e.residual == nullptr) {
            return {GL(at(p.a), 1, nullptr, 1, 64, gl_strides{0, 0, 64})};
        }
        return {GL(at(e.residual), p.batch, nullptr, p.m, out_n * words,
                   gl_strides{e.residual_batch_stride * words, 0, e.residual_stride * words})};
    } else {
        return {};
    }
}

// The same of z, which is kept, in rows of 16 bytes.
template <Config C>
Kept<C> kept_of(const Params& p, bool kept) {
    if constexpr (has_finishers(C)) {
        using GL = decltype(Kept<C>::map);
        if (!kept) {
            void* any = const_cast<void*>(p.a);
            return {GL(static_cast<bf16*>(any), 1, nullptr, 1, 64, gl_strides{0, 0, 64})};
        }
        return {GL(static_cast<bf16*>(p.epilogue.preactivation), p.batch, nullptr, p.m, p.n,
                   gl_strides{p.m * p.n, 0, p.n})};
    } else {
        return {};
    }
}

// The maps of widths that vary.
template <Config C>
Varied<C> varied_of(const Params& p, const auto& order) {
    Varied<C> varied{};
    if constexpr (C.varied && !C.b_n_major) {
        constexpr int half = C.block_n / 2;
        host::TensorMapSpec spec{.data = p.b,
                                 .type = kittens::detail::tensor_map_type<typename Types<C>::T>(),
                                 .element_bytes = 2,
                                 .dims = {uint64_t(p.k), uint64_t(p.n), 1, 1},
                                 .strides = {p.b_stride, 0, 0},
                                 .box = {BLOCK_K, 0, 1, 1},
                                 .swizzle_bytes = 128};
        for (uint32_t kind = 0; kind < 4; ++kind) {
            const uint32_t width = order.width_of(kind);
            if (width <= half || width > static_cast<uint32_t>(widest(C))) continue;
            spec.box[1] = width - half;
            varied.maps[kind] = host::encode_tensor_map(spec);
        }
    }
    return varied;
}

inline bool in_one_round(const Schedule&, const VariedOrder&) { return false; }

template <Config C>
typename Types<C>::Globals make_globals(const Params& p) {
    using K = Types<C>;
    const auto matrix = [&]<class GL>(const void* data, bool transposed, int64_t rows, int64_t cols,
                                      int64_t stride, int64_t batch_stride) {
        if (transposed) std::swap(rows, cols);
        return GL(static_cast<typename GL::T*>(const_cast<void*>(data)),
                  batch_stride != 0 ? p.batch : 1, nullptr, rows, cols,
                  gl_strides{batch_stride, 0, stride});
    };
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
    const bool aligned_pairs =
        (!e.preactivation || in_pairs(e.preactivation, 2 * size, p.n, 0)) && out_n % 2 == 0;
    // Where the consumers would take long, and rows are whole parts of 16 bytes.
    const bool finished_apart = has_finishers(C) && p.out_dtype == C.dtype && tma_store &&
                                out_n % 8 == 0 && ceil_div(p.k, BLOCK_K) > 3 * p.schedule.spacing &&
                                p.schedule.spacing > 0 &&
                                (e.residual != nullptr || e.preactivation != nullptr ||
                                 e.activation > Activation::relu || e.gate != Gate::none);
    // Bulk copies take whole parts of 16 bytes.
    const bool bulk_bias =
        e.bias != nullptr && out_n % 8 == 0 && reinterpret_cast<uintptr_t>(e.bias) % 16 == 0;
    // To TMA the output is a matrix of 16-bit words. Where TMA does not store, the map is a
    // stand-in that nobody uses.
    const int64_t words = size / 2;
    const auto out = tma_store ? matrix.template operator()<decltype(K::Globals::out_map)>(
                                     p.out, false, p.m, out_n * words, p.out_stride * words,
                                     p.out_batch_stride * words)
                               : matrix.template operator()<decltype(K::Globals::out_map)>(
                                     p.a, false, 1, 64, 64, 0);
    const auto order = [&] {
        if constexpr (C.varied) {
            return make_varied_order(C, p.schedule, p.m, p.n);
        } else if constexpr (K::two_widths) {
            // Pieces of a narrow tile overlap: what they read must not be what they write.
            const bool once = finished_apart ? e.residual != p.out
                                             : e.gate == Gate::none && e.preactivation == nullptr;
            const bool allowed = tma_store && p.out_dtype == C.dtype && once;
            return make_uneven_order(C, p.schedule, p.m, p.n, p.batch, allowed,
                                     e.gate == Gate::blocked);
        } else {
            return make_order(C, p.schedule, p.m, p.n, p.batch);
        }
    }();
    const bool one_round = in_one_round(p.schedule, order);
    return {
        .k_blocks = static_cast<int>(ceil_div(p.k, BLOCK_K)),
        .blocks = static_cast<uint32_t>(p.schedule.blocks),
        .a_batched = p.a_batch_stride != 0,
        .b_batched = p.b_batch_stride != 0,
        .b_once = p.schedule.b_once,
        .one_round = one_round,
        .plain = is_plain(C, p),
        .tma_store = tma_store,
        .pairs = pairs,
        .aligned_pairs = aligned_pairs,
        .packed = C.fused && !C.marked && p.out_dtype == DType::bf16 && e.gate == Gate::none &&
                  e.residual == nullptr && !finished_apart,
        .pace = pace_of<C>(e.gate != Gate::none, finished_apart ? p.schedule.spacing : 0,
                           ceil_div(p.k, BLOCK_K), one_round, bulk_bias),
        .order = order,
        .epilogue = e,
        .m = static_cast<uint32_t>(p.m),
        .n = static_cast<uint32_t>(p.n),
        .out_n = static_cast<uint32_t>(out_n),
        .out_dtype = p.out_dtype,
        .out = p.out,
        .out_stride = p.out_stride,
        .out_batch_stride = p.out_batch_stride,
        .marks = p.marks,
        .a = matrix.template operator()<decltype(K::Globals::a)>(p.a, C.a_m_major, p.m, p.k,
                                                                 p.a_stride, p.a_batch_stride),
        .b = matrix.template operator()<decltype(K::Globals::b)>(p.b, !C.b_n_major, p.k, p.n,
                                                                 p.b_stride, p.b_batch_stride),
        .out_map = out,
        .residual = residual_of<C>(p, out_n),
        .kept = kept_of<C>(p, finished_apart && e.preactivation != nullptr),
        .varied = varied_of<C>(p, order),
    };
}

// The grid: where every block has one tile, the tiles themselves.
template <Config C>
dim3 grid_of(const Params& p, bool one_round) {
    if (!one_round) return dim3(p.schedule.blocks);
    return dim3(static_cast<unsigned>(ceil_div(p.m, C.block_m)),
                static_cast<unsigned>(ceil_div(p.n, C.block_n)), static_cast<unsigned>(p.batch));
}

}  // namespace sm90

template <Config C>
void launch(const Params& params, Stream stream) {
    using K = sm90::Types<C>;
    const auto globals = sm90::make_globals<C>(params);
    kittens::launch(kittens::LaunchOptions{.dependent = true}, sm90::gemm_kernel<K>,
                    sm90::grid_of<C>(params, globals.one_round), dim3(K::threads), dim3(1),
                    sizeof(typename K::Shared), stream, globals);
}

}  // namespace thunderkittens::gemm
