// A fused epilogue beside the main loop: the three warps beside the one that loads finish what the
// consumers hand them.
//
// The consumers round a tile's sums and keep them, as the plain kernel does, and put them piece by
// piece into their staging buffers while the next tile's products run. There a finishing warp
// applies the activation to a piece, adds the residual, and sends it. So the warps that multiply do
// no more than in a plain product. A sum is rounded once more than where they do all of it, as it
// is between two ops of PyTorch.
//
// Nobody waits for each other: pieces are finished in the order in which they are handed over, and
// to hand over one a consumer waits for one that came before it.
#pragma once

#include "csrc/gemm/dense/fused_epilogue_sm90.cuh"
#include "csrc/gemm/dense/prologue_sm90.cuh"

namespace thunderkittens::gemm {
namespace sm90 {

template <Config C>
struct Finishing {
    using K = Types<C>;
    using T = typename K::T;
    using Globals = typename K::Globals;
    using Shared = typename K::Shared;
    using staging = typename K::out_tile;
    static constexpr int pieces = Finished<C>::pieces;
    static constexpr int warps = C.consumers * WARPGROUP_WARPS, finishers = 3;
    static_assert(pieces == 4, "each of a warp's two buffers is used twice per tile");
    // A lane takes 16 bytes at a time, from a few rows each.
    static constexpr int WIDE = 8, LANES = staging::cols / WIDE, ROWS = WARP_THREADS / LANES;
    static constexpr int COUNT = staging::rows / ROWS;
    // Of a residual on its way; the formulas of fp16 and gates leave fewer registers.
    template <bool gated>
    static constexpr int ahead = C.dtype == DType::bf16 && !gated ? 2 : 1;

    // Pieces come in the order in which they are handed over: with a gate in pairs, of which one
    // piece of the output becomes, and of halves the gates first.
    static __device__ __forceinline__ void stage(const Globals& g, const Finished<C>& finished,
                                                 int piece, staging& buffer) {
        constexpr int width = staging::cols, less = NARROWER;
        const bool halves = g.epilogue.gate == Gate::blocked, narrow = finished.narrow;
        const auto from = [&](int first) {
            stage_piece<rt_bf<16, width>>(finished.values, first, buffer);
        };
        if (piece == 0) {
            from(0);
        } else if (piece == 1) {
            if (halves)
                from(2 * width);
            else
                from(width);
        } else if (piece == 3) {
            if (narrow)
                from(3 * width - less);
            else
                from(3 * width);
        } else if (halves) {
            if (narrow)
                from(width - less);
            else
                from(width);
        } else if (narrow && g.epilogue.gate == Gate::interleaved) {
            from(2 * width - less);
        } else {
            from(2 * width);
        }
    }
    // Where the last piece of the output begins in a tile; of a narrow one earlier than of others.
    static __device__ __forceinline__ int last_piece(const Globals& g, bool narrow) {
        const Gate gate = g.epilogue.gate;
        const int less = gate == Gate::interleaved ? NARROWER / 2 : NARROWER;
        return (gate == Gate::none ? 3 : 1) * staging::cols - (narrow ? less : 0);
    }

    // By a consumer.
    static __device__ __forceinline__ void hand_over(const Globals& g, Shared& shared,
                                                     const Finished<C>& finished, int piece) {
        const int warp = kittens::warpid();
        const int pass = C.stages + warp * 2 + piece % 2;
        wait(shared.empty[pass], piece / 2 % 2 ^ 1);
        stage(g, finished, piece, shared.out[warp][piece % 2]);
        arch::sync_warp();
        if (laneid() == 0) arrive(shared.full[pass]);
    }

