// Quantisation to fp8: q = x * (MAX / amax) rounded to nearest even, scale = amax / MAX, where amax
// is the largest magnitude of the elements that share the scale, and MAX the largest value of the
// format.
//
// A thread keeps eight units of eight neighbouring elements in registers, loaded at once, so that x
// is read once and many loads are in flight. Along rows, a team of one to eight warps takes a row
// (longer ones are read twice, the second time from the caches). In tiles of 128 x 128, a thread's
// units are eight rows of the same eight columns: it transposes them in registers, and the block
// writes the columns in lines of 128 bytes, through shared memory.
//
// Magnitudes are compared as the integers that their bits are: NaN is then larger than infinity,
// and finds its way to the scale.
#pragma once

#include "csrc/gemm/fp8_quantize_units_sm90.cuh"

namespace thunderkittens::fp8_quantize {
namespace sm90 {

// Along rows, by a team of TEAM warps for each.
template <class T, Pass pass, class F, int TEAM>
__device__ __forceinline__ void quantize_aligned_rows(const Params& p, BlockShared& shared) {
    constexpr int lanes = TEAM * WARP_THREADS, chunk = lanes * UNITS;
    const int units = static_cast<int>(p.k / UNIT);
    const int64_t row = int64_t{blockIdx.x} * (WARPS / TEAM) + warpid() / TEAM;
    const int first = static_cast<int>(threadIdx.x) % lanes;
    const bool there = row < p.m;
    const T* from = static_cast<const T*>(p.x) + ((there ? row : 0) * p.stride + first * UNIT);
    uint8_t* to = static_cast<uint8_t*>(p.out) + (row * p.k + first * UNIT);
    Unit<T> x[UNITS];
    const auto load = [&](int begin) {
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
        const Scale scale = p.given != nullptr ? Scale(arch::load_global(p.given))
                                               : Scale(p.out_dtype, arch::load_global(p.amax));
        factor = scale.factor;
        if (blockIdx.x == 0 && threadIdx.x == 0) {
            arch::store_global(p.scales, scale.scale);
            if (p.scales_t != nullptr) arch::store_global(p.scales_t, scale.scale);
        }
    } else if constexpr (pass == Pass::row) {
        Largest<T> largest;
        for (int begin = 0; begin < units; begin += chunk) {
            load(begin);
#pragma unroll
            for (int u = 0; u < UNITS; ++u) largest.add(x[u]);
        }
        const Scale scale(p.out_dtype, largest_of_team(shared, largest.magnitude(), TEAM));
        factor = scale.factor;
        if (first == 0 && there) arch::store_global(p.scales + row, scale.scale);
    }
    for (int begin = 0; begin < units; begin += chunk) {
        if (pass != Pass::row || units > chunk) load(begin);
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
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
            if (begin + first + u * lanes < units && there) {
                const float f = pass == Pass::row_block ? factors[u] : factor;
                arch::store_global(
                    reinterpret_cast<uint2*>(to + (int64_t{begin} + u * lanes) * UNIT),
                    encode_as<F>(x[u], [&](int) { return f; }));
            }
        }
    }
}

// The same for any alignment, element by element.
template <class T, Pass pass>
__device__ __forceinline__ void quantize_any_rows(const Params& p, BlockShared& shared, int team) {
    const int lanes = team * WARP_THREADS;
    const int64_t units = (p.k + UNIT - 1) / UNIT, whole = (units + lanes - 1) / lanes * lanes;
    const int64_t row = int64_t{blockIdx.x} * (WARPS / team) + warpid() / team;
    const int first = static_cast<int>(threadIdx.x) % lanes;
    float factor = 1.f;
    if constexpr (pass == Pass::given) {
        const Scale scale = p.given != nullptr ? Scale(arch::load_global(p.given))
                                               : Scale(p.out_dtype, arch::load_global(p.amax));
        factor = scale.factor;
        if (blockIdx.x == 0 && threadIdx.x == 0) {
            arch::store_global(p.scales, scale.scale);
            if (p.scales_t != nullptr) arch::store_global(p.scales_t, scale.scale);
        }
    } else if constexpr (pass == Pass::row) {
        Largest<T> largest;
        for (int64_t i = first; i < units; i += lanes) {
            largest.add(load_unit<T>(p, row, i * UNIT));
        }
        const Scale scale(p.out_dtype, largest_of_team(shared, largest.magnitude(), team));
        factor = scale.factor;
        if (first == 0 && row < p.m) arch::store_global(p.scales + row, scale.scale);
    }
    for (int64_t i = first; i < whole; i += lanes) {
        const Unit<T> x = load_unit<T>(p, row, i * UNIT);
        if constexpr (pass == Pass::row_block) {
            const Scale scale(p.out_dtype, largest_of_lanes<LANES>(magnitude(x)));
            factor = scale.factor;
            if (i % LANES == 0 && i < units && row < p.m) {
                arch::store_global(p.scales + (i / LANES * p.scale_stride + row), scale.scale);
            }
        }
        if (i < units) {
            store_codes(p, row, i * UNIT, encode(p.out_dtype, x, [&](int) { return factor; }));
        }
    }
}

template <class T, Pass pass, class F>
__device__ __forceinline__ void quantize_rows_as(const Params& p, BlockShared& shared, int team) {
    switch (team) {
        case 1: return quantize_aligned_rows<T, pass, F, 1>(p, shared);
        case 2: return quantize_aligned_rows<T, pass, F, 2>(p, shared);
        case 4: return quantize_aligned_rows<T, pass, F, 4>(p, shared);
        default: return quantize_aligned_rows<T, pass, F, 8>(p, shared);
    }
}
template <class T, Pass pass>
__device__ __forceinline__ void quantize_rows(const Params& p) {
    auto& shared = arch::static_shared<BlockShared>();
    const int64_t units = (p.k + UNIT - 1) / UNIT;
    int team = 1;
    while (team < WARPS && units > int64_t{team} * WARP_THREADS * UNITS) team *= 2;
    if (!p.aligned)
        quantize_any_rows<T, pass>(p, shared, team);
    else if (p.out_dtype == DType::e4m3)
        quantize_rows_as<T, pass, fp8e4m3>(p, shared, team);
    else
        quantize_rows_as<T, pass, fp8e5m2>(p, shared, team);
}

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
    uint8_t codes[GROUP * GROUP];
};

