// Rotary embedding. A thread has eight pairs of a token, or sixteen elements that stay as they are,
// of a few heads: it loads all of them at once, 128 bytes, and cosines and sines once for them all.
// The table of positions is small and comes from L1 and L2; x is read and written once.
#pragma once

#include "csrc/norm/unit.cuh"
#include "csrc/rotary/rotary.h"

namespace thunderkittens::rotary {
namespace sm90 {

namespace arch = kittens::arch;
using norm::UNIT;
using norm::sm90::load_unit;
using norm::sm90::rounded;
using norm::sm90::store_unit;
using norm::sm90::Unit;
static_assert(UNIT == PAIRS);

// Which units a thread has: of a token of a sequence, from `head` on.
struct Place {
    int64_t batch, token;
    int slot, head;

    __device__ __forceinline__ Place(const Params& p, int heads) {
        const int64_t index = int64_t{blockIdx.x} * THREADS + threadIdx.x;
        if (p.narrow) {
            uint32_t rest = static_cast<uint32_t>(index);
            slot = static_cast<int>(next(rest, p.slots));
            const uint32_t low = next(rest, p.tokens);
            head = static_cast<int>(next(rest, p.chunks)) * heads;
            token = int64_t{next(rest, p.groups)} * p.tokens.value + low;
            batch = rest;
        } else {
            int64_t rest = index;
            slot = static_cast<int>(next(rest, p.slots.value));
            const int64_t low = next(rest, p.tokens.value);
            head = static_cast<int>(next(rest, p.chunks.value)) * heads;
            token = next(rest, p.group_count) * p.tokens.value + low;
            batch = rest;
        }
    }
    __device__ __forceinline__ bool exists(const Params& p) const {
        return batch < p.batch && token < p.length;
    }

  private:
    static __device__ __forceinline__ uint32_t next(uint32_t& a, const gemm::Divisor& b) {
        const uint32_t quotient = b.divide(a), rest = a - quotient * b.value;
        a = quotient;
        return rest;
    }
    static __device__ __forceinline__ int64_t next(int64_t& a, int64_t b) {
        const int64_t quotient = a / b, rest = a - quotient * b;
        a = quotient;
        return rest;
    }
};

__device__ __forceinline__ int64_t integer(const Integers& x, int64_t i) {
    return x.wide ? arch::load_global_readonly(static_cast<const int64_t*>(x.data) + i)
                  : arch::load_global_readonly(static_cast<const int*>(x.data) + i);
}

// Where the row of a token lies in the tables.
enum class Known { yes, outside_of_table, no_sequence };
struct Angle {
    int64_t at = 0;
    Known known = Known::yes;

    __device__ __forceinline__ Angle(const Params& p, const Place& place) {
        if (p.table_of_tokens) {
            at = place.batch * p.table_batch_stride + place.token * p.table_stride;
            return;
        }
        int64_t sequence = place.batch, position = place.token;
        if (p.cu_seqlens != nullptr) {
            // The last sequence that begins at the token or before.
            int64_t low = 0, high = p.sequences;
            while (low < high) {
                const int64_t middle = (low + high + 1) / 2;
                if (arch::load_global_readonly(p.cu_seqlens + middle) <= place.token) {
                    low = middle;
                } else {
                    high = middle - 1;
                }
            }
            if (low >= p.sequences) {
                known = Known::no_sequence;
                return;
            }
            sequence = low;
            position -= arch::load_global_readonly(p.cu_seqlens + low);
        }
        if (p.positions.data != nullptr) {
            position = integer(p.positions, place.batch * p.positions_stride + place.token);
        }
        if (p.offsets.data != nullptr) position += integer(p.offsets, sequence);
        if (position < 0 || position >= p.table_rows) {
            known = Known::outside_of_table;
        } else {
            at = position * p.table_stride;
        }
    }
};

// The units of a slot: of eight pairs, which are neighbours or as far from each other as halves of
// the rotated elements, or of what stays as it is. Where both are whole, a warp's loads of either
// have whole lines: the second lies behind the first of all slots. Neighbours' first four pairs are
// then those of the first unit.
struct Columns {
    int first, second, first_count, second_count;
    int pair, later_pair;  // the first and the fifth

