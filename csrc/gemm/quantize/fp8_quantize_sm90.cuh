// Quantisation to fp8: q = x * (MAX / amax) rounded to nearest even, scale = amax / MAX, where amax
// is the largest magnitude of the elements that share the scale, and MAX the largest value of the
// format.
//
// A thread keeps eight units of eight neighbouring elements in registers, loaded at once, so that x
// is read once and many loads are in flight. Along rows, a team of one to eight warps takes a row
// (longer ones, and those that begin at any element, are read twice, the second time from the
// caches); tiles of 128 x 128 are in fp8_quantize_tiles_sm90.cuh.
//
// Magnitudes are compared as the integers that their bits are: NaN is then larger than infinity,
// and finds its way to the scale.
#pragma once

#include "csrc/gemm/quantize/fp8_quantize_tiles_sm90.cuh"

namespace thunderkittens::fp8_quantize {
namespace sm90 {

// Along rows, by a team of TEAM warps for each. Where they are not aligned, codes pass through
// shared memory, in which a warp has room for what it makes at once.
struct RowShared {
    BlockShared block;
    uint2 codes[WARPS][UNITS][WARP_THREADS];
};
template <class T, Pass pass, class F, int TEAM, bool aligned>
__device__ __forceinline__ void quantize_rows_of(const Params& p, RowShared& shared, int64_t row) {
    constexpr int lanes = TEAM * WARP_THREADS, chunk = lanes * UNITS;
    const int units = static_cast<int>((p.k + (aligned ? 0 : UNIT - 1)) / UNIT);
    const int first = static_cast<int>(threadIdx.x) % lanes;
    const bool there = row < p.m;
    const T* from = static_cast<const T*>(p.x) + ((there ? row : 0) * p.stride + first * UNIT);
    uint8_t* to = static_cast<uint8_t*>(p.out) + (row * p.k + first * UNIT);
    Unit<T> x[UNITS];
    const auto load = [&](int begin) {
        if constexpr (!aligned) {
            constexpr int at_once = pass == Pass::given ? 1 : 2;
            return load_unaligned_row<lanes, at_once>(p, row, (int64_t{begin} + first) * UNIT, x);
        }
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
            x[u] = Unit<T>{};
            if (begin + first + u * lanes < units) {
                x[u] = load_aligned(from + (int64_t{begin} + u * lanes) * UNIT);
            }
        }
    };
    float factor = 1.f;
    if constexpr (pass == Pass::given) {
        factor = factor_of_matrix(p);
    } else if constexpr (pass == Pass::row) {
        Largest<T> largest;
        for (int begin = 0; begin < units; begin += chunk) {
            load(begin);
#pragma unroll
            for (int u = 0; u < UNITS; ++u) largest.add(x[u]);
        }
        const Scale scale(p.out_dtype, largest_of_team(shared.block, largest.magnitude(), TEAM));
        factor = scale.factor;
        if (first == 0 && there) arch::store_global(p.scales + row, scale.scale);
    }
    for (int begin = 0; begin < units; begin += chunk) {
        // Where rows begin at any element, registers do not suffice for keeping them. L1 has them.
        if (!aligned || pass != Pass::row || units > chunk) load(begin);
        float factors[UNITS];
        if constexpr (pass == Pass::row_block) {
            uint32_t most[UNITS];
#pragma unroll
            for (int u = 0; u < UNITS; ++u) most[u] = magnitude(x[u]);
            const GroupScales groups(p.out_dtype, most);
            const int unit = begin + (first & ~(LANES - 1)) + groups.own * lanes;
            if (laneid() % 2 == 0 && unit < units && there) {
                arch::store_global(p.scales + (unit / LANES * p.scale_stride + row), groups.scale);
            }
#pragma unroll
            for (int u = 0; u < UNITS; ++u) factors[u] = groups.factors[u];
        }
        const auto codes_of = [&](int u) {
            const float f = pass == Pass::row_block ? factors[u] : factor;
            return encode_as<F>(x[u], [&](int) { return f; });
        };
        if constexpr (aligned) {
#pragma unroll
            for (int u = 0; u < UNITS; ++u) {
                if (begin + first + u * lanes < units && there) {
                    arch::store_global(
                        reinterpret_cast<uint2*>(to + (int64_t{begin} + u * lanes) * UNIT),
                        codes_of(u));
                }
            }
        } else {
            constexpr int BYTES = WARP_THREADS * UNIT;
            const uint32_t staged = arch::shared_address(&shared.codes[warpid()][0][0]);
            arch::sync_warp();
#pragma unroll
            for (int u = 0; u < UNITS; ++u) {
                arch::store_shared(staged + u * BYTES + laneid() * UNIT, codes_of(u));
            }
            arch::sync_warp();
            const int64_t col = (int64_t{begin} + first - laneid()) * UNIT;
#pragma unroll 1
            for (int u = 0; u < UNITS; ++u) {
                const int64_t at = col + u * lanes * UNIT;
                if (at >= p.k || !there) break;
                gemm::sm90::store_unaligned<BYTES>(static_cast<uint8_t*>(p.out) + (row * p.k + at),
                                                   staged + u * BYTES, 0,
                                                   static_cast<int>(min(p.k - at, int64_t{BYTES})));
            }
        }
    }
}

template <class T, Pass pass, class F>
__device__ __forceinline__ void quantize_rows_as(const Params& p, RowShared& shared, int team) {
    const int rows = WARPS / team;  // of a block
    if (!p.aligned && team > 1) {
        // One after the other, by all of the block: fewer variants.
        for (int64_t i = 0; i < rows; ++i) {
            quantize_rows_of<T, pass, F, WARPS, false>(p, shared, int64_t{blockIdx.x} * rows + i);
        }
        return;
    }
    const int64_t row = int64_t{blockIdx.x} * rows + warpid() / team;
    if (!p.aligned) return quantize_rows_of<T, pass, F, 1, false>(p, shared, row);
    switch (team) {
        case 1: return quantize_rows_of<T, pass, F, 1, true>(p, shared, row);
        case 2: return quantize_rows_of<T, pass, F, 2, true>(p, shared, row);
        case 4: return quantize_rows_of<T, pass, F, 4, true>(p, shared, row);
        default: return quantize_rows_of<T, pass, F, 8, true>(p, shared, row);
    }
}
template <class T, Pass pass>
__device__ __forceinline__ void quantize_rows(const Params& p) {
    auto& shared = arch::static_shared<RowShared>();
    const int64_t units = (p.k + UNIT - 1) / UNIT;
    int team = 1;
    while (team < WARPS && units > int64_t{team} * WARP_THREADS * UNITS) team *= 2;
    if (p.out_dtype == DType::e4m3)
        quantize_rows_as<T, pass, fp8e4m3>(p, shared, team);
    else
        quantize_rows_as<T, pass, fp8e5m2>(p, shared, team);
}

// The largest magnitude of all of x, the last rows first: what the pass that follows reads first is
// then still in the L2 cache.
template <class T>
__device__ __forceinline__ void find_amax(const Params& p) {
    auto& shared = arch::static_shared<BlockShared>();
    const int64_t across = (p.k + UNIT - 1) / UNIT;
    Largest<T> most;
    // A block takes whole rows, or where there are few, parts of them.
    const int64_t parts = (across + THREADS * UNITS - 1) / (THREADS * UNITS);
    for (int64_t i = blockIdx.x; i < p.m * parts; i += gridDim.x) {
        const int64_t row = p.m - 1 - i / parts, first = i % parts * THREADS * UNITS;
        Unit<T> x[UNITS];
        const int64_t col = (first + threadIdx.x) * UNIT;
        if (p.aligned) {
            const T* from = static_cast<const T*>(p.x) + (row * p.stride + col);
#pragma unroll
            for (int u = 0; u < UNITS; ++u) {
                x[u] = Unit<T>{};
                if (col + u * (THREADS * UNIT) < p.k) {
                    x[u] = load_aligned(from + u * (THREADS * UNIT));
                }
            }
        } else {
            load_unaligned_row<THREADS>(p, row, col, x);
        }
#pragma unroll
        for (int u = 0; u < UNITS; ++u) most.add(x[u]);
    }
    const uint32_t total = largest_of_team(shared, most.magnitude(), WARPS);
    if (threadIdx.x == 0) arch::reduce_max_global(p.amax, total);
}

// Blocks of an SM that the registers must suffice for, so that enough loads are in flight. fp16
// with factors of rows and of columns would spill a register with three; scales of rows would with
// four, where rows begin at any element; and conversions without instructions with three.
template <class T, Pass pass, bool portable>
constexpr int MIN_BLOCKS = sizeof(T) == 4                                            ? 1
                           : portable && pass == Pass::tile_given                    ? 1
                           : portable && pass == Pass::tile_row_block                ? 2
                           : pass == Pass::tile_row_block && std::is_same_v<T, half> ? 2
                           : pass == Pass::tile_row_block || pass == Pass::tile_given ||
                                   pass == Pass::row || pass == Pass::row_block
                               ? 3
                               : 4;

template <class T, Pass pass, bool portable>
__global__ __launch_bounds__(THREADS, (MIN_BLOCKS<T, pass, portable>)) void fp8_quantize_kernel(
    const __grid_constant__ Params p) {
    if constexpr (pass == Pass::amax)
        find_amax<T>(p);
    else if constexpr (pass == Pass::given || pass == Pass::row || pass == Pass::row_block)
        quantize_rows<T, pass>(p);
    else if constexpr (pass == Pass::amax_lines)
        find_lines<T>(p);
    else if constexpr (pass == Pass::transpose)
        transpose_tile(p);
    else
        quantize_tile<T, pass>(p);
}

}  // namespace sm90

template <Config C>
void launch(const Params& params, Stream stream) {
    kittens::launch(sm90::fp8_quantize_kernel<sm90::element<C.dtype>, C.pass, C.portable>,
                    dim3(static_cast<unsigned>(int64_t{params.blocks} * params.batches)),
                    dim3(THREADS), dim3(1), 0, stream, params);
}

}  // namespace thunderkittens::fp8_quantize
