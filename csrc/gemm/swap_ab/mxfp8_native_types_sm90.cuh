// What mxfp8_native_sm90.cuh works on: types, the walk over tiles, and the epilogue.
#pragma once

#include <bit>

#include "csrc/gemm/common/activation_sm90.cuh"
#include "csrc/gemm/mxfp8/mxfp8_gemm.h"
#include "csrc/gemm/quantize/mxfp8_quantize_sm90.cuh"
#include "csrc/gemm/swap_ab/skeleton_sm90.cuh"

namespace thunderkittens::mxfp8_gemm {
namespace sm90 {

using namespace kittens;

template <NativeShape S>
struct NativeTraits {
    static constexpr NativeShape shape = S;
    static constexpr int tokens = S.tokens, consumers = S.k_groups;
    static constexpr int threads = native_threads(S);
    static constexpr int ROWS = NATIVE_TILE;        // of the weight
    static constexpr int BLOCKS = CHUNK_K / BLOCK;  // of a row that lie in one atom of scales
    static constexpr int atoms = S.stage_k / CHUNK_K;
    // Factors of a block of k, in floats: of the weight's rows, two of a thread side by side; then
    // of a's rows, those of a thread side by side, with padding between them against bank
    // conflicts.
    static constexpr int of_lane = tokens / 4, lane_pitch = of_lane + 4;
    static constexpr int factors = native_factors(S);
    static_assert(factors == ROWS + 4 * lane_pitch);
    static __device__ __forceinline__ constexpr int place_of_row(int row) {
        return row / 16 * 16 + row % 8 * 2 + row / 8 % 2;
    }
    static __device__ __forceinline__ constexpr int place_of_token(int token) {
        return ROWS + token % 8 / 2 * lane_pitch + token / 8 * 2 + token % 2;
    }
    // Products of a warpgroup: in a stage, and in flight, as many as there are registers for.
    static constexpr int products = native_products(S);
    static constexpr int in_flight = std::min<int>(
        products, std::bit_floor((consumers == 2 ? 512u : 320u) / unsigned(consumers * tokens)));
    // Whether registers move between warpgroups, of those that a block has at launch.
    static constexpr bool moves_registers = consumers > 1;
    static constexpr int producer_registers = consumers == 2 ? 40 : 32;
    static constexpr int consumer_registers = consumers == 2 ? 232 : 112;

    using codes = st<fp8e4m3, ROWS, S.stage_k>;
    using rows = st<fp8e4m3, tokens, S.stage_k>;
    using out_tile = st<bf16, tokens, ROWS>;  // 16-bit results on their way out
    static constexpr int pitch = ROWS + 4;    // of others, in floats: no bank conflicts

    struct Stage {
        codes weight;
        rows a;
    };
    struct alignas(128) Scales {
        uint8_t weight[atoms * block_scaled::sm90::ATOM], a[atoms * block_scaled::sm90::ATOM];
    };
    struct Shared {
        Stage stages[S.stages];
        Scales scales[S.stages];
        // For each block of k, factors of rows of the weight, then of a; twice, for alternating
        // steps.
        sv_fl<products * factors> factors_of[consumers][2];
        sv_fl<std::max(native_senders(S) * ROWS * tokens, 32)> sent;
        semaphore full[S.stages], empty[S.stages];
        semaphore summed;  // the cluster's other blocks have sent their sums
    };
    static_assert(sizeof(Stage) % 1024 == 0);
    static_assert(sizeof(Stage) >= tokens * std::max(pitch, (consumers - 1) * ROWS) * 4);
    static_assert(sizeof(Shared) <= MAX_SHARED_MEMORY, "too many stages");
    static_assert(sizeof(Shared) == native_shared_bytes(S),
                  "mxfp8/mxfp8_gemm.h knows another size");

    struct Globals {
        gl<fp8e4m3, 1, 1, -1, -1, rows> a;
        gl<fp8e4m3, 1, 1, -1, -1, codes> weight;
        gl<bf16, 1, 1, -1, -1, out_tile> out_map;
        const uint8_t *scales_a, *scales_weight;
        const bf16* bias;
        void* out;
        DType out_dtype;
        gemm::Activation activation;
        bool stores_by_tma;  // the transposed store: 16-bit results
        bool vec4_aligned;   // four neighbouring elements of out are aligned
        uint32_t m, n, tiles, clusters;
        gemm::Divisor m_tiles;
        int k_blocks, k_chunks, k_steps, splits;
    };
};

template <class Traits>
using NativeTile = swap_ab::Tile<Traits::tokens, Traits::ROWS, int>;

// The reduction and the epilogue of a tile. The last stage, `slot`, belongs to the consumers until
// it is released here.
template <class Traits>
struct NativeEpilogue {
    static constexpr int READ = 2, SUMS = 3 + Traits::consumers;  // named barriers
    static constexpr int THREADS = Traits::consumers * WARPGROUP_THREADS;
    static constexpr int VEC4S = Traits::tokens / 8;  // of a thread's sums, 16 bytes each
    static constexpr int BYTES = VEC4S * WARPGROUP_THREADS * 16;
    using Sums = rt_fl<16, Traits::tokens>;

