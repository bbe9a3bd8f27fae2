// Product of up to 16 rows of 16-bit activations with a prepared NVFP4 weight, for every GPU from
// compute capability 8.0 on: its cost is to read the weight, once.
//
// A block has a tile of a few strips of 16 columns and all of k, of which each of its eight warps
// has every eighth piece. Warps depend on nobody before the end: each has a ring of its own, which
// it fills by cp.async and waits for by semaphores of its own, with as many stages as fit. A lane
// copies the very codes that it needs, and makes fragments of them in registers. At the end the
// sums of the warps meet in shared memory, and are added in a fixed order: reruns give the same
// bits. A multiprocessor holds two blocks, so that one reads while the other begins or ends.
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
    int stages;
};

struct FewRowsShared {
    semaphore full[FEW_ROWS_WARPS][FEW_ROWS_STAGES];
};
static_assert(sizeof(FewRowsShared) <= 1024);

// A warp: its ring and its part of a tile.
template <class T>
struct FewRowsWarp {
    using rows_tile = st<T, FEW_ROWS, PIECE>;
    static constexpr int ROWS_BYTES = sizeof(rows_tile), VECTORS = PIECE * 2 / 16;
    using Sums = rt_fl<16, 16>[FEW_ROWS_STRIPS];

    const FewRowsGlobals& g;
    semaphore* full;
    const rows_tile* rows;  // of the ring; behind them are its strips
    uint32_t strips;        // address
    int count;              // of strips
    int steps;
    // Of the piece that is copied next: its first strip, this lane's vector of the first row, and
    // how much of k there is from that on.
    const uint8_t *weight, *a;
    int k_left;
    int first;         // place of the first strip in its piece
    uint32_t to_next;  // bytes from the end of a piece to the next one of other columns
    int rows_left;

    __device__ __forceinline__ FewRowsWarp(const FewRowsGlobals& globals, const GroupTile& tile)
        : g(globals), rows_left(static_cast<int>(tile.end - tile.token)) {
        const int warp = kittens::warpid(), lane = laneid();
        uint8_t* const memory = reinterpret_cast<uint8_t*>(shared_memory());
        full = reinterpret_cast<FewRowsShared*>(memory)->full[warp];
        rows = reinterpret_cast<const rows_tile*>(memory + 1024) + warp * g.stages;
        strips = arch::shared_address(memory) + 1024 + FEW_ROWS_WARPS * g.stages * ROWS_BYTES +
                 warp * g.stages * g.strips * STRIP_BYTES;
        const int begin = static_cast<int>(tile.column_tile) * g.strips;
        count = min(g.strips, g.all_strips - begin);
        first = begin % STRIPS;
        steps = (static_cast<int>(g.k_pieces) - warp + FEW_ROWS_WARPS - 1) / FEW_ROWS_WARPS;
        const int64_t line = int64_t{tile.group} * g.row_pieces + begin / STRIPS;
        weight = g.weight + (line * g.k_pieces + warp) * PIECE_BYTES + first * STRIP_BYTES;
        to_next = (g.k_pieces - 1) * PIECE_BYTES;
        k_left = static_cast<int>(g.k) - (warp * PIECE + lane % VECTORS * 8);
        a = g.a + (tile.token + lane / VECTORS) * g.a_stride +
            (warp * PIECE + lane % VECTORS * 8) * 2;
    }

    // Where strip i of a piece is, behind the first.
    __device__ __forceinline__ uint32_t strip_offset(int i) const {
        return i * STRIP_BYTES + (first + i < STRIPS ? 0 : to_next);
    }
    // Copies what the warp's next piece needs.
    __device__ __forceinline__ void copy(int slot) {
        const int lane = laneid();
        const uint32_t to = strips + slot * g.strips * STRIP_BYTES;
#pragma unroll
        for (int i = 0; i < FEW_ROWS_STRIPS; ++i) {
            if (i >= count) break;
            arch::cp_async<16>(to + i * STRIP_BYTES + lane * 16,
                               weight + strip_offset(i) + lane * 16);
        }
        constexpr int SCALES = Nvfp4Weights::CODES, LANES = (STRIP_BYTES - SCALES) / 16;
        if (const int i = lane / LANES; i < count) {
            const int place = SCALES + lane % LANES * 16;
            arch::cp_async<16>(to + i * STRIP_BYTES + place, weight + strip_offset(i) + place);
        }
        constexpr int ROWS = WARP_THREADS / VECTORS;  // at a time
        const uint8_t* at = a;
#pragma unroll
        for (int i = 0; i < FEW_ROWS / ROWS; ++i) {
            const int row = i * ROWS + lane / VECTORS;
            const bool there = row < rows_left && k_left > 0;
            // What is not read has to be an address nevertheless.
            arch::cp_async<16>(rows[slot].address_of(row, lane % VECTORS * 8), there ? at : g.a,
                               there);
            at += ROWS * g.a_stride;
        }
        arch::cp_async_mbarrier_arrive(full[slot].address());
        weight += FEW_ROWS_WARPS * PIECE_BYTES;
        a += FEW_ROWS_WARPS * PIECE * 2;
        k_left -= FEW_ROWS_WARPS * PIECE;
    }

