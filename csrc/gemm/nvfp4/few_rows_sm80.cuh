// Product of up to 16 rows of 16-bit activations with a prepared NVFP4 weight, for every GPU from
// compute capability 8.0 on: its cost is to read the weight, once.
//
// A block has a tile of a few strips of 16 rows of the weight and all of k, of which each of its
// eight or sixteen warps has every eighth or sixteenth piece. A strip is the first operand of
// mma.sync, eight rows of a are the second. Warps depend on nobody before the end: each has a ring
// of its own, which it fills by cp.async, a group of copies for each stage. A lane copies the very
// codes that it needs, and makes fragments of them in registers. At the end the sums of the warps
// meet in shared memory, and are added in a fixed order: reruns give the same bits. A
// multiprocessor holds sixteen warps, of one block or of two.
#pragma once

#include "csrc/gemm/nvfp4/multistage_sm80.cuh"

namespace thunderkittens::nvfp4_gemm {
namespace sm80 {

struct FewRowsGlobals {
    const uint8_t *a, *weight;
    int64_t a_stride;  // in bytes
    const float* scale;
    const void* bias;
    void* out;
    DType out_dtype;
    gemm::Activation activation;
    bool vec4_aligned;  // four neighbouring elements of out are aligned
    Groups groups;
    uint32_t n, k, row_pieces, k_pieces;
    int strips, all_strips;  // of a tile, of a weight
    int stages, warps;
};

// Waits for the oldest of a ring's copies, where a group has been committed for every stage.
__device__ __forceinline__ void wait_for_oldest(int stages) {
    if (stages == 2) return arch::cp_async_wait<1>();
    if (stages == 3) return arch::cp_async_wait<2>();
    if (stages == 4) return arch::cp_async_wait<3>();
    if (stages == 5) return arch::cp_async_wait<4>();
    arch::cp_async_wait<FEW_ROWS_STAGES - 1>();
}

// A warp: its ring and its part of a tile of up to ROWS rows of a.
template <class T, int ROWS>
struct FewRowsWarp {
    using rows_tile = st<T, ROWS, PIECE>;
    static constexpr int ROWS_BYTES = sizeof(rows_tile), VECTORS = PIECE * 2 / 16;
    static constexpr int EIGHTS = ROWS / 8, LOADS = 2 * EIGHTS;
    static constexpr int SCALE_LANES = (STRIP_BYTES - Nvfp4Weights::CODES) / 16;  // of a strip
    static_assert(FEW_ROWS_STRIPS * SCALE_LANES <= WARP_THREADS);

    const FewRowsGlobals& g;
    uint32_t rows, strips;  // addresses of the ring's parts
    int count;              // of strips
    int steps;
    // Of the piece that is copied next: this lane's vectors of the first strip, of its strip's
    // scales and of the first row of a, and how much of k there is from that one on.
    const uint8_t *codes, *scales, *a;
    int k_left;
    uint32_t offsets[FEW_ROWS_STRIPS];  // of the strips of a piece of k, from the first
    int rows_left;
    // Where this lane's vectors go in the first stage: of the scales, of rows 0 and 4.
    uint32_t to_scales, to_rows[2];
    float d[FEW_ROWS_STRIPS][EIGHTS][4] = {};

