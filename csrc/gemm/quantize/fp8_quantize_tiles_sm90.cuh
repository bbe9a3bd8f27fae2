// Quantisation of tiles of 128 x 128, which can write the transpose too: a thread's units are eight
// rows of the same eight columns. It transposes them in registers, and the block writes the columns
// in lines of 128 bytes, through shared memory.
#pragma once

#include "csrc/gemm/quantize/fp8_quantize_units_sm90.cuh"

namespace thunderkittens::fp8_quantize {
namespace sm90 {

// The transpose of 4 x 4 bytes.
__device__ __forceinline__ void transpose_bytes(uint32_t (&r)[4]) {
    const uint32_t even01 = (r[0] & 0x00ff00ffu) | (r[1] & 0x00ff00ffu) << 8;
    const uint32_t odd01 = (r[0] >> 8 & 0x00ff00ffu) | (r[1] & 0xff00ff00u);
    const uint32_t even23 = (r[2] & 0x00ff00ffu) | (r[3] & 0x00ff00ffu) << 8;
    const uint32_t odd23 = (r[2] >> 8 & 0x00ff00ffu) | (r[3] & 0xff00ff00u);
    r[0] = (even01 & 0xffffu) | even23 << 16;
    r[1] = (odd01 & 0xffffu) | odd23 << 16;
    r[2] = even01 >> 16 | (even23 & 0xffff0000u);
    r[3] = odd01 >> 16 | (odd23 & 0xffff0000u);
}

struct TileShared {
    uint32_t cols[WARPS][GROUP];  // largest magnitudes of a warp's rows
    float factors[2][GROUP];      // of rows, of columns
    uint8_t codes[GROUP * GROUP];
};

// Where eight rows (`eight` of 16) of a column lie in shared memory: 16 bytes are permuted with the
// column, and their halves swapped, so that no two lanes of a half warp meet in a bank.
__device__ __forceinline__ uint32_t place_of(uint32_t base, int col, int eight) {
    const int chunk = eight / 2 ^ (col / UNIT) % 8, half = (eight ^ col / 64) & 1;
    return base + col * GROUP + chunk * 16 + half * 8;
}

// Where a thread's unit is in a tile of 128 x 128: eight rows of eight columns.
struct InTile {
    int lane = laneid() % LANES, eight = warpid() * 2 + laneid() / LANES;
};

// Writes the columns of a tile as rows of x^T: `codes` are eight rows of this thread's eight
// columns.
template <bool whole>
__device__ __forceinline__ void store_transposed(const Params& p, uint32_t codes_base,
                                                 const uint2 (&codes)[UNITS], const InTile& at,
                                                 int64_t tile_row, int64_t tile_col,
                                                 int64_t matrix = 0) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        uint32_t top[4], bottom[4];
#pragma unroll
        for (int u = 0; u < 4; ++u) {
            top[u] = half == 0 ? codes[u].x : codes[u].y;
            bottom[u] = half == 0 ? codes[u + 4].x : codes[u + 4].y;
        }
        transpose_bytes(top);
        transpose_bytes(bottom);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            arch::store_shared(place_of(codes_base, at.lane * UNIT + half * 4 + i, at.eight),
                               make_uint2(top[i], bottom[i]));
        }
    }
    arch::sync_block();
    auto* out = static_cast<uint8_t*>(p.out_t) + (matrix * p.k + tile_col * GROUP) * p.pitch_t +
                tile_row * GROUP;
    if (p.pitch_t % 16 != 0) {
        const int count = static_cast<int>(min(p.m - tile_row * GROUP, int64_t{GROUP}));
#pragma unroll 4
        for (int i = 0; i < GROUP; i += WARPS) {
            const int c = warpid() + i;
            if (!whole && tile_col * GROUP + c >= p.k) break;
            const uint32_t line = codes_base + c * GROUP;
            gemm::sm90::store_unaligned<GROUP>(out + c * p.pitch_t, line,
                                               place_of(line, c, 0) - c * GROUP - line, count);
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < GROUP * GROUP / 16 / THREADS; ++i) {
        const int index = i * THREADS + static_cast<int>(threadIdx.x);
        const int c = index / LANES * 2 % GROUP + index / 8 % 2, chunk = index % 8;
        const int64_t to_col = tile_col * GROUP + c, to_row = tile_row * GROUP + chunk * 16;
        if (!whole && (to_col >= p.k || to_row >= p.m)) continue;
        // Both halves at once: eight lanes read a line of 128 bytes.
        uint4 rows = arch::load_shared<uint4>(place_of(codes_base, c, 2 * chunk) & ~15u);
        if (c >= GROUP / 2) rows = make_uint4(rows.z, rows.w, rows.x, rows.y);
        arch::store_global(reinterpret_cast<uint4*>(out + c * p.pitch_t + chunk * 16), rows);
    }
}

