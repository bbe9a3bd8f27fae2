// Epilogue warps: a fused epilogue beside the main loop, which the three idle warps of the
// producer's warpgroup apply to tiles that the consumers hand to them.
//
// The consumers round a tile's sums and defer their store, as without a fused epilogue, and put
// them subtile by subtile into their staging buffers while the next tile's products run. There an
// epilogue warp applies the activation to a subtile, adds the residual, and stores it. So the
// consumers do no more than in a product without an epilogue. A sum is rounded once more than where
// they do all of it, as it is between two ops of PyTorch.
//
// No cycle of waits can form: the epilogue warps take subtiles in the order in which they are
// handed over, and to hand one over a consumer waits only for a subtile that came before it.
#pragma once

#include "csrc/gemm/dense/fused_epilogue_sm90.cuh"
#include "csrc/gemm/dense/prologue_sm90.cuh"

namespace thunderkittens::gemm {
namespace sm90 {

template <Config C>
struct EpilogueWarps {
    using Traits = KernelTraits<C>;
    using T = typename Traits::T;
    using Globals = typename Traits::Globals;
    using Shared = typename Traits::Shared;
    using staging = typename Traits::out_tile;
    static constexpr int subtiles = DeferredStore<C>::subtiles;
    static constexpr int warps = C.consumers * WARPGROUP_WARPS, epilogue_warps = 3;
    static_assert(subtiles == 4, "each of a warp's two buffers is used twice per tile");
    // A lane takes vectors of 16 bytes, from a few rows each.
    static constexpr int VEC_ELEMENTS = 8, LANES = staging::cols / VEC_ELEMENTS,
                         ROWS = WARP_THREADS / LANES;
    static constexpr int COUNT = staging::rows / ROWS;
    // Vectors of the residual in flight; the formulas of fp16, and gates, leave fewer registers.
    template <bool gated>
    static constexpr int ahead = C.dtype == DType::bf16 && !gated ? 2 : 1;

    // Puts a subtile into a staging buffer. Subtiles come in the order in which they are handed
    // over: with a gate in pairs, of which one subtile of the output becomes; with a blocked gate
    // the gates come first.
    static __device__ __forceinline__ void stage(const Globals& g, const DeferredStore<C>& deferred,
                                                 int subtile, staging& buffer) {
        constexpr int width = staging::cols, narrow_by = NARROW_BY;
        const bool halves = g.epilogue.gate == Gate::blocked, narrow = deferred.narrow;
        const auto from = [&](int first) {
            stage_subtile<rt_bf<16, width>>(deferred.values, first, buffer);
        };
        if (subtile == 0) {
            from(0);
        } else if (subtile == 1) {
            if (halves)
                from(2 * width);
            else
                from(width);
        } else if (subtile == 3) {
            if (narrow)
                from(3 * width - narrow_by);
            else
                from(3 * width);
        } else if (halves) {
            if (narrow)
                from(width - narrow_by);
            else
                from(width);
        } else if (narrow && g.epilogue.gate == Gate::interleaved) {
            from(2 * width - narrow_by);
        } else {
            from(2 * width);
        }
    }
    // The first column of the output's last subtile in a tile; a narrow tile's begins earlier.
    static __device__ __forceinline__ int last_subtile(const Globals& g, bool narrow) {
        const Gate gate = g.epilogue.gate;
        const int narrow_by = gate == Gate::interleaved ? NARROW_BY / 2 : NARROW_BY;
        return (gate == Gate::none ? 3 : 1) * staging::cols - (narrow ? narrow_by : 0);
    }

    // Hands a subtile to the epilogue warps; called by a consumer.
    static __device__ __forceinline__ void hand_to_epilogue(const Globals& g, Shared& shared,
                                                            const DeferredStore<C>& deferred,
                                                            int subtile) {
        const int warp = kittens::warpid();
        const int pass = C.stages + warp * 2 + subtile % 2;
        wait(shared.empty[pass], subtile / 2 % 2 ^ 1);
        stage(g, deferred, subtile, shared.out[warp][subtile % 2]);
        arrive_by_warp(shared.full[pass]);
    }