    __device__ __forceinline__ FewRowsWarp(const FewRowsGlobals& globals, const GroupTile& tile)
        : g(globals), rows_left(static_cast<int>(tile.end - tile.token)) {
        const int warp = kittens::warpid(), lane = laneid();
        const uint32_t memory = arch::shared_address(shared_memory());
        rows = memory + warp * g.stages * ROWS_BYTES;
        strips =
            memory + g.warps * g.stages * ROWS_BYTES + warp * g.stages * g.strips * STRIP_BYTES;
        const int begin = static_cast<int>(tile.column_tile) * g.strips;
        count = min(g.strips, g.all_strips - begin);
        steps = (static_cast<int>(g.k_pieces) - warp + g.warps - 1) / g.warps;
        const int64_t line = int64_t{tile.group} * g.row_pieces + begin / STRIPS;
        const int first = begin % STRIPS;
        const uint8_t* const weight =
            g.weight + (line * g.k_pieces + warp) * PIECE_BYTES + first * STRIP_BYTES;
        // Bytes from the end of a piece to the next one of other rows.
        const uint32_t to_next = (g.k_pieces - 1) * PIECE_BYTES;
        const auto offset_of = [&](int i) -> uint32_t {
            return i * STRIP_BYTES + (first + i) / STRIPS * to_next;
        };
#pragma unroll
        for (int i = 0; i < FEW_ROWS_STRIPS; ++i) {
            offsets[i] = offset_of(i);
            arch::pin_register(offsets[i]);
        }
        codes = weight + lane * 16;
        const int strip = min(lane / SCALE_LANES, count - 1);
        const int place = Nvfp4Weights::CODES + lane % SCALE_LANES * 16;
        scales = weight + offset_of(strip) + place;
        to_scales = strips + strip * STRIP_BYTES + place;
        arch::pin_register(to_scales);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            to_rows[i] = rows_tile::idx(rows, {i * 4 + lane / VECTORS, lane % VECTORS * 8});
            arch::pin_register(to_rows[i]);
        }
        k_left = static_cast<int>(g.k) - (warp * PIECE + lane % VECTORS * 8);
        a = g.a + (tile.token + lane / VECTORS) * g.a_stride +
            (warp * PIECE + lane % VECTORS * 8) * 2;
    }

    // Copies what the warp's next piece needs to the stage that begins at these offsets.
    __device__ __forceinline__ void copy(uint32_t rows_stage, uint32_t strips_stage) {
        const int lane = laneid();
        const uint32_t to = strips + strips_stage + lane * 16;
#pragma unroll
        for (int i = 0; i < FEW_ROWS_STRIPS; ++i) {
            if (i < count) arch::cp_async<16>(to + i * STRIP_BYTES, codes + offsets[i]);
        }
        if (lane < count * SCALE_LANES) arch::cp_async<16>(to_scales + strips_stage, scales);
        const bool there = k_left > 0;
        // What is not read has to be an address nevertheless.
        const uint8_t* at = there ? a : g.a;
        const int64_t step = there ? 4 * g.a_stride : 0;
#pragma unroll
        for (int row = 0; row < ROWS; row += 4, at += step) {
            if (row + lane / VECTORS < rows_left) {
                arch::cp_async<16>(to_rows[row / 4 % 2] + row / 8 * 8 * PIECE * 2 + rows_stage, at,
                                   there);
            }
        }
        codes += g.warps * PIECE_BYTES, scales += g.warps * PIECE_BYTES;
        a += g.warps * PIECE * 2;
        k_left -= g.warps * PIECE;
    }

    // Rows that do not exist are zero in every stage.
    __device__ __forceinline__ void clear_rows() {
        const uint4 zero{};
        const int vectors = min(rows_left, ROWS) * VECTORS;
        for (int i = laneid(); i < g.stages * ROWS * VECTORS; i += WARP_THREADS) {
            if (i % (ROWS * VECTORS) >= vectors) arch::store_shared(rows + i * 16, zero);
        }
    }