// Writes the rows of a tile where they begin at any byte: a warp stages its own 16.
__device__ __forceinline__ void store_staged(const Params& p, uint32_t staged, const InTile& at,
                                             const uint2 (&codes)[UNITS], int64_t tile_row,
                                             int64_t tile_col) {
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
        arch::store_shared(staged + (at.eight * UNITS + u) * GROUP + at.lane * UNIT, codes[u]);
    }
    constexpr int ROWS = 2 * UNITS;
    const int first = warpid() * ROWS;
    const int64_t row = tile_row * GROUP + first, col = tile_col * GROUP;
    gemm::sm90::store_unaligned_rows<GROUP, ROWS>(static_cast<uint8_t*>(p.out) + (row * p.k + col),
                                                  p.k, p.m - row, p.k - col,
                                                  staged + first * GROUP);
}

// The largest magnitudes of a tile's columns so far: a lane's eight, 16-bit ones in pairs.
template <class T>
struct ColumnMaxima {
    Largest<T> most[Unit<T>::words];

    __device__ __forceinline__ void add(const Unit<T> (&x)[UNITS]) {
#pragma unroll
        for (int i = 0; i < Unit<T>::words; ++i) {
#pragma unroll
            for (int u = 0; u < UNITS; ++u) most[i].add(x[u].w[i]);
        }
    }
    // The magnitude of column threadIdx.x, for the first 128 threads.
    __device__ __forceinline__ uint32_t of_block(TileShared& shared, const InTile at) {
        const uint32_t base = arch::shared_address(&shared.cols[0][0]);
        constexpr int each = UNIT / Unit<T>::words;
#pragma unroll
        for (int i = 0; i < Unit<T>::words; ++i) {
            most[i].add(arch::shuffle_xor(most[i].bits, LANES));
            if (laneid() < LANES) {
#pragma unroll
                for (int e = 0; e < each; ++e) {
                    const uint32_t element = each == 1 ? most[i].bits
                                             : e == 0  ? most[i].bits & 0xffffu
                                                       : most[i].bits >> 16;
                    arch::store_shared(
                        base + 4 * (warpid() * GROUP + at.lane * UNIT + i * each + e),
                        Largest<T>::as_float(element));
                }
            }
        }
        arch::sync_block();
        uint32_t total = 0;
        if (threadIdx.x < GROUP) {
#pragma unroll
            for (int w = 0; w < WARPS; ++w) {
                total = larger(
                    total, arch::load_shared<uint32_t>(base + 4 * (w * GROUP + int(threadIdx.x))));
            }
        }
        return total;
    }
};

// The largest magnitudes of rows and columns. A block goes up a strip of 128 columns; what it reads
// last is what the next pass reads first.
template <class T>
__device__ __forceinline__ void find_lines(const Params& p) {
    auto& shared = arch::static_shared<TileShared>();
    const InTile at;
    const uint32_t across = static_cast<uint32_t>((p.k + GROUP - 1) / GROUP);
    const int64_t down = (p.m + GROUP - 1) / GROUP;
    const int64_t parts = gridDim.x / across, tile_col = blockIdx.x % across;
    const int64_t col = tile_col * GROUP + at.lane * UNIT;
    ColumnMaxima<T> columns;
    for (int64_t i = blockIdx.x / across; i < down; i += parts) {
        const int64_t row = (down - 1 - i) * GROUP + at.eight * UNITS;
        Unit<T> x[UNITS];
        load_down(p, row, col, x);
        columns.add(x);
        uint32_t most[UNITS];
#pragma unroll
        for (int u = 0; u < UNITS; ++u) most[u] = magnitude(x[u]);
        const GroupMaximum found(most);
        if (laneid() % 2 == 0 && row + found.own < p.m) {
            arch::reduce_max_global(p.amax + (row + found.own), found.bits);
        }
    }
    const uint32_t total = columns.of_block(shared, at);
    const int64_t own = tile_col * GROUP + threadIdx.x;
    if (threadIdx.x < GROUP && own < p.k) arch::reduce_max_global(p.amax_cols + own, total);
}