    // Called by an epilogue warp: each takes every third subtile of the output. A block's last tile
    // is left to its consumers.
    static __device__ __forceinline__ void work(const Globals& g, Shared& shared,
                                                uint32_t epilogue_warp) {
        if (g.epilogue.gate == Gate::none)
            work_on<false>(g, shared, epilogue_warp);
        else
            work_on<true>(g, shared, epilogue_warp);
    }
    template <bool pairs>
    static __device__ __forceinline__ void work_on(const Globals& g, Shared& shared,
                                                   uint32_t epilogue_warp) {
        constexpr uint32_t count = pairs ? subtiles / 2 * warps : subtiles * warps;
        // One counter for all subtiles of all tiles, because registers are few. A grid of one wave
        // has last tiles alone. Where registers are fewest, a tile's position is computed for each
        // subtile.
        constexpr bool keeps = C.dtype == DType::bf16 || !pairs;
        uint32_t next = epilogue_warp;
        while (true) {
            const uint32_t index = blockIdx.x + next / count * g.blocks;
            if (index + g.blocks >= g.order.total) return;
            const auto tile = g.order.at(index);
            // The first column, and in its lowest bit, which is free, whether the tile is narrow.
            const uint32_t col =
                Traits::first_column(g, tile) >> (g.epilogue.gate == Gate::interleaved) |
                uint32_t(Traits::is_narrow(tile));
#pragma unroll 1
            do {
                const int subtile = next % count / warps, warp = next % warps;
                const WarpRows at{
                    tile.batch, tile.m * C.block_m + warp * 16,
                    (col & ~1u) + min(subtile * staging::cols, last_subtile(g, col & 1))};
                ResidualRows<ahead<pairs>> more(g, at);
                const int pass = C.stages + warp * 2;
                auto& buffers = shared.out[warp];
                const int buffer = pairs ? 0 : subtile % 2, phase = pairs ? subtile : subtile / 2;
                // Waits until the buffer's last subtile, which may be another warp's, has been
                // stored.
                wait(shared.empty[pass + buffer], phase ^ 1);
                if (pairs) wait(shared.full[pass + 1], phase);
                wait(shared.full[pass + buffer], phase);
                run_epilogue<pairs, 1>(g, buffers[buffer], buffers[1], at, more);
                if (laneid() == 0) {
                    tma::store_async_read_wait();
                    if (pairs) arrive(shared.empty[pass + 1]);
                    arrive(shared.empty[pass + buffer]);
                }
                arch::sync_warp();
                next += epilogue_warps;
            } while (keeps && next % count >= epilogue_warps);
        }
    }

    // Called by a consumer after the last tile, through the stages, which are free then: it uses
    // its own rows of them.
    static __device__ __forceinline__ void epilogue_of_last_tile(const Globals& g, Shared& shared,
                                                                 const DeferredStore<C>& deferred) {
        const uint32_t col = deferred.at.col >> (g.epilogue.gate == Gate::interleaved);
        const int last = last_subtile(g, deferred.narrow);
        const auto buffer = [&](int subtile) -> staging& {
            return DeferredStore<C>::last_buffer(shared, subtile);
        };
        const auto place = [&](int subtile) {
            return WarpRows{deferred.at.batch, deferred.at.row,
                            col + min(subtile * staging::cols, last)};
        };
        const auto all_subtiles = [&](auto gated) {
            constexpr bool pairs = decltype(gated)::value;
            constexpr int count = pairs ? subtiles / 2 : subtiles, each = subtiles / count;
            constexpr int rows = Traits::spreads ? COUNT : ahead<pairs>;
            ResidualRows<rows> next(g, place(0));
            // Where a's rows are adjacent in memory, a warp's share of a stage holds rows of other
            // warps.
            if constexpr (C.a_m_major) warpgroup::sync(READY + 1 + warpgroup::groupid());
#pragma unroll
            for (int subtile = 0; subtile < subtiles; ++subtile)
                stage(g, deferred, subtile, buffer(subtile));
            arch::sync_warp();
#pragma unroll 1
            for (int subtile = 0; subtile < count; ++subtile) {
                auto more = next;
                if (subtile + 1 < count) next = ResidualRows<rows>(g, place(subtile + 1));
                const int first = subtile * each;
                run_epilogue<pairs, rows>(g, buffer(first), buffer(first + each - 1),
                                          place(subtile), more);
            }
        };
        if (g.epilogue.gate == Gate::none)
            all_subtiles(std::false_type{});
        else
            all_subtiles(std::true_type{});
    }

  private:
    // The residual of a subtile, as one lane has it.
    template <int AHEAD>
    struct ResidualRows {
        const T* from;
        int left;  // rows from here to the end, 0 also where the columns are outside
        uint4 words[AHEAD];

        __device__ __forceinline__ ResidualRows(const Globals& g, const WarpRows at) {
            const Epilogue& e = g.epilogue;
            const uint32_t row = at.row + laneid() / LANES,
                           col = at.col + laneid() % LANES * VEC_ELEMENTS;
            left = row < g.m && col < g.out_n && e.residual != nullptr ? static_cast<int>(g.m - row)
                                                                       : 0;
            from = static_cast<const T*>(e.residual) +
                   (at.batch * e.residual_batch_stride + row * e.residual_stride + col);
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) load(g, i);
        }
        __device__ __forceinline__ void load(const Globals& g, int i) {
            if (left > 0) {
                words[i] = arch::load_global(reinterpret_cast<const uint4*>(from));
            }
            left -= ROWS;
            from += ROWS * g.epilogue.residual_stride;
        }
    };

