// Rotary embedding of rows as they are loaded, 16 bytes of a row at a time. The table is that of
// decode.h; products are in fp32, rounded once.
#pragma once

#include "csrc/attention/decode/decode.h"
#include "kittens/kittens.cuh"

namespace thunderkittens::attention::decode {

using namespace kittens;

template <class T>
struct RotaryTable {
    static constexpr int per_load = 16 / int(sizeof(T));
    struct Vector {
        packed_type<T> pairs[per_load / 2];
    };

    const T *cos, *sin;
    int dim, positions;
    bool interleaved;

    RotaryTable(const Rotary& rotary)
        : cos(static_cast<const T*>(rotary.cos)),
          sin(static_cast<const T*>(rotary.sin)),
          dim(rotary.cos == nullptr ? 0 : rotary.dim),
          positions(static_cast<int>(rotary.positions)),
          interleaved(rotary.interleaved) {}

    // Elements [column, column + per_load) of a row that stands at a position.
    __device__ __forceinline__ uint4 load(const T* row, int column, int position) const {
        return rotated(arch::load_global(reinterpret_cast<const uint4*>(row + column)), row, column,
                       position);
    }
    // The same of elements that have been loaded.
    __device__ __forceinline__ uint4 rotated(const uint4& mine, const T* row, int column,
                                             int position) const {
        if (column >= dim) return mine;
        const int half = dim / 2;
        const int64_t line = int64_t(::min(::max(position, 0), positions - 1)) * half;
        return interleaved ? rotate_pairs(mine, line + column / 2)
                           : rotate_halves(mine, row, column, line);
    }

  private:
    static __device__ __forceinline__ float2 unpacked(const packed_type<T>& pair) {
        return unpack_pair<T>(pair);
    }
    __device__ __forceinline__ uint4 rotate_pairs(const uint4& mine, int64_t at) const {
        Vector x = arch::bit_cast<Vector>(mine);
#pragma unroll
        for (int i = 0; i < per_load / 2; ++i) {
            const float2 value = unpacked(x.pairs[i]);
            const float c = float(arch::load_global_readonly(cos + at + i));
            const float s = float(arch::load_global_readonly(sin + at + i));
            x.pairs[i] = pack_pair<T>(value.x * c - value.y * s, value.y * c + value.x * s);
        }
        return arch::bit_cast<uint4>(x);
    }
    // Element i of the first half and i of the second are a pair.
    __device__ __forceinline__ uint4 rotate_halves(const uint4& mine, const T* row, int column,
                                                   int64_t line) const {
        const int half = dim / 2;
        const bool second = column >= half;
        const int in_half = second ? column - half : column;
        const auto load = [](const T* from) {
            return arch::bit_cast<Vector>(arch::load_global(reinterpret_cast<const uint4*>(from)));
        };
        Vector x = arch::bit_cast<Vector>(mine);
        const Vector other = load(row + (second ? in_half : column + half));
#pragma unroll
        for (int i = 0; i < per_load / 2; ++i) {
            const float2 a = unpacked(x.pairs[i]), b = unpacked(other.pairs[i]);
            const int64_t at = line + in_half + 2 * i;
            const auto value = [&](const T* table, int j) {
                return float(arch::load_global_readonly(table + at + j));
            };
            const float sign = second ? 1.0f : -1.0f;
            x.pairs[i] = pack_pair<T>(a.x * value(cos, 0) + sign * b.x * value(sin, 0),
                                      a.y * value(cos, 1) + sign * b.y * value(sin, 1));
        }
        return arch::bit_cast<uint4>(x);
    }
};

}  // namespace thunderkittens::attention::decode