    __device__ __forceinline__ Columns(const Params& p, int slot) {
        pair = slot * PAIRS, later_pair = pair + PAIRS / 2;
        const int pairs = min(PAIRS, p.half - pair);
        if (slot >= p.rotating) {
            const int units = (p.dim - 2 * p.half + UNIT - 1) / UNIT;
            first = 2 * p.half + (slot - p.rotating) * UNIT,
            second = first + (units + 1) / 2 * UNIT;
            first_count = min(UNIT, p.dim - first);
            second_count = max(0, min(UNIT, p.dim - second));
        } else if (!p.interleaved || p.aligned) {
            first = pair, second = p.half + pair;
            first_count = second_count = pairs;
            if (p.interleaved) pair /= 2, later_pair = p.half / 2 + pair;
        } else {
            first = 2 * pair, second = first + UNIT;
            first_count = min(UNIT, 2 * pairs), second_count = max(0, 2 * pairs - UNIT);
        }
    }
};

// Cosines, or sines, of four neighbouring pairs.
template <class Table>
__device__ __forceinline__ void load_four(float* values, const Table* at) {
    if constexpr (std::is_same_v<Table, float>) {
        const float4 x = arch::load_global_readonly(reinterpret_cast<const float4*>(at));
        values[0] = x.x, values[1] = x.y, values[2] = x.z, values[3] = x.w;
    } else {
        const uint2 x = arch::load_global_readonly(reinterpret_cast<const uint2*>(at));
        const float2 low = kittens::unpack_pair<Table>(
                         arch::bit_cast<kittens::packed_type<Table>>(x.x)),
                     high = kittens::unpack_pair<Table>(
                         arch::bit_cast<kittens::packed_type<Table>>(x.y));
        values[0] = low.x, values[1] = low.y, values[2] = high.x, values[3] = high.y;
    }
}
// Those of a thread's pairs.
template <bool ALIGNED, class Table>
__device__ __forceinline__ void load_pairs(float (&values)[PAIRS], const Params& p,
                                           const Table* row, const Columns& columns) {
    if constexpr (ALIGNED) {
        load_four(values, row + columns.pair);
        load_four(values + PAIRS / 2, row + columns.later_pair);
    } else {
        const auto unit = load_unit<false>(row + columns.pair, min(PAIRS, p.half - columns.pair));
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) values[i] = unit.value(i);
    }
}

struct Rotation {
    float cos[PAIRS], sin[PAIRS];

    template <class T, bool ALIGNED>
    __device__ __forceinline__ void load(const Params& p, const Place& place,
                                         const Columns& columns) {
        const Angle angle(p, place);
        if (angle.known != Known::yes) {
            const bool none = angle.known == Known::no_sequence;
#pragma unroll
            for (int i = 0; i < PAIRS; ++i) cos[i] = none ? 1.0f : NAN, sin[i] = none ? 0.0f : NAN;
        } else if (p.wide_table || std::is_same_v<T, float>) {
            load_pairs<ALIGNED>(cos, p, static_cast<const float*>(p.cos) + angle.at, columns);
            load_pairs<ALIGNED>(sin, p, static_cast<const float*>(p.sin) + angle.at, columns);
        } else {
            load_pairs<ALIGNED>(cos, p, static_cast<const T*>(p.cos) + angle.at, columns);
            load_pairs<ALIGNED>(sin, p, static_cast<const T*>(p.sin) + angle.at, columns);
        }
        if (p.inverse) {
#pragma unroll
            for (int i = 0; i < PAIRS; ++i) sin[i] = -sin[i];
        }
    }
    template <class T>
    __device__ __forceinline__ void apply(Unit<T>& a, Unit<T>& b, bool interleaved) const {
        float x[UNIT], y[UNIT];
        if (interleaved) {
#pragma unroll
            for (int i = 0; i < PAIRS; ++i) {
                const Unit<T>& unit = i < PAIRS / 2 ? a : b;
                float(&to)[UNIT] = i < PAIRS / 2 ? x : y;
                const int at = 2 * (i % (PAIRS / 2));
                const float low = unit.value(at), high = unit.value(at + 1);
                to[at] = low * cos[i] - high * sin[i];
                to[at + 1] = high * cos[i] + low * sin[i];
            }
        } else {
#pragma unroll
            for (int i = 0; i < PAIRS; ++i) {
                const float low = a.value(i), high = b.value(i);
                x[i] = low * cos[i] - high * sin[i];
                y[i] = high * cos[i] + low * sin[i];
            }
        }
        a = rounded<T>(x), b = rounded<T>(y);
    }
};

// A unit that is whole, and 16 bytes of it at once.
template <class T>
__device__ __forceinline__ Unit<T> load_whole(const T* at) {
    Unit<T> unit;
#pragma unroll
    for (int i = 0; i < Unit<T>::WORDS / 4; ++i) {
        const uint4 v = arch::load_global(reinterpret_cast<const uint4*>(at) + i);
        unit.words[4 * i] = v.x, unit.words[4 * i + 1] = v.y;
        unit.words[4 * i + 2] = v.z, unit.words[4 * i + 3] = v.w;
    }
    return unit;
}
template <class T>
__device__ __forceinline__ void store_whole(T* at, const Unit<T>& unit) {
#pragma unroll
    for (int i = 0; i < Unit<T>::WORDS / 4; ++i) {
        const auto& w = unit.words;
        arch::store_global_whole(reinterpret_cast<uint4*>(at) + i,
                                 uint4{w[4 * i], w[4 * i + 1], w[4 * i + 2], w[4 * i + 3]});
    }
}

template <class T>
struct Rows {
    const T* from;
    T* to;
    int heads;  // that there are from the thread's first on, at most `most`