// Where eight rows (`eight` of 16) of a column lie in shared memory: 16 bytes are permuted with the
// column, and their halves swapped, so that no two lanes of a half warp meet in a bank.
__device__ __forceinline__ uint32_t place_of(uint32_t base, int col, int eight) {
    const int chunk = eight / 2 ^ (col / UNIT) % 8, half = (eight ^ col / 64) & 1;
    return base + col * GROUP + chunk * 16 + half * 8;
}

// Writes the columns of a tile as rows of x^T: `codes` are eight rows of this thread's eight
// columns.
__device__ __forceinline__ void store_transposed(const Params& p, uint32_t codes_base,
                                                 const uint2 (&codes)[UNITS], int lane, int eight,
                                                 int64_t tile_row, int64_t tile_col) {
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
            arch::store_shared(place_of(codes_base, lane * UNIT + half * 4 + i, eight),
                               make_uint2(top[i], bottom[i]));
        }
    }
    arch::sync_block();
#pragma unroll
    for (int i = 0; i < GROUP * GROUP / 16 / THREADS; ++i) {
        const int index = i * THREADS + static_cast<int>(threadIdx.x);
        const int c = index / LANES * 2 % GROUP + index / 8 % 2, chunk = index % 8;
        const int64_t to_col = tile_col * GROUP + c, to_row = tile_row * GROUP + chunk * 16;
        if (to_col >= p.k || to_row >= p.m) continue;
        const uint2 low = arch::load_shared<uint2>(place_of(codes_base, c, 2 * chunk));
        const uint2 high = arch::load_shared<uint2>(place_of(codes_base, c, 2 * chunk + 1));
        uint8_t* to = static_cast<uint8_t*>(p.out_t) +
                      ((int64_t{blockIdx.y} * p.k + to_col) * p.pitch_t + to_row);
        if (p.pitch_t % 16 == 0) {
            arch::store_global(reinterpret_cast<uint4*>(to),
                               make_uint4(low.x, low.y, high.x, high.y));
        } else {
            const uint32_t words[4] = {low.x, low.y, high.x, high.y};
#pragma unroll
            for (int j = 0; j < 16; ++j) {
                if (to_row + j < p.m) {
                    arch::store_global(to + j, uint8_t(words[j / 4] >> (8 * (j % 4))));
                }
            }
        }
    }
}