    static __device__ __forceinline__ void release(semaphore& empty) {
        arch::fence_async_shared();  // the next copy comes after what has been written here
        gemm::sm90::arrive_by_warp(empty);
    }

    static __device__ __forceinline__ void tile(const typename Traits::Globals& g,
                                                typename Traits::Shared& shared, Sums& d,
                                                const NativeTile<Traits>& tile, int slot, int rank,
                                                int group) {
        const uint32_t workspace = arch::shared_address(&shared.stages[slot]);
        semaphore& empty = shared.empty[slot];
        if constexpr (Traits::consumers > 1) {
            const uint32_t mine = workspace + warpgroup::laneid() * 16;
            arch::named_barrier_sync(READ, THREADS);  // the stage, by all
            if (group > 0) {
#pragma unroll
                for (int i = 0; i < VEC4S; ++i) {
                    arch::store_shared(mine + (group - 1) * BYTES + i * (WARPGROUP_THREADS * 16),
                                       gemm::sm90::vec4_of(d, i));
                }
                arch::named_barrier_arrive(SUMS, THREADS);
                return release(empty);
            }
            arch::named_barrier_sync(SUMS, THREADS);
#pragma unroll
            for (int other = 1; other < Traits::consumers; ++other) {
#pragma unroll
                for (int i = 0; i < VEC4S; ++i) {
                    gemm::sm90::add_vec4(d, i,
                                         arch::load_shared<float4>(mine + (other - 1) * BYTES +
                                                                   i * (WARPGROUP_THREADS * 16)));
                }
            }
        }
        if (g.splits > 1) {
            const gemm::sm90::ClusterGather<Traits::tokens> sent{shared.sent.address(),
                                                                 shared.summed};
            if (rank > 0) {
                sent.send(d, rank);
                return release(empty);
            }
            sent.receive(d, g.splits);
        }
        warpgroup::sync(SUMS + 1);
        if (g.stores_by_tma)
            store_by_tma(g, shared, d, tile, slot);
        else
            store_rows(g, d, tile, workspace);
        release(empty);
    }

  private:
    // The transposed store, by TMA.
    static __device__ __forceinline__ void store_by_tma(const typename Traits::Globals& g,
                                                        typename Traits::Shared& shared,
                                                        const Sums& d,
                                                        const NativeTile<Traits>& tile, int slot) {
        auto& buffer = reinterpret_cast<typename Traits::out_tile&>(shared.stages[slot]);
        float bias[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint32_t n = tile.col + warpgroup::warpid() * 16 + laneid() / 4 + i * 8;
            bias[i] =
                g.bias != nullptr && n < g.n ? convert<float>(arch::load_global(g.bias + n)) : 0.f;
        }
        swap_ab::store_transposed<Traits::tokens>(buffer, g.out_dtype, [&](int j, int r) {
            const float2 pair = d.tiles[0][j].data[r];
            return make_float2(pair.x + bias[r % 2], pair.y + bias[r % 2]);
        });
        arch::fence_async_shared();
        warpgroup::sync(SUMS + 1);
        if (warpgroup::laneid() == 0) {
            tma::store_async(g.out_map, buffer, elements(0, 0, tile.row, tile.col));
            tma::store_async_read_wait();
        }
    }
    static __device__ __forceinline__ void store_rows(const typename Traits::Globals& g,
                                                      const Sums& d, const NativeTile<Traits>& tile,
                                                      uint32_t workspace) {
        constexpr int fours = Traits::ROWS / 4;
        gemm::sm90::store_sums<Traits::pitch>(workspace, d, 0);
        warpgroup::sync(SUMS + 1);
#pragma unroll 1
        for (int i = warpgroup::laneid(); i < Traits::tokens * fours; i += WARPGROUP_THREADS) {
            const int row = i / fours, col = i % fours * 4;
            const uint32_t m = tile.row + row, n = tile.col + col;
            if (m >= g.m || n >= g.n) continue;
            const auto sum = arch::load_shared<float4>(workspace + (row * Traits::pitch + col) * 4);
            float x[4] = {sum.x, sum.y, sum.z, sum.w};
            const int count = g.n - n < 4 ? int(g.n - n) : 4;
            if (g.bias != nullptr) {
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    if (j < count) x[j] += convert<float>(arch::load_global(g.bias + n + j));
                }
            }
            swap_ab::finish_four(g, m, n, x, count);
        }
    }
};

}  // namespace sm90
}  // namespace thunderkittens::mxfp8_gemm