    // By a finishing warp: each takes every third piece of the output. A block's last tile is its
    // consumers'.
    static __device__ __forceinline__ void work(const Globals& g, Shared& shared,
                                                uint32_t finisher) {
        if (g.epilogue.gate == Gate::none)
            work_on<false>(g, shared, finisher);
        else
            work_on<true>(g, shared, finisher);
    }
    template <bool pairs>
    static __device__ __forceinline__ void work_on(const Globals& g, Shared& shared,
                                                   uint32_t finisher) {
        constexpr uint32_t count = pairs ? pieces / 2 * warps : pieces * warps;
        // One counter for all pieces of all tiles: registers are few. A grid of one round has no
        // tile but last ones. Where they are fewest a tile's place is found for each piece.
        constexpr bool keeps = C.dtype == DType::bf16 || !pairs;
        uint32_t next = finisher;
        while (true) {
            const uint32_t index = blockIdx.x + next / count * g.blocks;
            if (index + g.blocks >= g.order.total) return;
            const auto tile = g.order.at(index);
            // The first column, and in the bit that it leaves whether the tile is narrow.
            const uint32_t col =
                K::first_column(g, tile) >> (g.epilogue.gate == Gate::interleaved) |
                uint32_t(K::is_narrow(tile));
#pragma unroll 1
            do {
                const int piece = next % count / warps, warp = next % warps;
                const Place16 at{tile.batch, tile.m * C.block_m + warp * 16,
                                 (col & ~1u) + min(piece * staging::cols, last_piece(g, col & 1))};
                More<ahead<pairs>> more(g, at);
                const int pass = C.stages + warp * 2;
                auto& buffers = shared.out[warp];
                const int buffer = pairs ? 0 : piece % 2, phase = pairs ? piece : piece / 2;
                // The buffer's last piece, which may be another warp's, has been finished.
                wait(shared.empty[pass + buffer], phase ^ 1);
                if (pairs) wait(shared.full[pass + 1], phase);
                wait(shared.full[pass + buffer], phase);
                finish<pairs, 1>(g, buffers[buffer], buffers[1], at, more);
                if (laneid() == 0) {
                    tma::store_async_read_wait();
                    if (pairs) arrive(shared.empty[pass + 1]);
                    arrive(shared.empty[pass + buffer]);
                }
                arch::sync_warp();
                next += finishers;
            } while (keeps && next % count >= finishers);
        }
    }

    // By a consumer, after the last tile, when the stages are free: of those it takes its own rows.
    static __device__ __forceinline__ void finish_last(const Globals& g, Shared& shared,
                                                       const Finished<C>& finished) {
        const uint32_t col = finished.at.col >> (g.epilogue.gate == Gate::interleaved);
        const int last = last_piece(g, finished.narrow);
        const auto buffer = [&](int piece) -> staging& {
            return Finished<C>::last_buffer(shared, piece);
        };
        const auto place = [&](int piece) {
            return Place16{finished.at.batch, finished.at.row,
                           col + min(piece * staging::cols, last)};
        };
        const auto finish_all = [&](auto gated) {
            constexpr bool pairs = decltype(gated)::value;
            constexpr int count = pairs ? pieces / 2 : pieces, each = pieces / count;
            constexpr int rows = K::spreads ? COUNT : ahead<pairs>;
            More<rows> next(g, place(0));
            // A warp's part of a stage holds rows of others where those are adjacent.
            if constexpr (C.a_m_major) warpgroup::sync(READY + 1 + warpgroup::groupid());
#pragma unroll
            for (int piece = 0; piece < pieces; ++piece) stage(g, finished, piece, buffer(piece));
            arch::sync_warp();
#pragma unroll 1
            for (int piece = 0; piece < count; ++piece) {
                auto more = next;
                if (piece + 1 < count) next = More<rows>(g, place(piece + 1));
                const int first = piece * each;
                finish<pairs, rows>(g, buffer(first), buffer(first + each - 1), place(piece), more);
            }
        };
        if (g.epilogue.gate == Gate::none)
            finish_all(std::false_type{});
        else
            finish_all(std::true_type{});
    }

  private:
    // A lane's part of a piece's residual.
    template <int AHEAD>
    struct More {
        const T* from;
        int left;  // rows from here to the end, 0 also where the columns are outside
        uint4 parts[AHEAD];

        __device__ __forceinline__ More(const Globals& g, const Place16 at) {
            const Epilogue& e = g.epilogue;
            const uint32_t row = at.row + laneid() / LANES, col = at.col + laneid() % LANES * WIDE;
            left = row < g.m && col < g.out_n && e.residual != nullptr ? static_cast<int>(g.m - row)
                                                                       : 0;
            from = static_cast<const T*>(e.residual) +
                   (at.batch * e.residual_batch_stride + row * e.residual_stride + col);
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) load(g, i);
        }
        __device__ __forceinline__ void load(const Globals& g, int i) {
            if (left > 0) {
                parts[i] = arch::load_global(reinterpret_cast<const uint4*>(from));
            }
            left -= ROWS;
            from += ROWS * g.epilogue.residual_stride;
        }
    };