// A tile of 128 x 128 elements.
template <class T, Pass pass>
__device__ __forceinline__ void quantize_tile(const Params& p) {
    auto& shared = arch::static_shared<TileShared>();
    const int64_t across = (p.k + GROUP - 1) / GROUP;
    const int64_t tile_row = blockIdx.x / across, tile_col = blockIdx.x - tile_row * across;
    const int lane = laneid() % LANES, eight = warpid() * 2 + laneid() / LANES;
    const int64_t row = tile_row * GROUP + eight * UNITS, col = tile_col * GROUP + lane * UNIT;
    const uint32_t cols_base = arch::shared_address(&shared.cols[0][0]);
    const uint32_t codes_base = arch::shared_address(&shared.codes[0]);
    Unit<T> x[UNITS];
#pragma unroll
    for (int u = 0; u < UNITS; ++u) x[u] = load_unit<T>(p, row + u, col);

    // Largest magnitudes of this thread's columns, and of the tile's.
    constexpr bool by_columns = pass == Pass::tile_row_block || pass == Pass::amax_lines;
    if constexpr (by_columns) {
        // A lane's eight columns, 16-bit ones in pairs.
        Largest<T> most[Unit<T>::words];
#pragma unroll
        for (int i = 0; i < Unit<T>::words; ++i) {
#pragma unroll
            for (int u = 0; u < UNITS; ++u) most[i].add(x[u].w[i]);
            most[i].add(arch::shuffle_xor(most[i].bits, LANES));
            if (laneid() < LANES) {
                constexpr int each = UNIT / Unit<T>::words;
#pragma unroll
                for (int e = 0; e < each; ++e) {
                    const uint32_t element = each == 1 ? most[i].bits
                                             : e == 0  ? most[i].bits & 0xffffu
                                                       : most[i].bits >> 16;
                    arch::store_shared(
                        cols_base + 4 * (warpid() * GROUP + lane * UNIT + i * each + e),
                        Largest<T>::as_float(element));
                }
            }
        }
        arch::sync_block();
        if (threadIdx.x < GROUP) {
            uint32_t total = 0;
            for (int w = 0; w < WARPS; ++w) {
                total = larger(total, arch::load_shared<uint32_t>(
                                          cols_base + 4 * (w * GROUP + int(threadIdx.x))));
            }
            const int64_t at = tile_col * GROUP + threadIdx.x;
            if constexpr (pass == Pass::amax_lines) {
                if (at < p.k) arch::reduce_max_global(p.amax_cols + at, total);
            } else {
                const Scale scale(p.out_dtype, total);
                arch::store_shared(cols_base + 4 * int(threadIdx.x), scale.factor);
                if (at < p.k) {
                    arch::store_global(p.scales_t + (tile_row * p.scale_stride_t + at),
                                       scale.scale);
                }
            }
        }
        if constexpr (pass == Pass::amax_lines) {
#pragma unroll
            for (int u = 0; u < UNITS; ++u) {
                const uint32_t most_of_row = largest_of_lanes<LANES>(magnitude(x[u]));
                if (lane == 0 && row + u < p.m) {
                    arch::reduce_max_global(p.amax + (row + u), most_of_row);
                }
            }
            return;
        }
        arch::sync_block();
    }

    // The factors of this thread's rows, and, where the transpose has others, of its columns.
    float of_row[UNITS], of_col[UNIT];
    bool same = true;
    if constexpr (pass == Pass::tile_row_block) {
        same = false;
        uint32_t most[UNITS];
#pragma unroll
        for (int u = 0; u < UNITS; ++u) most[u] = magnitude(x[u]);
        const GroupScales groups(p.out_dtype, most);
        if (laneid() % 2 == 0 && row + groups.own < p.m) {
            arch::store_global(p.scales + (tile_col * p.scale_stride + row + groups.own),
                               groups.scale);
        }
#pragma unroll
        for (int u = 0; u < UNITS; ++u) of_row[u] = groups.factors[u];
#pragma unroll
        for (int i = 0; i < UNIT; ++i) {
            of_col[i] = arch::load_shared<float>(cols_base + 4 * (lane * UNIT + i));
        }
    } else if constexpr (pass == Pass::tile_block) {
        Largest<T> most;
#pragma unroll
        for (int u = 0; u < UNITS; ++u) most.add(x[u]);
        auto& block = reinterpret_cast<BlockShared&>(shared.cols);
        const Scale scale(p.out_dtype, largest_of_team(block, most.magnitude(), WARPS));
#pragma unroll
        for (int u = 0; u < UNITS; ++u) of_row[u] = scale.factor;
        if (threadIdx.x == 0) {
            arch::store_global(p.scales + (tile_row * p.scale_stride + tile_col), scale.scale);
            if (p.out_t != nullptr) {
                arch::store_global(p.scales_t + (tile_col * p.scale_stride_t + tile_row),
                                   scale.scale);
            }
        }
    } else {
        same = p.amax_cols == nullptr;
        if (same) {
            const Scale scale = p.given != nullptr ? Scale(arch::load_global(p.given))
                                                   : Scale(p.out_dtype, arch::load_global(p.amax));
#pragma unroll
            for (int u = 0; u < UNITS; ++u) of_row[u] = scale.factor;
            if (blockIdx.x == 0 && threadIdx.x == 0) {
                arch::store_global(p.scales, scale.scale);
                arch::store_global(p.scales_t, scale.scale);
            }
        } else {
#pragma unroll
            for (int u = 0; u < UNITS; ++u) {
                const int64_t at = row + u < p.m ? row + u : 0;
                const Scale scale(p.out_dtype, arch::load_global(p.amax + at));
                of_row[u] = scale.factor;
                if (col == 0 && row + u < p.m) arch::store_global(p.scales + row + u, scale.scale);
            }
#pragma unroll
            for (int i = 0; i < UNIT; ++i) {
                const int64_t at = col + i < p.k ? col + i : 0;
                const Scale scale(p.out_dtype, arch::load_global(p.amax_cols + at));
                of_col[i] = scale.factor;
                if (row == 0 && col + i < p.k) {
                    arch::store_global(p.scales_t + col + i, scale.scale);
                }
            }
        }
    }

    uint2 codes[UNITS];
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
        codes[u] = encode(p.out_dtype, x[u], [&](int) { return of_row[u]; });
        store_codes(p, row + u, col, codes[u]);
    }
    if (p.out_t == nullptr) return;
    if (!same) {
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
            codes[u] = encode(p.out_dtype, x[u], [&](int i) { return of_col[i]; });
        }
    }
    store_transposed(p, codes_base, codes, lane, eight, tile_row, tile_col);
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
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
            x[u] = load_unit<T>(p, row, (first + u * THREADS + threadIdx.x) * UNIT);
        }