    // Called by one lane, for a buffer whose contents are visible to TMA.
    static __device__ __forceinline__ void store(const auto& map, const staging& buffer,
                                                 const WarpRows& at, uint32_t col) {
        arch::tma_store(
            map.template tensor_map<staging>(), buffer.address(),
            {static_cast<int>(col), static_cast<int>(at.row), 0, static_cast<int>(at.batch)});
        tma::store_commit_group();
    }
    // Separates the gates of eight values from the values, which alternate.
    static __device__ __forceinline__ void deinterleave(uint4& gates, uint4& values) {
        const auto low = [](uint32_t x, uint32_t y) { return (x & 0xFFFF) | y << 16; };
        const auto high = [](uint32_t x, uint32_t y) { return x >> 16 | (y & 0xFFFF0000); };
        const uint4 first = gates, second = values;
        gates = {low(first.x, first.y), low(first.z, first.w), low(second.x, second.y),
                 low(second.z, second.w)};
        values = {high(first.x, first.y), high(first.z, first.w), high(second.x, second.y),
                  high(second.z, second.w)};
    }
    // Called by a warp, in place; `second` is the other subtile of a pair.
    template <bool gated, int BATCH, int AHEAD>
    static __device__ __forceinline__ void run_epilogue(const Globals& g, staging& buffer,
                                                        const staging& second, const WarpRows at,
                                                        ResidualRows<AHEAD>& more) {
        const bool interleaved = gated && g.epilogue.gate == Gate::interleaved;
        if (g.epilogue.aux != nullptr) {
            if (laneid() == 0) {
                const uint32_t col = interleaved ? 2 * at.col : at.col;
                arch::fence_async_shared();
                store(g.aux.map, buffer, at, col);
                if constexpr (gated) {
                    const uint32_t apart = interleaved ? staging::cols : g.out_n;
                    store(g.aux.map, second, at, col + apart);
                }
                tma::store_async_read_wait();
            }
            arch::sync_warp();
        }
#pragma unroll 1
        for (int first = 0; first < COUNT; first += AHEAD) {
#pragma unroll
            for (int i = 0; i < AHEAD; i += BATCH) {
                uint4 z[BATCH], factor[BATCH];
                const int col = laneid() % LANES * VEC_ELEMENTS;
#pragma unroll
                for (int j = 0; j < BATCH; ++j) {
                    const int row = (first + i + j) * ROWS + laneid() / LANES;
                    if (interleaved) {
                        const auto& from = col < staging::cols / 2 ? buffer : second;
                        const int there = 2 * col % staging::cols;
                        z[j] = arch::load_shared<uint4>(from.address_of(row, there));
                        factor[j] =
                            arch::load_shared<uint4>(from.address_of(row, there + VEC_ELEMENTS));
                        deinterleave(z[j], factor[j]);
                    } else {
                        z[j] = arch::load_shared<uint4>(buffer.address_of(row, col));
                        if constexpr (gated) {
                            factor[j] = arch::load_shared<uint4>(second.address_of(row, col));
                        }
                    }
                }
                if (interleaved) arch::sync_warp();  // the rows have been read
                const auto& residual = reinterpret_cast<const uint4(&)[BATCH]>(more.words[i]);
                apply<gated>(g, z, factor, residual);
#pragma unroll
                for (int j = 0; j < BATCH; ++j) {
                    const int row = (first + i + j) * ROWS + laneid() / LANES;
                    arch::store_shared(buffer.address_of(row, col), z[j]);
                    if (first + AHEAD < COUNT) more.load(g, i + j);
                }
            }
        }
        arch::fence_async_shared();
        arch::sync_warp();
        if (laneid() == 0) store(g.out_map, buffer, at, at.col);
    }
    // Applies the epilogue to rows z[i], in place.
    template <bool gated, int count>
    static __device__ __forceinline__ void apply(const Globals& g, uint4 (&z)[count],
                                                 const uint4 (&factor)[count],
                                                 const uint4 (&residual)[count]) {
        using pairs = packed_type<T>[count * VEC_ELEMENTS / 2];
        float x[count * VEC_ELEMENTS];
        const auto each = [&](auto use) {
#pragma unroll
            for (int i = 0; i < count * VEC_ELEMENTS / 2; ++i) use(i, x[2 * i], x[2 * i + 1]);
        };
        const auto pair_of = [](const uint4(&words)[count], int i) {
            return unpack_pair<T>(reinterpret_cast<const pairs&>(words)[i]);
        };
        each([&](int i, float& first, float& second) {
            const float2 pair = pair_of(z, i);
            first = pair.x, second = pair.y;
        });
        if (g.epilogue.activation > Activation::relu) {
            with_formula<SerialFormulas<T>>(g.epilogue.activation, [&](auto function) {
#pragma unroll
                for (int i = 0; i < count * VEC_ELEMENTS; ++i) x[i] = function(x[i]);
            });
        } else {
            activate(g.epilogue.activation, x);
        }
        if constexpr (gated) {
            each([&](int i, float& first, float& second) {
                const float2 pair = pair_of(factor, i);
                first *= pair.x, second *= pair.y;
            });
        }
        if (g.epilogue.residual != nullptr) {
            each([&](int i, float& first, float& second) {
                const float2 pair = pair_of(residual, i);
                first += g.epilogue.beta * pair.x;
                second += g.epilogue.beta * pair.y;
            });
        }
        each([&](int i, float first, float second) {
            reinterpret_cast<pairs&>(z)[i] = pack_pair<T>(first, second);
        });
    }
};

}  // namespace sm90
}  // namespace thunderkittens::gemm