    // By one lane, from a buffer whose contents TMA sees.
    static __device__ __forceinline__ void store(const auto& map, const staging& buffer,
                                                 const Place16& at, uint32_t col) {
        arch::tma_store(
            map.template tensor_map<staging>(), buffer.address(),
            {static_cast<int>(col), static_cast<int>(at.row), 0, static_cast<int>(at.batch)});
        tma::store_commit_group();
    }
    // The gates of eight values, and the values, from where they are neighbours.
    static __device__ __forceinline__ void part(uint4& gates, uint4& values) {
        const auto low = [](uint32_t x, uint32_t y) { return (x & 0xFFFF) | y << 16; };
        const auto high = [](uint32_t x, uint32_t y) { return x >> 16 | (y & 0xFFFF0000); };
        const uint4 first = gates, second = values;
        gates = {low(first.x, first.y), low(first.z, first.w), low(second.x, second.y),
                 low(second.z, second.w)};
        values = {high(first.x, first.y), high(first.z, first.w), high(second.x, second.y),
                  high(second.z, second.w)};
    }
    // Called by a warp, in place; `second`: the other piece of a pair.
    template <bool gated, int BATCH, int AHEAD>
    static __device__ __forceinline__ void finish(const Globals& g, staging& buffer,
                                                  const staging& second, const Place16 at,
                                                  More<AHEAD>& more) {
        const bool interleaved = gated && g.epilogue.gate == Gate::interleaved;
        if (g.epilogue.preactivation != nullptr) {
            if (laneid() == 0) {
                const uint32_t col = interleaved ? 2 * at.col : at.col;
                arch::fence_async_shared();
                store(g.kept.map, buffer, at, col);
                if constexpr (gated) {
                    const uint32_t apart = interleaved ? staging::cols : g.out_n;
                    store(g.kept.map, second, at, col + apart);
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
                const int col = laneid() % LANES * WIDE;
#pragma unroll
                for (int j = 0; j < BATCH; ++j) {
                    const int row = (first + i + j) * ROWS + laneid() / LANES;
                    if (interleaved) {
                        const auto& from = col < staging::cols / 2 ? buffer : second;
                        const int there = 2 * col % staging::cols;
                        z[j] = arch::load_shared<uint4>(from.address_of(row, there));
                        factor[j] = arch::load_shared<uint4>(from.address_of(row, there + WIDE));
                        part(z[j], factor[j]);
                    } else {
                        z[j] = arch::load_shared<uint4>(buffer.address_of(row, col));
                        if constexpr (gated) {
                            factor[j] = arch::load_shared<uint4>(second.address_of(row, col));
                        }
                    }
                }
                if (interleaved) arch::sync_warp();  // the rows have been read
                const auto& residual = reinterpret_cast<const uint4(&)[BATCH]>(more.parts[i]);
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
    // Of rows z[i], in place.
    template <bool gated, int count>
    static __device__ __forceinline__ void apply(const Globals& g, uint4 (&z)[count],
                                                 const uint4 (&factor)[count],
                                                 const uint4 (&residual)[count]) {
        using pairs = packed_type<T>[count * WIDE / 2];
        float x[count * WIDE];
        const auto each = [&](auto use) {
#pragma unroll
            for (int i = 0; i < count * WIDE / 2; ++i) use(i, x[2 * i], x[2 * i + 1]);
        };
        const auto pair_of = [](const uint4(&words)[count], int i) {
            return unpack_pair<T>(reinterpret_cast<const pairs&>(words)[i]);
        };
        each([&](int i, float& first, float& second) {
            const float2 pair = pair_of(z, i);
            first = pair.x, second = pair.y;
        });
        if (g.epilogue.activation > Activation::relu) {
            with_serial_formula<T>(g.epilogue.activation, [&](auto function) {
#pragma unroll
                for (int i = 0; i < count * WIDE; ++i) x[i] = function(x[i]);
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