    __device__ __forceinline__ void run() {
        const int strips_bytes = g.strips * STRIP_BYTES;
        if (rows_left < ROWS) clear_rows();
        for (int i = 0; i < g.stages; ++i) {
            if (i < steps) copy(i * ROWS_BYTES, i * strips_bytes);
            arch::cp_async_commit();
        }
        const int lane = laneid(), eights = lane / 8;
        const int row = lane % 8 + (EIGHTS == 2 ? eights / 2 * 8 : 0);
        const int column = EIGHTS == 2 ? eights % 2 * 8 : eights * 8;
        uint32_t places[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            places[i] = rows_tile::idx(rows, {row, i * (PIECE / LOADS) + column});
            arch::pin_register(places[i]);
        }
        uint32_t codes_of = strips + lane * Nvfp4Weights::LANE_CODES;
        uint32_t scales_of = strips + Nvfp4Weights::scales_of(lane);
        arch::pin_register(codes_of), arch::pin_register(scales_of);
        const uint32_t end = g.stages * ROWS_BYTES;
        uint32_t rows_stage = 0, strips_stage = 0;
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
            wait_for_oldest(g.stages);
            arch::sync_warp();  // the other lanes' copies of scales and of a
            uint32_t x[4][EIGHTS][2];
            auto& loaded = reinterpret_cast<uint32_t(&)[LOADS][4]>(x);
#pragma unroll
            for (int i = 0; i < LOADS; ++i) {
                arch::load_matrix_x4(loaded[i][0], loaded[i][1], loaded[i][2], loaded[i][3],
                                     places[i] + rows_stage);
            }
            const uint32_t codes_at = codes_of + strips_stage, scales_at = scales_of + strips_stage;
            Nvfp4Weights::Words words[2];
            words[0] = Nvfp4Weights::load_words(codes_at, scales_at);
#pragma unroll
            for (int i = 0; i < FEW_ROWS_STRIPS; ++i) {
                const bool more = i + 1 < count;
                if (i + 1 < FEW_ROWS_STRIPS && more) {
                    Nvfp4Weights::Words& next = words[(i + 1) % 2];
                    next = Nvfp4Weights::load_words(codes_at + (i + 1) * STRIP_BYTES,
                                                    scales_at + (i + 1) * STRIP_BYTES);
                    // On their way before this strip is multiplied, and not behind the branch.
                    arch::pin_register(next.codes.x), arch::pin_register(next.scales.x);
                }
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    uint32_t w[4];
                    Nvfp4Weights::fragment<T>(words[i % 2], k, w);
#pragma unroll
                    for (int e = 0; e < EIGHTS; ++e) {
                        arch::mma_sync<T, T>::fma(d[i][e], w, x[k][e], d[i][e]);
                    }
                }
                if (!more) break;
            }
            arch::sync_warp();  // all lanes have what they need of the stage
            if (step + g.stages < steps) copy(rows_stage, strips_stage);
            arch::cp_async_commit();
            rows_stage += ROWS_BYTES, strips_stage += strips_bytes;
            if (rows_stage == end) rows_stage = 0, strips_stage = 0;
        }
        arch::cp_async_wait<0>();
    }
};

// Adds the sums of all warps, and stores the tile. Sums are rows of floats, `pitch` apart, ROWS of
// each warp.
template <class T, int ROWS>
__device__ __forceinline__ void store_few_rows(const FewRowsGlobals& g, const GroupTile& tile,
                                               const FewRowsWarp<T, ROWS>& warp) {
    const int pitch = g.strips * STRIP_ROWS + 4, lane = laneid();
    const uint32_t sums = arch::shared_address(shared_memory());
    // A lane has two neighbouring rows of a, and rows r and r + 8 of the weight.
    const uint32_t to = sums + ((kittens::warpid() * ROWS + lane % 4 * 2) * pitch + lane / 4) * 4;
    arch::sync_block();  // the rings become the memory of the sums
#pragma unroll
    for (int i = 0; i < FEW_ROWS_STRIPS; ++i) {
        if (i >= warp.count) break;
#pragma unroll
        for (int e = 0; e < warp.EIGHTS; ++e) {
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                const int at = (e * 8 + r % 2) * pitch + i * STRIP_ROWS + r / 2 * 8;
                arch::store_shared(to + at * 4, warp.d[i][e][r]);
            }
        }
    }
    arch::sync_block();
    const bool has_group = tile.group < g.groups.count;
    const float alpha =
        !has_group ? 0.f
                   : Nvfp4Weights::FACTOR *
                         (g.scale != nullptr ? arch::load_global(g.scale + tile.group) : 1.f);
    const T* bias = has_group ? static_cast<const T*>(g.bias) : nullptr;
    const int fours = warp.count * STRIP_ROWS / 4;
    const int there = min(ROWS, static_cast<int>(tile.end - tile.token));
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < there * fours; i += g.warps * WARP_THREADS) {
        const int row = i / fours, column = (i - row * fours) * 4;
        const uint32_t n = tile.column_tile * g.strips * STRIP_ROWS + column;
        if (n >= g.n) continue;
        float x[4] = {};
        uint32_t from = sums + (row * pitch + column) * 4;
#pragma unroll 1
        for (int w = 0; w < g.warps; w += 4) {
            float4 more[4];
#pragma unroll
            for (int j = 0; j < 4; ++j, from += ROWS * pitch * 4) {
                more[j] = arch::load_shared<float4>(from);
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                x[0] += more[j].x, x[1] += more[j].y, x[2] += more[j].z, x[3] += more[j].w;
            }
        }
        const int left = static_cast<int>(g.n - n);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            x[j] *= alpha;
            if (bias != nullptr && j < left) {
                x[j] += convert<float>(arch::load_global(bias + n + j));
            }
        }
        gemm::sm90::activate(g.activation, x);
        const int64_t at = int64_t{tile.token + row} * g.n + n;
        gemm::sm80::store_elements(g.out, g.out_dtype, at, x, g.vec4_aligned, min(left, 4));
    }
}

