// What mxfp8_native_sm90.cuh works on: types, the walk over tiles, and what becomes of a tile's
// sums.
#pragma once

#include <bit>

#include "csrc/gemm/common/activation_sm90.cuh"
#include "csrc/gemm/common/cluster_sm90.cuh"
#include "csrc/gemm/common/raster.h"
#include "csrc/gemm/common/reduce_cluster_sm90.cuh"
#include "csrc/gemm/mxfp8/mxfp8_gemm.h"
#include "csrc/gemm/quantize/mxfp8_quantize_sm90.cuh"

namespace thunderkittens::mxfp8_gemm {
namespace sm90 {

using namespace kittens;

template <CodesShape S>
struct CodesTypes {
    static constexpr CodesShape shape = S;
    static constexpr int tokens = S.tokens, consumers = S.k_groups;
    static constexpr int threads = codes_threads(S);
    static constexpr int ROWS = CODES_TILE;       // of the weight
    static constexpr int BLOCKS = FEW_K / BLOCK;  // of a row that lie in one atom of scales
    static constexpr int atoms = S.stage_k / FEW_K;
    // Factors of a block of k, in floats: of the weight's rows, two of a thread side by side; then
    // of a's rows, those of a thread side by side, and room between, so that banks do not conflict.
    static constexpr int of_lane = tokens / 4, lane_pitch = of_lane + 4;
    static constexpr int factors = codes_factors(S);
    static_assert(factors == ROWS + 4 * lane_pitch);
    static __device__ __forceinline__ constexpr int place_of_row(int row) {
        return row / 16 * 16 + row % 8 * 2 + row / 8 % 2;
    }
    static __device__ __forceinline__ constexpr int place_of_token(int token) {
        return ROWS + token % 8 / 2 * lane_pitch + token / 8 * 2 + token % 2;
    }
    // Products of a warpgroup: in a stage, and as many at a time as there are registers for.
    static constexpr int products = codes_products(S);
    static constexpr int in_flight = std::min<int>(
        products, std::bit_floor((consumers == 2 ? 512u : 320u) / unsigned(consumers * tokens)));
    // Of the registers that a block has at launch.
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
        // Of each block of k: rows of the weight, then those of a. For every other step.
        sv_fl<products * factors> factors_of[consumers][2];
        sv_fl<std::max(codes_senders(S) * ROWS * tokens, 32)> sent;
        semaphore full[S.stages], empty[S.stages];
        semaphore summed;  // the cluster's other blocks have sent their sums
    };
    static_assert(sizeof(Stage) % 1024 == 0);
    static_assert(sizeof(Stage) >= tokens * std::max(pitch, (consumers - 1) * ROWS) * 4);
    static_assert(sizeof(Shared) <= MAX_SHARED_MEMORY, "too many stages");
    static_assert(sizeof(Shared) == codes_shared_bytes(S), "mxfp8/mxfp8_gemm.h knows another size");

    struct Globals {
        gl<fp8e4m3, 1, 1, -1, -1, rows> a;
        gl<fp8e4m3, 1, 1, -1, -1, codes> weight;
        gl<bf16, 1, 1, -1, -1, out_tile> out_map;
        const uint8_t *scales_a, *scales_weight;
        const bf16* bias;
        void* out;
        DType out_dtype;
        gemm::Activation activation;
        bool direct;  // 16-bit results that TMA stores
        bool quads;   // four neighbouring elements of out are aligned
        uint32_t m, n, tiles, clusters;
        gemm::Divisor m_tiles;
        int k_blocks, k_chunks, k_stages, splits;
    };
};

template <class K>
struct CodesTile {
    int token, row;
    int first, begin, end;  // the stages of k: the first of them, their range

    __device__ __forceinline__ CodesTile(const typename K::Globals& g, uint32_t index, int rank) {
        const uint32_t row_tile = g.m_tiles.divide(index);
        token = static_cast<int>(index - row_tile * g.m_tiles.value) * K::tokens;
        row = static_cast<int>(row_tile) * K::ROWS;
        begin = g.k_stages * rank / g.splits, end = g.k_stages * (rank + 1) / g.splits;
        // Tiles begin at different k: not all blocks read the same lines of a at the same time.
        first = begin + static_cast<int>(index * 37 % uint32_t(end - begin));
    }
    __device__ __forceinline__ int after(int k) const { return k + 1 == end ? begin : k + 1; }
};

template <class K, class Work>
__device__ __forceinline__ void for_each_codes_tile(const typename K::Globals& g, int rank,
                                                    Work work) {
    for (uint32_t i = blockIdx.x / g.splits; i < g.tiles; i += g.clusters) {
        work(CodesTile<K>(g, i, rank));
    }
}

// What becomes of a tile's sums. The last stage, `slot`, belongs to the consumers until it is
// handed back here.
template <class K>
struct CodesFinish {
    static constexpr int READ = 2, SUMS = 3 + K::consumers;  // named barriers
    static constexpr int THREADS = K::consumers * WARPGROUP_THREADS;
    static constexpr int PIECES = K::tokens / 8;  // of 16 bytes, of a thread's sums
    static constexpr int BYTES = PIECES * WARPGROUP_THREADS * 16;
    using Sums = rt_fl<16, K::tokens>;

    static __device__ __forceinline__ void hand_back(semaphore& empty) {
        arch::fence_async_shared();  // the next copy comes after what has been written here
        arch::sync_warp();
        if (laneid() == 0) arrive(empty);
    }