    __device__ __forceinline__ void run(Sums& d) {
        if (laneid() == 0) {
            for (int i = 0; i < g.stages; ++i) init_semaphore(full[i], WARP_THREADS);
        }
        arch::sync_warp();
        for (int i = 0; i < min(g.stages, steps); ++i) copy(i);
        const operand_walker<operand_a, true, rows_tile> walker(rows[0], 0, 0);
        const uint32_t codes = strips + laneid() * Nvfp4Weights::LANE_CODES;
        const uint32_t scales = strips + Nvfp4Weights::scales_of(laneid());
        int slot = 0, phase = 0;
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
            wait(full[slot], phase);
            Nvfp4Weights::Words words[FEW_ROWS_STRIPS];
            const uint32_t stage = slot * g.strips * STRIP_BYTES;
#pragma unroll
            for (int i = 0; i < FEW_ROWS_STRIPS; ++i) {
                // Of fewer the last one again: loads without a question are all on their way.
                const uint32_t at = stage + min(i, count - 1) * STRIP_BYTES;
                words[i] = Nvfp4Weights::load_words(codes + at, scales + at);
            }
            operand_a<T> x[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) walker.load(x[k], 0, k * 16, slot * ROWS_BYTES);
            // All lanes have what they need of the slot.
            arch::sync_warp();
            if (step + g.stages < steps) copy(slot);
#pragma unroll
            for (int i = 0; i < FEW_ROWS_STRIPS; ++i) {
                if (i >= count) break;
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    operand_b<T> w;
                    make_operand(w, words[i], k);
                    mma_operands(d[i], x[k], w);
                }
            }
            if (++slot == g.stages) slot = 0, phase ^= 1;
        }
    }
};

// Adds the sums of all warps, and stores the tile. Sums are rows of floats, `pitch` apart, FEW_ROWS
// of each warp.
template <class T>
__device__ __forceinline__ void store_few_rows(const FewRowsGlobals& g, const GroupTile& tile,
                                               const rt_fl<16, 16> (&d)[FEW_ROWS_STRIPS],
                                               int count) {
    const int pitch = g.strips * STRIP_ROWS + 4, lane = laneid();
    const uint32_t sums = arch::shared_address(shared_memory()) + 1024;
    const uint32_t to =
        sums + ((kittens::warpid() * FEW_ROWS + lane / 4) * pitch + lane % 4 * 2) * 4;
    arch::sync_block();  // the rings become the memory of the sums
#pragma unroll
    for (int i = 0; i < FEW_ROWS_STRIPS; ++i) {
        if (i >= count) break;
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const int at = r % 2 * 8 * pitch + i * STRIP_ROWS + r / 2 * 8;
            arch::store_shared(to + at * 4, d[i].tiles[0][0].data[r]);
        }
    }
    arch::sync_block();
    const bool has_group = tile.group < g.groups.count;
    const float alpha =
        !has_group ? 0.f
                   : Nvfp4Weights::FACTOR *
                         (g.scale != nullptr ? arch::load_global(g.scale + tile.group) : 1.f);
    const T* bias = has_group ? static_cast<const T*>(g.bias) : nullptr;
    const int fours = count * STRIP_ROWS / 4;
    const int there = min(FEW_ROWS, static_cast<int>(tile.end - tile.token));
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < there * fours;
         i += FEW_ROWS_WARPS * WARP_THREADS) {
        const int row = i / fours, column = (i - row * fours) * 4;
        const uint32_t n = tile.column_tile * g.strips * STRIP_ROWS + column;
        if (n >= g.n) continue;
        float x[4] = {};
#pragma unroll
        for (int w = 0; w < FEW_ROWS_WARPS; ++w) {
            const uint32_t from = sums + ((w * FEW_ROWS + row) * pitch + column) * 4;
            const float4 more = arch::load_shared<float4>(from);
            x[0] += more.x, x[1] += more.y, x[2] += more.z, x[3] += more.w;
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

template <int DTYPE>
__global__ __launch_bounds__(
    FEW_ROWS_WARPS* WARP_THREADS,
    FEW_ROWS_PER_SM) void nvfp4_few_rows_kernel(const __grid_constant__ FewRowsGlobals g) {
    using T = std::conditional_t<DTYPE == int(DType::bf16), bf16, half>;
    const GroupTile tile = g.groups.template at<FEW_ROWS>(blockIdx.x);
    if (tile.group > g.groups.count) return;
    typename FewRowsWarp<T>::Sums d;
#pragma unroll
    for (int i = 0; i < FEW_ROWS_STRIPS; ++i) zero(d[i]);
    FewRowsWarp<T> warp(g, tile);
    if (tile.group < g.groups.count) warp.run(d);
    store_few_rows<T>(g, tile, d, warp.count);
}

}  // namespace sm80

template <DType dtype>
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
        .stages = config.stages};
    kittens::launch(kittens::LaunchOptions{.blocks_per_sm = FEW_ROWS_PER_SM},
                    sm80::nvfp4_few_rows_kernel<int(dtype)>,
                    dim3(gemm::sm80::blocks_of(globals.groups, FEW_ROWS)),
                    dim3(FEW_ROWS_WARPS * kittens::WARP_THREADS), dim3(1),
                    few_rows_shared_bytes(strips, config.stages), stream, globals);
}

}  // namespace thunderkittens::nvfp4_gemm