// The factors of a tile's rows, each of a group of 128 elements, and in shared memory, at
// `of_cols`, those of its columns.
template <class T>
__device__ __forceinline__ void find_factors(const Params& p, TileShared& shared, const InTile& at,
                                             const Unit<T> (&x)[UNITS], int64_t tile_row,
                                             int64_t tile_col, uint32_t of_cols,
                                             float (&factors)[UNITS]) {
    const int thread = static_cast<int>(threadIdx.x);
    const int64_t row = tile_row * GROUP + at.eight * UNITS;
    ColumnMaxima<T> columns;
    columns.add(x);
    const uint32_t total = columns.of_block(shared, at);
    if (thread < GROUP) {
        const Scale scale(p.out_dtype, total);
        const int64_t own = tile_col * GROUP + thread;
        arch::store_shared(of_cols + 4 * thread, scale.factor);
        if (own < p.k) {
            arch::store_global(p.scales_t + (tile_row * p.scale_stride_t + own), scale.scale);
        }
    }
    uint32_t most[UNITS];
#pragma unroll
    for (int u = 0; u < UNITS; ++u) most[u] = magnitude(x[u]);
    const GroupScales groups(p.out_dtype, most);
    if (laneid() % 2 == 0 && row + groups.own < p.m) {
        arch::store_global(p.scales + (tile_col * p.scale_stride + row + groups.own), groups.scale);
    }
#pragma unroll
    for (int u = 0; u < UNITS; ++u) factors[u] = groups.factors[u];
}
// The one factor of a tile.
template <class T>
__device__ __forceinline__ float find_factor(const Params& p, TileShared& shared,
                                             const Unit<T> (&x)[UNITS], int64_t tile_row,
                                             int64_t tile_col) {
    Largest<T> most;
#pragma unroll
    for (int u = 0; u < UNITS; ++u) most.add(x[u]);
    auto& block = reinterpret_cast<BlockShared&>(shared.cols);
    const Scale scale(p.out_dtype, largest_of_team(block, most.magnitude(), WARPS));
    if (threadIdx.x == 0) {
        arch::store_global(p.scales + (tile_row * p.scale_stride + tile_col), scale.scale);
        if (p.out_t != nullptr) {
            arch::store_global(p.scales_t + (tile_col * p.scale_stride_t + tile_row), scale.scale);
        }
    }
    return scale.factor;
}

// A tile of 128 x 128 elements; `whole` are those that nothing is missing of, aligned.
template <class T, Pass pass, class F, bool whole>
__device__ __forceinline__ void quantize_tile_as(const Params& p) {
    auto& shared = arch::static_shared<TileShared>();
    const InTile at;
    const int64_t across = (p.k + GROUP - 1) / GROUP;
    const int64_t tile_row = blockIdx.x / across, tile_col = blockIdx.x - tile_row * across;
    const int64_t row = tile_row * GROUP + at.eight * UNITS,
                  col = tile_col * GROUP + at.lane * UNIT;
    const uint32_t of_rows = arch::shared_address(&shared.factors[0][0]);
    const uint32_t of_cols = arch::shared_address(&shared.factors[1][0]);
    const int thread = static_cast<int>(threadIdx.x), in_half = thread % GROUP;
    Unit<T> x[UNITS];
    if constexpr (whole) {
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
            x[u] = load_aligned(static_cast<const T*>(p.x) + ((row + u) * p.stride + col));
        }
    } else {
        load_down(p, row, col, x);
    }

    // The factors of the rows, and, where the transpose has others, of the columns.
    float factor = 1.f, factors[UNITS];
    bool one_factor = pass == Pass::tile_block;
    if constexpr (pass == Pass::tile_row_block) {
        find_factors(p, shared, at, x, tile_row, tile_col, of_cols, factors);
    } else if constexpr (pass == Pass::tile_block) {
        factor = find_factor(p, shared, x, tile_row, tile_col);
    } else if (p.amax_cols == nullptr) {
        one_factor = true;
        const Scale scale = p.given != nullptr ? Scale(arch::load_global(p.given))
                                               : Scale(p.out_dtype, arch::load_global(p.amax));
        factor = scale.factor;
        if (blockIdx.x == 0 && thread == 0) {
            arch::store_global(p.scales, scale.scale);
            arch::store_global(p.scales_t, scale.scale);
        }
    } else {
        // A thread finds one of them: a division each is what takes time.
        const bool of_row = thread < GROUP;
        const int64_t own = (of_row ? tile_row : tile_col) * GROUP + in_half;
        const int64_t size = of_row ? p.m : p.k;
        const uint32_t* from = of_row ? p.amax : p.amax_cols;
        const Scale scale(p.out_dtype, arch::load_global(from + (own < size ? own : 0)));
        arch::store_shared((of_row ? of_rows : of_cols) + 4 * in_half, scale.factor);
        if ((of_row ? tile_col : tile_row) == 0 && own < size) {
            arch::store_global((of_row ? p.scales : p.scales_t) + own, scale.scale);
        }
        arch::sync_block();
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
            factors[u] = arch::load_shared<float>(of_rows + 4 * (at.eight * UNITS + u));
        }
    }

    uint2 codes[UNITS];
    const bool words = whole || p.k % UNIT == 0;
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
        const float f = one_factor ? factor : factors[u];
        codes[u] = encode_as<F>(x[u], [&](int) { return f; });
        if (whole || (words && row + u < p.m && col < p.k)) {
            auto* to = static_cast<uint8_t*>(p.out) + ((row + u) * p.k + col);
            arch::store_global(reinterpret_cast<uint2*>(to), codes[u]);
        }
    }
    const uint32_t staged = arch::shared_address(&shared.codes[0]);
    if (!words) store_staged(p, staged, at, codes, tile_row, tile_col);
    if (p.out_t == nullptr) return;
    // What warps have staged makes room for the transposed tile.
    if (!words) arch::sync_block();
    if (!one_factor) {
        if constexpr (pass == Pass::tile_row_block) arch::sync_block();
            // Not to keep all elements as floats for the second time.
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
#pragma unroll
            for (int i = 0; i < Unit<T>::words; ++i) arch::pin_register(x[u].w[i]);
        }
        float of_col[UNIT];