    static __device__ __forceinline__ void tile(const typename K::Globals& g,
                                                typename K::Shared& shared, Sums& d,
                                                const CodesTile<K>& tile, int slot, int rank,
                                                int group) {
        const uint32_t scratch = arch::shared_address(&shared.stages[slot]);
        semaphore& empty = shared.empty[slot];
        if constexpr (K::consumers > 1) {
            const uint32_t mine = scratch + warpgroup::laneid() * 16;
            arch::named_barrier_sync(READ, THREADS);  // the stage, by all
            if (group > 0) {
#pragma unroll
                for (int i = 0; i < PIECES; ++i) {
                    const auto& data = d.tiles[0][i / 2].data;
                    const float2 low = data[i % 2 * 2], high = data[i % 2 * 2 + 1];
                    arch::store_shared(mine + (group - 1) * BYTES + i * (WARPGROUP_THREADS * 16),
                                       make_float4(low.x, low.y, high.x, high.y));
                }
                arch::named_barrier_arrive(SUMS, THREADS);
                return hand_back(empty);
            }
            arch::named_barrier_sync(SUMS, THREADS);
#pragma unroll
            for (int other = 1; other < K::consumers; ++other) {
#pragma unroll
                for (int i = 0; i < PIECES; ++i) {
                    const auto more = arch::load_shared<float4>(mine + (other - 1) * BYTES +
                                                                i * (WARPGROUP_THREADS * 16));
                    auto& data = d.tiles[0][i / 2].data;
                    float2 &low = data[i % 2 * 2], &high = data[i % 2 * 2 + 1];
                    low.x += more.x, low.y += more.y, high.x += more.z, high.y += more.w;
                }
            }
        }
        if (g.splits > 1) {
            const gemm::sm90::SentSums<K::tokens> sent{shared.sent.address(), shared.summed};
            if (rank > 0) {
                sent.send(d, rank);
                return hand_back(empty);
            }
            sent.receive(d, g.splits);
        }
        warpgroup::sync(SUMS + 1);
        if (g.direct)
            store_directly(g, shared, d, tile, slot);
        else
            store_turned(g, d, tile, scratch);
        hand_back(empty);
    }

  private:
    // By transposing stores to TMA.
    static __device__ __forceinline__ void store_directly(const typename K::Globals& g,
                                                          typename K::Shared& shared, const Sums& d,
                                                          const CodesTile<K>& tile, int slot) {
        auto& buffer = reinterpret_cast<typename K::out_tile&>(shared.stages[slot]);
        float bias[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint32_t n = tile.row + warpgroup::warpid() * 16 + laneid() / 4 + i * 8;
            bias[i] =
                g.bias != nullptr && n < g.n ? convert<float>(arch::load_global(g.bias + n)) : 0.f;
        }
        rt_bf<K::tokens, 16, col_l> out;
#pragma unroll
        for (int j = 0; j < K::tokens / 16; ++j) {
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                const float2 pair = d.tiles[0][j].data[r];
                const float low = pair.x + bias[r % 2], high = pair.y + bias[r % 2];
                out.tiles[j][0].data[r] = g.out_dtype == DType::bf16
                                              ? arch::pack_bf16(low, high)
                                              : arch::bit_cast<bf16_2>(arch::pack_half(low, high));
            }
        }
        auto columns = buffer.template subtile<K::tokens, 16>({0, warpgroup::warpid()});
        kittens::warp::store(columns, out);
        arch::fence_async_shared();
        warpgroup::sync(SUMS + 1);
        if (warpgroup::laneid() == 0) {
            tma::store_async(g.out_map, buffer, elements(0, 0, tile.token, tile.row));
            tma::store_async_read_wait();
        }
    }
    static __device__ __forceinline__ void store_turned(const typename K::Globals& g, const Sums& d,
                                                        const CodesTile<K>& tile,
                                                        uint32_t scratch) {
        constexpr int fours = K::ROWS / 4;
#pragma unroll
        for (int j = 0; j < K::tokens / 16; ++j) {
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                const int col = warpgroup::warpid() * 16 + laneid() / 4 + r % 2 * 8;
                const int row = j * 16 + r / 2 * 8 + laneid() % 4 * 2;
                const float2 pair = d.tiles[0][j].data[r];
                arch::store_shared(scratch + (row * K::pitch + col) * 4, pair.x);
                arch::store_shared(scratch + ((row + 1) * K::pitch + col) * 4, pair.y);
            }
        }
        warpgroup::sync(SUMS + 1);
#pragma unroll 1
        for (int i = warpgroup::laneid(); i < K::tokens * fours; i += WARPGROUP_THREADS) {
            const int row = i / fours, col = i % fours * 4;
            const uint32_t m = tile.token + row, n = tile.row + col;
            if (m >= g.m || n >= g.n) continue;
            const auto sum = arch::load_shared<float4>(scratch + (row * K::pitch + col) * 4);
            float x[4] = {sum.x, sum.y, sum.z, sum.w};
            const int count = g.n - n < 4 ? int(g.n - n) : 4;
            if (g.bias != nullptr) {
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    if (j < count) x[j] += convert<float>(arch::load_global(g.bias + n + j));
                }
            }
            gemm::sm90::activate(g.activation, x);
            const int64_t at = int64_t(m) * g.n + n;
            if (g.out_dtype == DType::bf16)
                gemm::sm90::store_four(static_cast<bf16*>(g.out) + at, x, g.quads, count);
            else if (g.out_dtype == DType::fp16)
                gemm::sm90::store_four(static_cast<half*>(g.out) + at, x, g.quads, count);
            else
                gemm::sm90::store_four(static_cast<float*>(g.out) + at, x, g.quads, count);
        }
    }
};

}  // namespace sm90
}  // namespace thunderkittens::mxfp8_gemm
