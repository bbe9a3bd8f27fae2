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

#include "csrc/gemm/fp8_quantize.h"
#include "kittens/kittens.cuh"

namespace thunderkittens::fp8_quantize {
namespace sm90 {

using namespace kittens;

constexpr int UNIT = 8, UNITS = 8, WARPS = THREADS / WARP_THREADS;
constexpr int LANES = GROUP / UNIT;  // that share a row of a tile

template <DType dtype>
using element = std::conditional_t<dtype == DType::fp32, float,
                                   std::conditional_t<dtype == DType::bf16, bf16, half>>;

template <class T>
struct alignas(16) Unit {
    T v[UNIT];
};

template <class T>
__device__ __forceinline__ Unit<T> load_unit(const Params& p, int64_t row, int64_t col) {
    Unit<T> unit{};
    const T* from = static_cast<const T*>(p.x) + (row * p.stride + col);
    if (row >= p.m) return unit;
    if (p.aligned) {
        if (col >= p.k) return unit;
        constexpr int words = int(sizeof(unit)) / 16;
        auto& to = reinterpret_cast<uint4(&)[words]>(unit);
#pragma unroll
        for (int i = 0; i < words; ++i) {
            to[i] = arch::load_global(reinterpret_cast<const uint4*>(from) + i);
        }
    } else {
#pragma unroll
        for (int i = 0; i < UNIT; ++i) {
            if (col + i < p.k) unit.v[i] = arch::load_global(from + i);
        }
    }
    return unit;
}

__device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }
template <class T>
__device__ __forceinline__ uint32_t magnitude(T x) {
    return arch::bit_cast<uint32_t>(convert<float>(x)) & 0x7fffffffu;
}
template <class T>
__device__ __forceinline__ uint32_t magnitude(const Unit<T>& unit) {
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < UNIT; ++i) most = larger(most, magnitude(unit.v[i]));
    return most;
}
template <int lanes>
__device__ __forceinline__ uint32_t largest_of_lanes(uint32_t x) {
#pragma unroll
    for (int i = 1; i < lanes; i *= 2) x = larger(x, arch::shuffle_xor(x, i));
    return x;
}

// The scale of a group and the factor that its elements are multiplied with. Smaller magnitudes
// than 2^-110 count as that: the factor is finite.
struct Scale {
    float scale, factor;
    __device__ __forceinline__ Scale(DType format, uint32_t amax_bits) {
        const float limit = format == DType::e4m3 ? 448.f : 57344.f;
        const float x = arch::bit_cast<float>(amax_bits);
        const float amax = x < 0x1p-110f ? 0x1p-110f : x;
        scale = amax / limit;
        factor = limit / amax;
    }
    __device__ __forceinline__ explicit Scale(float given) : scale(given), factor(1.f / given) {}
};

template <class F, class T, class Factor>
__device__ __forceinline__ uint2 encode_as(const Unit<T>& unit, Factor factor) {
    uint32_t words[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float f[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) f[j] = convert<float>(unit.v[4 * i + j]) * factor(4 * i + j);
        words[i] = arch::bit_cast<uint32_t>(packed_type<F>(make_float4(f[0], f[1], f[2], f[3])));
    }
    return make_uint2(words[0], words[1]);
}
// factor(i) multiplies element i.
template <class T, class Factor>
__device__ __forceinline__ uint2 encode(DType format, const Unit<T>& unit, Factor factor) {
    if (format == DType::e4m3) return encode_as<fp8e4m3>(unit, factor);
    return encode_as<fp8e5m2>(unit, factor);
}

__device__ __forceinline__ void store_codes(const Params& p, int64_t row, int64_t col,
                                            uint2 codes) {
    uint8_t* to = static_cast<uint8_t*>(p.out) + (row * p.k + col);
    if (row >= p.m) return;
    if (p.aligned) {
        if (col < p.k) arch::store_global(reinterpret_cast<uint2*>(to), codes);
    } else {
#pragma unroll
        for (int i = 0; i < UNIT; ++i) {
            const uint32_t word = i < 4 ? codes.x : codes.y;
            if (col + i < p.k) arch::store_global(to + i, uint8_t(word >> (8 * (i % 4))));
        }
    }
}

struct BlockShared {
    uint32_t warps[WARPS];
};

// The largest of a team's values; teams are `warps` warps of the block.
__device__ __forceinline__ uint32_t largest_of_team(BlockShared& shared, uint32_t x, int warps) {
    x = largest_of_lanes<WARP_THREADS>(x);
    if (warps == 1) return x;
    const uint32_t first = arch::shared_address(&shared.warps[0]);
    arch::sync_block();
    if (laneid() == 0) arch::store_shared(first + 4 * warpid(), x);
    arch::sync_block();
    const int begin = warpid() / warps * warps;
    for (int i = 0; i < warps; ++i) {
        x = larger(x, arch::load_shared<uint32_t>(first + 4 * (begin + i)));
    }
    return x;
}

