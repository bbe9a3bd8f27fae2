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
    // Of a residual on its way; the formulas of fp16 leave fewer registers.
    static constexpr int AHEAD = C.dtype == DType::bf16 ? 2 : 1;

    // By a consumer.
    static __device__ __forceinline__ void hand_over(const Globals& g, Shared& shared,
                                                     const Finished<C>& finished, int piece) {
        const int warp = kittens::warpid();
        const int pass = C.stages + warp * 2 + piece % 2;
        wait(shared.empty[pass], piece / 2 % 2 ^ 1);
        finished.stage(piece, shared.out[warp][piece % 2]);
        if (g.epilogue.preactivation != nullptr) arch::fence_async_shared();
        arch::sync_warp();
        if (laneid() == 0) arrive(shared.full[pass]);
    }

    // By a finishing warp: each takes every third piece. A block's last tile is its consumers'.
    static __device__ __forceinline__ void work(const Globals& g, Shared& shared,
                                                uint32_t finisher) {
        uint32_t next = finisher;
        for (uint32_t i = first_tile(g); i + g.blocks < g.order.total; i += g.blocks) {
            const TilePosition tile = g.order.at(i);
#pragma unroll 1
            for (; next < pieces * warps; next += finishers) {
                const int piece = next / warps, warp = next % warps;
                const Place16 at{tile.batch, tile.m * C.block_m + warp * 16,
                                 tile.n * C.block_n + piece * staging::cols};
                More more(g, at);
                const int pass = C.stages + warp * 2 + piece % 2;
                wait(shared.full[pass], piece / 2 % 2);
                finish(g, shared.out[warp][piece % 2], at, more);
                if (laneid() == 0) {
                    tma::store_async_read_wait();
                    arrive(shared.empty[pass]);
                }
                arch::sync_warp();
            }
            next -= pieces * warps;
        }
    }

    // By a consumer, after the last tile, when the stages are free: of those it takes its own rows.
    static __device__ __forceinline__ void finish_last(const Globals& g, Shared& shared,
                                                       const Finished<C>& finished) {
        const auto buffer = [&](int piece) -> staging& {
            return Finished<C>::last_buffer(shared, piece);
        };
        const auto place = [&](int piece) {
            return Place16{finished.at.batch, finished.at.row,
                           finished.at.col + piece * staging::cols};
        };
        More next(g, place(0));
        // A warp's part of a stage holds rows of others where those are adjacent.
        if constexpr (C.a_m_major) warpgroup::sync(READY + 1 + warpgroup::groupid());
#pragma unroll
        for (int piece = 0; piece < pieces; ++piece) finished.stage(piece, buffer(piece));
        if (g.epilogue.preactivation != nullptr) arch::fence_async_shared();
        arch::sync_warp();
#pragma unroll 1
        for (int piece = 0; piece < pieces; ++piece) {
            More more = next;
            if (piece + 1 < pieces) next = More(g, place(piece + 1));
            finish(g, buffer(piece), place(piece), more);
        }
    }

  private:
    // A lane's part of a piece's residual.
    struct More {
        const T* from;
        int left;  // rows from here to the end, 0 also where the columns are outside
        uint4 parts[AHEAD];

        __device__ __forceinline__ More(const Globals& g, const Place16 at) {
            const Epilogue& e = g.epilogue;
            const uint32_t row = at.row + laneid() / LANES, col = at.col + laneid() % LANES * WIDE;
            left =
                row < g.m && col < g.n && e.residual != nullptr ? static_cast<int>(g.m - row) : 0;
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

    // Called by a warp, in place.
    static __device__ __forceinline__ void finish(const Globals& g, staging& buffer,
                                                  const Place16 at, More& more) {
        const auto to = elements(at.batch, 0, at.row, static_cast<int>(at.col));
        if (g.epilogue.preactivation != nullptr) {
            if (laneid() == 0) {
                tma::store_async(g.kept.map, buffer, to);
                tma::store_async_read_wait();
            }
            arch::sync_warp();
        }
#pragma unroll 1
        for (int first = 0; first < COUNT; first += AHEAD) {
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                const uint32_t address = buffer.address_of((first + i) * ROWS + laneid() / LANES,
                                                           laneid() % LANES * WIDE);
                const auto z = arch::load_shared<uint4>(address);
                arch::store_shared(address, value(g, z, more.parts[i]));
                if (first + AHEAD < COUNT) more.load(g, i);
            }
        }
        arch::fence_async_shared();
        arch::sync_warp();
        if (laneid() == 0) tma::store_async(g.out_map, buffer, to);
    }
    static __device__ __forceinline__ uint4 value(const Globals& g, const uint4 z,
                                                  const uint4 residual) {
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
