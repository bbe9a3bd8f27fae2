// Rotary embedding. A thread has eight pairs of a token, or eight elements that stay as they are,
// of four heads: it loads all of them at once, 128 bytes of 16-bit elements, and cosines and sines
// once for the four. The table of positions is small and comes from L1 and L2; x is read and
// written once.
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

    __device__ __forceinline__ Place(const Params& p, int64_t index) {
        slot = static_cast<int>(rest(index, p.slots));
        token = rest(index, p.length);
        head = static_cast<int>(rest(index, p.chunks)) * HEADS;
        batch = index;
    }

  private:
    // In 32 bits where these suffice: divisions of 64 take four times as long.
    static __device__ __forceinline__ int64_t rest(int64_t& a, int64_t b) {
        int64_t quotient;
        if (a >> 32 == 0 && b >> 32 == 0) {
            quotient = static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
        } else {
            quotient = a / b;
        }
        const int64_t rest = a - quotient * b;
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

// Cosines, or sines, of a thread's pairs.
template <class T, bool ALIGNED>
__device__ __forceinline__ void load_table(float (&values)[PAIRS], const Params& p,
                                           const void* table, const Angle& angle, float otherwise,
                                           int first, int count) {
    if (angle.known != Known::yes) {
        const float value = angle.known == Known::no_sequence ? otherwise : NAN;
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) values[i] = value;
    } else if (p.wide_table || std::is_same_v<T, float>) {
        const auto unit =
            load_unit<ALIGNED>(static_cast<const float*>(table) + (angle.at + first), count);
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) values[i] = unit.value(i);
    } else {
        const auto unit =
            load_unit<ALIGNED>(static_cast<const T*>(table) + (angle.at + first), count);
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) values[i] = unit.value(i);
    }
}

// The units of eight pairs: halves of the rotated elements, or neighbours.
struct Columns {
    int first, second, first_count, second_count;

    __device__ __forceinline__ Columns(const Params& p, int slot) {
        const int pair = slot * PAIRS, pairs = min(PAIRS, p.half - pair);
        if (slot >= p.rotating) {
            first = 2 * p.half + (slot - p.rotating) * UNIT, second = first;
            first_count = min(UNIT, p.dim - first), second_count = 0;
        } else if (p.interleaved) {
            first = 2 * pair, second = first + UNIT;
            first_count = min(UNIT, 2 * pairs), second_count = max(0, 2 * pairs - UNIT);
        } else {
            first = pair, second = p.half + pair;
            first_count = second_count = pairs;
        }
    }
};

template <class T>
__device__ __forceinline__ void rotate(Unit<T>& a, Unit<T>& b, bool interleaved,
                                       const float (&cos)[PAIRS], const float (&sin)[PAIRS]) {
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

template <class T, bool ALIGNED>
__device__ __forceinline__ void rotate_heads(const Params& p, int64_t index) {
    const Place place(p, index);
    const Columns columns(p, place.slot);
    const bool rotating = place.slot < p.rotating;
    const int heads = min(HEADS, (p.in_place ? p.rotated_heads : p.heads) - place.head);
    const T* const from =
        static_cast<const T*>(p.x) +
        (place.batch * p.x_stride[0] + place.head * p.x_stride[1] + place.token * p.x_stride[2]);
    T* const to =
        static_cast<T*>(p.out) + (place.batch * p.out_stride[0] + place.head * p.out_stride[1] +
                                  place.token * p.out_stride[2]);
    Unit<T> a[HEADS], b[HEADS];
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
        const bool there = h < heads;
        const T* const row = from + h * p.x_stride[1];
        a[h] = load_unit<ALIGNED>(row + columns.first, there ? columns.first_count : 0);
        b[h] = load_unit<ALIGNED>(row + columns.second, there ? columns.second_count : 0);
    }
    if (rotating) {
        const Angle angle(p, place);
        float cos[PAIRS], sin[PAIRS];
        const int pair = place.slot * PAIRS, pairs = min(PAIRS, p.half - pair);
        load_table<T, ALIGNED>(cos, p, p.cos, angle, 1.0f, pair, pairs);
        load_table<T, ALIGNED>(sin, p, p.sin, angle, 0.0f, pair, pairs);
        if (p.inverse) {
#pragma unroll
            for (int i = 0; i < PAIRS; ++i) sin[i] = -sin[i];
        }
#pragma unroll
        for (int h = 0; h < HEADS; ++h) {
            if (place.head + h < p.rotated_heads) rotate(a[h], b[h], p.interleaved, cos, sin);
        }
    }
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
        const bool there = h < heads;
        T* const row = to + h * p.out_stride[1];
        store_unit<ALIGNED>(row + columns.first, a[h], there ? columns.first_count : 0);
        store_unit<ALIGNED>(row + columns.second, b[h], there ? columns.second_count : 0);
    }
}

// (A template over a type, which nvcc wants of kernels.)
template <Config C>
struct Traits {
    using T = norm::sm90::element_of<C.dtype>;
};
template <class Traits>
__global__ __launch_bounds__(THREADS) void rotary_kernel(const __grid_constant__ Params p) {
    using T = typename Traits::T;
    arch::wait_for_dependencies();
    arch::launch_dependents();
    const int64_t index = int64_t{blockIdx.x} * THREADS + threadIdx.x;
    if (index >= int64_t{p.slots} * p.length * p.chunks * p.batch) return;
    if (p.aligned) {
        rotate_heads<T, true>(p, index);
    } else {
        rotate_heads<T, false>(p, index);
    }
}

}  // namespace sm90

template <Config C>
void launch(const Params& p, Stream stream) {
    const int64_t blocks = ceil_div(int64_t{p.slots} * p.length * p.chunks * p.batch, THREADS);
    kittens::launch({.dependent = !C.portable}, sm90::rotary_kernel<sm90::Traits<C>>,
                    dim3(static_cast<unsigned>(blocks)), dim3(THREADS), dim3(1), 0, stream, p);
}

}  // namespace thunderkittens::rotary