// Along rows.
template <class T, Pass pass>
__device__ __forceinline__ void quantize_rows(const Params& p) {
    auto& shared = arch::static_shared<BlockShared>();
    const int64_t units = (p.k + UNIT - 1) / UNIT;
    int team = 1;
    while (team < WARPS && units > int64_t{team} * WARP_THREADS * UNITS) team *= 2;
    const int lanes = team * WARP_THREADS;
    const int64_t row = int64_t{blockIdx.x} * (WARPS / team) + warpid() / team;
    const int64_t chunk = int64_t{lanes} * UNITS;
    const int first = static_cast<int>(threadIdx.x) % lanes;
    Unit<T> x[UNITS];
    const auto load = [&](int64_t begin) {
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
            x[u] = load_unit<T>(p, row, (begin + first + u * lanes) * UNIT);
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
        uint32_t most = 0;
        for (int64_t begin = 0; begin < units; begin += chunk) {
            load(begin);
#pragma unroll
            for (int u = 0; u < UNITS; ++u) most = larger(most, magnitude(x[u]));
        }
        const Scale scale(p.out_dtype, largest_of_team(shared, most, team));
        factor = scale.factor;
        if (first == 0 && row < p.m) arch::store_global(p.scales + row, scale.scale);
    }
    for (int64_t begin = 0; begin < units; begin += chunk) {
        if (pass != Pass::row || units > chunk) load(begin);
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
            const int64_t col = (begin + first + u * lanes) * UNIT;
            if constexpr (pass == Pass::row_block) {
                const Scale scale(p.out_dtype, largest_of_lanes<LANES>(magnitude(x[u])));
                factor = scale.factor;
                if (col % GROUP == 0 && col < p.k && row < p.m) {
                    arch::store_global(p.scales + (col / GROUP * p.scale_stride + row),
                                       scale.scale);
                }
            }
            if (col < p.k) {
                store_codes(p, row, col, encode(p.out_dtype, x[u], [&](int) { return factor; }));
            }
        }
    }
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
        uint32_t most[UNIT];
#pragma unroll
        for (int i = 0; i < UNIT; ++i) {
            most[i] = 0;
#pragma unroll
            for (int u = 0; u < UNITS; ++u) most[i] = larger(most[i], magnitude(x[u].v[i]));
            most[i] = larger(most[i], arch::shuffle_xor(most[i], LANES));
            if (laneid() < LANES) {
                arch::store_shared(cols_base + 4 * (warpid() * GROUP + lane * UNIT + i), most[i]);
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
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
            const Scale scale(p.out_dtype, largest_of_lanes<LANES>(magnitude(x[u])));
            of_row[u] = scale.factor;
            if (lane == 0 && row + u < p.m) {
                arch::store_global(p.scales + (tile_col * p.scale_stride + row + u), scale.scale);
            }
        }
#pragma unroll
        for (int i = 0; i < UNIT; ++i) {
            of_col[i] = arch::load_shared<float>(cols_base + 4 * (lane * UNIT + i));
        }
    } else if constexpr (pass == Pass::tile_block) {
        uint32_t most = 0;
#pragma unroll
        for (int u = 0; u < UNITS; ++u) most = larger(most, magnitude(x[u]));
        auto& block = reinterpret_cast<BlockShared&>(shared.cols);
        const Scale scale(p.out_dtype, largest_of_team(block, most, WARPS));
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
    const int64_t across = (p.k + UNIT - 1) / UNIT, units = p.m * across;
    const int64_t step = int64_t{gridDim.x} * THREADS;
    uint32_t most = 0;
    for (int64_t begin = int64_t{blockIdx.x} * THREADS + threadIdx.x; begin < units;
         begin += step * UNITS) {
        Unit<T> x[UNITS];
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
            const int64_t unit = units - 1 - (begin + u * step);
            const int64_t row = unit < 0 ? p.m : unit / across;
            x[u] = load_unit<T>(p, row, (unit - row * across) * UNIT);
        }
#pragma unroll
        for (int u = 0; u < UNITS; ++u) most = larger(most, magnitude(x[u]));
    }
    most = largest_of_team(shared, most, WARPS);
    if (threadIdx.x == 0) arch::reduce_max_global(p.amax, most);
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

template <class T, Pass pass>
__global__ __launch_bounds__(THREADS) void fp8_quantize_kernel(const __grid_constant__ Params p) {
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