#pragma unroll
        for (int i = 0; i < UNIT; ++i) {
            of_col[i] = arch::load_shared<float>(of_cols + 4 * (at.lane * UNIT + i));
        }
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
            codes[u] = encode_as<F>(x[u], [&](int i) { return of_col[i]; });
        }
    }
    store_transposed<whole>(p, staged, codes, at, tile_row, tile_col);
}
template <class T, Pass pass, class F>
__device__ __forceinline__ void quantize_tile_as(const Params& p) {
    // With one factor, memory is the limit either way.
    if constexpr (pass != Pass::tile_block) {
        const uint32_t across = static_cast<uint32_t>((p.k + GROUP - 1) / GROUP);
        const bool whole = p.aligned && (blockIdx.x / across + 1) * int64_t{GROUP} <= p.m &&
                           (blockIdx.x % across + 1) * int64_t{GROUP} <= p.k;
        if (whole) return quantize_tile_as<T, pass, F, true>(p);
    }
    quantize_tile_as<T, pass, F, false>(p);
}
template <class T, Pass pass>
__device__ __forceinline__ void quantize_tile(const Params& p) {
    if (p.out_dtype == DType::e4m3)
        quantize_tile_as<T, pass, fp8e4m3>(p);
    else
        quantize_tile_as<T, pass, fp8e5m2>(p);
}

// x^T of bytes. The matrices of a batch follow each other in one dimension of the grid: the others
// end at 65535.
__device__ __forceinline__ void transpose_tile(const Params& p) {
    auto& shared = arch::static_shared<TileShared>();
    const int64_t across = (p.k + GROUP - 1) / GROUP;
    const int64_t matrix = blockIdx.x / static_cast<uint32_t>(p.blocks);
    const int64_t tile = blockIdx.x - matrix * p.blocks;
    const int64_t tile_row = tile / across, tile_col = tile - tile_row * across;
    const InTile at;
    const int64_t row = tile_row * GROUP + at.eight * UNITS,
                  col = tile_col * GROUP + at.lane * UNIT;
    const auto* x = static_cast<const uint8_t*>(p.x) + matrix * p.batch_stride;
    uint2 codes[UNITS];
    if (p.aligned) {
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
            const uint8_t* from = x + ((row + u) * p.stride + col);
            codes[u] = make_uint2(0, 0);
            if (row + u >= p.m || col >= p.k) continue;
            codes[u] = arch::load_global(reinterpret_cast<const uint2*>(from));
        }
    } else {
        const auto begin = reinterpret_cast<uint64_t>(x), pitch = static_cast<uint64_t>(p.stride);
        const gemm::sm90::Span span{begin,
                                    begin + static_cast<uint64_t>((p.m - 1) * p.stride + p.k)};
        const uint64_t at = begin + static_cast<uint64_t>(row * p.stride + col);
        const int rows = static_cast<int>(min(col < p.k ? p.m - row : 0, int64_t{UNITS}));
        const int count = static_cast<int>(min(p.k - col, int64_t{UNIT}));
        uint32_t words[UNITS][2];
        gemm::sm90::load_unaligned<UNIT, 1, UNITS>(
            span, rows, [&](int i) { return at + i * pitch; }, [&](int) { return count; },
            [&](int i) -> auto& { return words[i]; });
#pragma unroll
        for (int u = 0; u < UNITS; ++u) codes[u] = make_uint2(words[u][0], words[u][1]);
    }
    store_transposed<false>(p, arch::shared_address(&shared.codes[0]), codes, at, tile_row,
                            tile_col, matrix);
}

}  // namespace sm90
}  // namespace thunderkittens::fp8_quantize