#pragma unroll
        for (int u = 0; u < UNITS; ++u) most.add(x[u]);
    }
    const uint32_t total = largest_of_team(shared, most.magnitude(), WARPS);
    if (threadIdx.x == 0) arch::reduce_max_global(p.amax, total);
}

// x^T of bytes.
__device__ __forceinline__ void transpose_tile(const Params& p) {
    auto& shared = arch::static_shared<TileShared>();
    const int64_t across = (p.k + GROUP - 1) / GROUP;
    const int64_t tile_row = blockIdx.x / across, tile_col = blockIdx.x - tile_row * across;
    const int lane = laneid() % LANES, eight = warpid() * 2 + laneid() / LANES;
    const int64_t row = tile_row * GROUP + eight * UNITS, col = tile_col * GROUP + lane * UNIT;
    const auto* x = static_cast<const uint8_t*>(p.x) + int64_t{blockIdx.y} * p.batch_stride;
    uint2 codes[UNITS];
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
        const uint8_t* from = x + ((row + u) * p.stride + col);
        codes[u] = make_uint2(0, 0);
        if (row + u >= p.m) continue;
        if (p.aligned) {
            if (col < p.k) codes[u] = arch::load_global(reinterpret_cast<const uint2*>(from));
        } else {
            uint32_t words[2] = {0, 0};
#pragma unroll
            for (int i = 0; i < UNIT; ++i) {
                if (col + i < p.k) {
                    words[i / 4] |= uint32_t{arch::load_global(from + i)} << (8 * (i % 4));
                }
            }
            codes[u] = make_uint2(words[0], words[1]);
        }
    }
    store_transposed(p, arch::shared_address(&shared.codes[0]), codes, lane, eight, tile_row,
                     tile_col);
}

// Blocks of an SM that the registers must suffice for, so that enough loads are in flight.
template <class T, Pass pass>
constexpr int MIN_BLOCKS = sizeof(T) == 4                                             ? 1
                           : pass == Pass::tile_row_block || pass == Pass::tile_given ? 2
                                                                                      : 4;

template <class T, Pass pass>
__global__ __launch_bounds__(THREADS, MIN_BLOCKS<T, pass>) void fp8_quantize_kernel(
    const __grid_constant__ Params p) {
    if constexpr (pass == Pass::amax)
        find_amax<T>(p);
    else if constexpr (pass == Pass::given || pass == Pass::row || pass == Pass::row_block)
        quantize_rows<T, pass>(p);
    else if constexpr (pass == Pass::transpose)
        transpose_tile(p);
    else
        quantize_tile<T, pass>(p);
}

}  // namespace sm90

template <Config C>
void launch(const Params& params, Stream stream) {
    kittens::launch(sm90::fp8_quantize_kernel<sm90::element<C.dtype>, C.pass>,
                    dim3(params.blocks, params.batches), dim3(THREADS), dim3(1), 0, stream, params);
}

}  // namespace thunderkittens::fp8_quantize