template <int DTYPE, int ROWS>
__global__ __launch_bounds__(FEW_ROWS_MOST_WARPS* WARP_THREADS, 1) void nvfp4_few_rows_kernel(
    const __grid_constant__ FewRowsGlobals g) {
    using T = std::conditional_t<DTYPE == int(DType::bf16), bf16, half>;
    const GroupTile tile = g.groups.template at<ROWS>(blockIdx.x);
    if (tile.group > g.groups.count) return;
    FewRowsWarp<T, ROWS> warp(g, tile);
    if (tile.group < g.groups.count) warp.run();
    store_few_rows(g, tile, warp);
}

}  // namespace sm80

template <DType dtype, int ROWS>
void launch_few_rows(const Config& config, const Params& p, Stream stream) {
    const int strips = p.schedule.strips;
    const int64_t all = (p.n + STRIP_ROWS - 1) / STRIP_ROWS;
    const int64_t column_tiles = (all + strips - 1) / strips;
    const sm80::FewRowsGlobals globals{
        .a = static_cast<const uint8_t*>(p.a),
        .weight = static_cast<const uint8_t*>(p.weight),
        .a_stride = p.a_stride * 2,
        .scale = p.scale,
        .bias = p.bias,
        .out = p.out,
        .out_dtype = p.out_dtype,
        .activation = static_cast<gemm::Activation>(p.activation),
        .vec4_aligned = gemm::is_vec4_aligned(p.out, p.n, p.out_dtype),
        .groups = {p.offs, static_cast<uint32_t>(p.m), static_cast<uint32_t>(p.groups),
                   static_cast<uint32_t>(column_tiles)},
        .n = static_cast<uint32_t>(p.n),
        .k = static_cast<uint32_t>(p.k),
        .row_pieces = static_cast<uint32_t>(pieces(p.n)),
        .k_pieces = static_cast<uint32_t>(pieces(p.k)),
        .strips = strips,
        .all_strips = static_cast<int>(all),
        .stages = config.stages,
        .warps = config.k_groups};
    kittens::launch(sm80::nvfp4_few_rows_kernel<int(dtype), ROWS>,
                    dim3(gemm::sm80::blocks_of(globals.groups, ROWS)),
                    dim3(config.k_groups * kittens::WARP_THREADS), dim3(1),
                    few_rows_shared_bytes(config, strips), stream, globals);
}
template <DType dtype>
void launch_few_rows(const Config& config, const Params& p, Stream stream) {
    if (config.tokens == 8) return launch_few_rows<dtype, 8>(config, p, stream);
    launch_few_rows<dtype, 16>(config, p, stream);
}

}  // namespace thunderkittens::nvfp4_gemm
