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

#include "csrc/gemm/fused_sm90.cuh"
#include "csrc/gemm/start_sm90.cuh"

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
        if (g.epilogue.preactivation != nullptr) arch::fence_async_shared();
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
                if (pairs) wait(shared.full[pass + 1], phase);
                wait(shared.full[pass + buffer], phase);
                finish<pairs>(g, buffers[buffer], buffers[1], at, more);
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
            constexpr int rows = K::spreads && !pairs ? COUNT : ahead<pairs>;
            More<rows> next(g, place(0));
            // A warp's part of a stage holds rows of others where those are adjacent.
            if constexpr (C.a_m_major) warpgroup::sync(READY + 1 + warpgroup::groupid());
#pragma unroll
            for (int piece = 0; piece < pieces; ++piece) stage(g, finished, piece, buffer(piece));
            if (g.epilogue.preactivation != nullptr) arch::fence_async_shared();
            arch::sync_warp();
#pragma unroll 1
            for (int piece = 0; piece < count; ++piece) {
                auto more = next;
                if (piece + 1 < count) next = More<rows>(g, place(piece + 1));
                const int first = piece * each;
                finish<pairs>(g, buffer(first), buffer(first + each - 1), place(piece), more);
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
    template <bool gated, int AHEAD>
    static __device__ __forceinline__ void finish(const Globals& g, staging& buffer,
                                                  const staging& second, const Place16 at,
                                                  More<AHEAD>& more) {
        const bool interleaved = gated && g.epilogue.gate == Gate::interleaved;
        const auto to = [&](uint32_t col) {
            return elements(at.batch, 0, at.row, static_cast<int>(col));
        };
        if (g.epilogue.preactivation != nullptr) {
            if (laneid() == 0) {
                const uint32_t col = interleaved ? 2 * at.col : at.col;
                tma::store_async(g.kept.map, buffer, to(col));
                if constexpr (gated) {
                    const uint32_t apart = interleaved ? staging::cols : g.out_n;
                    tma::store_async(g.kept.map, second, to(col + apart));
                }
                tma::store_async_read_wait();
            }
            arch::sync_warp();
        }
#pragma unroll 1
        for (int first = 0; first < COUNT; first += AHEAD) {
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                const int row = (first + i) * ROWS + laneid() / LANES;
                const int col = laneid() % LANES * WIDE;
                const uint32_t address = buffer.address_of(row, col);
                uint4 z, factor{};
                if (interleaved) {
                    const auto& from = col < staging::cols / 2 ? buffer : second;
                    const int there = 2 * col % staging::cols;
                    z = arch::load_shared<uint4>(from.address_of(row, there));
                    factor = arch::load_shared<uint4>(from.address_of(row, there + WIDE));
                    part(z, factor);
                    arch::sync_warp();  // the row has been read
                } else {
                    z = arch::load_shared<uint4>(address);
                    if constexpr (gated) {
                        factor = arch::load_shared<uint4>(second.address_of(row, col));
                    }
                }
                arch::store_shared(address, value<gated>(g, z, factor, more.parts[i]));
                if (first + AHEAD < COUNT) more.load(g, i);
            }
        }
        arch::fence_async_shared();
        arch::sync_warp();
        if (laneid() == 0) tma::store_async(g.out_map, buffer, to(at.col));
    }
    template <bool gated>
    static __device__ __forceinline__ uint4 value(const Globals& g, const uint4 z,
                                                  const uint4 factor, const uint4 residual) {
        using pairs = packed_type<T>[WIDE / 2];
        float x[WIDE];
#pragma unroll
        for (int i = 0; i < WIDE / 2; ++i) {
            const float2 pair = unpack_pair<T>(reinterpret_cast<const pairs&>(z)[i]);
            x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
        }
        if (std::is_same_v<T, bf16> && g.epilogue.activation > Activation::relu) {
            with_short_formula(g.epilogue.activation, [&](auto function) {
#pragma unroll
                for (int i = 0; i < WIDE; ++i) x[i] = function(x[i]);
            });
        } else {
            activate(g.epilogue.activation, x);
        }
        if constexpr (gated) {
#pragma unroll
            for (int i = 0; i < WIDE / 2; ++i) {
                const float2 pair = unpack_pair<T>(reinterpret_cast<const pairs&>(factor)[i]);
                x[2 * i] *= pair.x, x[2 * i + 1] *= pair.y;
            }
        }
        if (g.epilogue.residual != nullptr) {
#pragma unroll
            for (int i = 0; i < WIDE / 2; ++i) {
                const float2 pair = unpack_pair<T>(reinterpret_cast<const pairs&>(residual)[i]);
                x[2 * i] += g.epilogue.beta * pair.x;
                x[2 * i + 1] += g.epilogue.beta * pair.y;
            }
        }
        uint4 result;
#pragma unroll
        for (int i = 0; i < WIDE / 2; ++i) {
            reinterpret_cast<pairs&>(result)[i] = pack_pair<T>(x[2 * i], x[2 * i + 1]);
        }
        return result;
    }
};

}  // namespace sm90
}  // namespace thunderkittens::gemm