    __device__ __forceinline__ Rows(const Params& p, const Place& place, int most)
        : from(static_cast<const T*>(p.x) +
               (place.batch * p.x_stride[0] + place.head * p.x_stride[1] +
                place.token * p.x_stride[2])),
          to(static_cast<T*>(p.out) +
             (place.batch * p.out_stride[0] + place.head * p.out_stride[1] +
              place.token * p.out_stride[2])),
          heads(min(most, (p.in_place ? p.rotated_heads : p.heads) - place.head)) {}
};

// Whole units: all that a thread reads of x is on its way before anything else.
template <class T, int HEADS>
__device__ __forceinline__ void rotate_units(const Params& p, const Place& place) {
    const Columns columns(p, place.slot);
    const Rows<T> rows(p, place, HEADS);
    const bool both = columns.second_count > 0;
    Unit<T> a[HEADS], b[HEADS];
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
        // Heads that there are not are read as the last one, so that no load needs a condition.
        const T* const row = rows.from + min(h, rows.heads - 1) * p.x_stride[1];
        a[h] = load_whole(row + columns.first);
        b[h] = load_whole(row + (both ? columns.second : columns.first));
    }
    if (place.slot < p.rotating) {
        Rotation rotation;
        rotation.load<T, true>(p, place, columns);
#pragma unroll
        for (int h = 0; h < HEADS; ++h) {
            if (place.head + h < p.rotated_heads) rotation.apply(a[h], b[h], p.interleaved);
        }
    }
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
        if (h >= rows.heads) continue;
        T* const row = rows.to + h * p.out_stride[1];
        store_whole(row + columns.first, a[h]);
        if (both) store_whole(row + columns.second, b[h]);
    }
}

// Element by element, a head at a time.
template <class T, int HEADS>
__device__ __forceinline__ void rotate_elements(const Params& p, const Place& place) {
    const Columns columns(p, place.slot);
    const Rows<T> rows(p, place, HEADS);
    const bool rotating = place.slot < p.rotating;
    Rotation rotation;
    if (rotating) rotation.load<T, false>(p, place, columns);
#pragma unroll 1
    for (int h = 0; h < rows.heads; ++h) {
        const T* const from = rows.from + h * p.x_stride[1];
        T* const to = rows.to + h * p.out_stride[1];
        Unit<T> a = load_unit<false>(from + columns.first, columns.first_count),
                b = load_unit<false>(from + columns.second, columns.second_count);
        if (rotating && place.head + h < p.rotated_heads) rotation.apply(a, b, p.interleaved);
        store_unit<false>(to + columns.first, a, columns.first_count);
        store_unit<false>(to + columns.second, b, columns.second_count);
    }
}

// (A template over a type, which nvcc wants of kernels.)
template <Config C>
struct Traits {
    using T = norm::sm90::element_of<C.dtype>;
    static constexpr int heads = heads_of_thread(C.dtype);
};
template <class Traits>
__global__ __launch_bounds__(THREADS,
                             BLOCKS_PER_SM) void rotary_kernel(const __grid_constant__ Params p) {
    using T = typename Traits::T;
    constexpr int HEADS = Traits::heads;
    arch::wait_for_dependencies();
    arch::launch_dependents();
    const Place place(p, HEADS);
    if (!place.exists(p)) return;
    if (p.aligned) {
        rotate_units<T, HEADS>(p, place);
    } else {
        rotate_elements<T, HEADS>(p, place);
    }
}

}  // namespace sm90

template <Config C>
void launch(const Params& p, Stream stream) {
    const int64_t blocks = ceil_div(p.threads(), THREADS);
    kittens::launch({.dependent = !C.portable, .blocks_per_sm = BLOCKS_PER_SM},
                    sm90::rotary_kernel<sm90::Traits<C>>, dim3(static_cast<unsigned>(blocks)),
                    dim3(THREADS), dim3(1), 0, stream, p);
}

}  // namespace thunderkittens::rotary
