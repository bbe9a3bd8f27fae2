// The state of 64 columns of the values, transposed: a warpgroup's accumulator in fp32, (values,
// keys). It becomes an operand of products by a rounded copy in shared memory.
#pragma once

#include "csrc/linear_attention/common/fragment.cuh"
#include "csrc/recurrent/common/chunks.cuh"

namespace thunderkittens::recurrent {

using linear_attention::discard;
using linear_attention::rematerialized;

template <class T, int keys>
struct RunningState {
    using tile = st<T, VALUES, keys>;
    rt_fl<16, keys> sums;

    // Calls f(two neighbouring numbers, row: the value's column, column: the key's).
    template <class F>
    __device__ __forceinline__ void for_each_pair(F f) {
        const int row = 16 * warpgroup::warpid() + laneid() / 4, column = 2 * (laneid() % 4);
#pragma unroll
        for (int j = 0; j < keys / 16; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                f(sums.tiles[0][j].data[i], row + 8 * (i % 2), 16 * j + 8 * (i / 2) + column);
            }
        }
    }
    __device__ __forceinline__ void scale(float factor) {
#pragma unroll
        for (int j = 0; j < keys / 16; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float2& pair = sums.tiles[0][j].data[i];
                pair = {factor * pair.x, factor * pair.y};
            }
        }
    }

    // A state in memory, by its strides; what it does not have is zero. Without branches, so that
    // all loads are in flight together.
    __device__ __forceinline__ void load(const StateOperand& from, int64_t sequence, int head,
                                         int first_value, int values, int key_count) {
        for_each_pair([](float2& pair, int, int) { pair = {0.0f, 0.0f}; });
        if (from.data == nullptr) return;
        const float* data = from.data + sequence * from.sequence_stride + head * from.head_stride;
        for_each_pair([&](float2& pair, int row, int column) {
            const int value = first_value + row;
            const bool exists = value < values && column < key_count;
            const float* at = data + ::min(value, values - 1) * from.value_stride +
                              ::min(column, key_count - 2) * from.key_stride;
            const float x = arch::load_global(at), y = arch::load_global(at + from.key_stride);
            pair = {exists ? x : 0.0f, exists ? y : 0.0f};
        });
    }
    __device__ __forceinline__ void store(const StateOperand& to, int64_t sequence, int head,
                                          int first_value, int values, int key_count) {
        if (to.data == nullptr) return;
        float* data = to.data + sequence * to.sequence_stride + head * to.head_stride;
        for_each_pair([&](const float2& pair, int row, int column) {
            const int value = first_value + row;
            if (value >= values || column >= key_count) return;
            float* at = data + value * to.value_stride + column * to.key_stride;
            if (to.key_stride == 1) {
                arch::store_global(reinterpret_cast<float2*>(at), pair);
            } else {
                arch::store_global(at, pair.x);
                arch::store_global(at + to.key_stride, pair.y);
            }
        });
    }

    // What a segment adds, in the order of a thread's registers: words of 16 bytes, each next to
    // those of the other threads, behind the segment's log decay.
    static constexpr int words = keys / 8;
    __device__ __forceinline__ void store_segment(float* to, float log_decay) const {
        if (warpgroup::laneid() == 0) arch::store_global(to, log_decay);
        auto* own = reinterpret_cast<float4*>(to + STATE_HEAD) + warpgroup::laneid();
#pragma unroll
        for (int word = 0; word < words; ++word) {
            const auto& data = sums.tiles[0][word / 2].data;
            const float2 x = data[2 * (word % 2)], y = data[2 * (word % 2) + 1];
            arch::store_global(own + word * WARPGROUP_THREADS, float4{x.x, x.y, y.x, y.y});
        }
    }
    // Continues through `count` segments.
    __device__ __forceinline__ void add_segments(const float* from, int count) {
        constexpr int64_t floats = SEGMENT_STATE_FLOATS<keys>;
#pragma unroll 1
        for (int s = 0; s < count; ++s, from += floats) {
            const float decay = arch::exp2_approx(arch::load_global(from));
            const auto* own =
                reinterpret_cast<const float4*>(from + STATE_HEAD) + warpgroup::laneid();
#pragma unroll
            for (int word = 0; word < words; ++word) {
                const float4 add = arch::load_global(own + word * WARPGROUP_THREADS);
                auto& data = sums.tiles[0][word / 2].data;
                float2 &x = data[2 * (word % 2)], &y = data[2 * (word % 2) + 1];
                x = {fmaf(decay, x.x, add.x), fmaf(decay, x.y, add.y)};
                y = {fmaf(decay, y.x, add.z), fmaf(decay, y.y, add.w)};
            }
        }
    }

    // The power of two by which a state in half is multiplied so that nothing overflows, the same
    // for all of the warpgroup, which synchronises.
    __device__ __forceinline__ float operand_scale(sv<float, 8>& scratch, int barrier) const {
        if constexpr (std::is_same_v<T, bf16>) {
            return 1.0f;
        } else {
            float most = 0.0f;
#pragma unroll
            for (int j = 0; j < keys / 16; ++j) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float2 pair = sums.tiles[0][j].data[i];
                    most = fmaxf(most, fmaxf(fabsf(pair.x), fabsf(pair.y)));
                }
            }
#pragma unroll
            for (int distance = 16; distance > 0; distance /= 2)
                most = fmaxf(most, arch::shuffle_xor(most, distance));
            if (laneid() == 0) scratch.set(warpgroup::warpid(), most);
            warpgroup::sync(barrier);
#pragma unroll
            for (int w = 0; w < WARPGROUP_WARPS; ++w) most = fmaxf(most, scratch.get(w));
            const int exponent = int(arch::bit_cast<uint32_t>(most) >> 23) - 127;
            if (exponent < 14 || exponent > 127) return 1.0f;
            return arch::bit_cast<float>(uint32_t(127 + 13 - exponent) << 23);
        }
    }
    __device__ __forceinline__ void store_operand(tile& to, float factor) const {
        rt<T, 16, keys> rounded;
#pragma unroll
        for (int j = 0; j < keys / 16; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 pair = sums.tiles[0][j].data[i];
                rounded.tiles[0][j].data[i] = std::is_same_v<T, bf16>
                                                  ? pack_pair<T>(pair.x, pair.y)
                                                  : pack_pair<T>(factor * pair.x, factor * pair.y);
            }
        }
        warpgroup::store(to, rounded);
    }
};

}  // namespace thunderkittens::recurrent
