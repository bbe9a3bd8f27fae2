// Attention over a cache, what the consumers of both kernels do for the rows of a tile: load
// queries, mask scores.
#pragma once

#include "csrc/attention/decode/decode_types_sm90.cuh"

namespace thunderkittens::attention::decode {

// Sixteen bytes of a row of queries, zeros where it or the column does not exist.
template <class Kernel>
__device__ __forceinline__ uint4 load_query_chunk(const Globals<Kernel>& g, const Segments& segment,
                                                  int row, int column) {
    const Row r(g.work, segment.s, segment.item, row);
    if (!r.exists || column >= g.head_dim) return make_uint4(0, 0, 0, 0);
    const int begin = g.work.rotary_begin(segment.b(), segment.s.k_length);
    return g.rotary.load(g.q.at(segment.b(), r.head, segment.s.q_begin + r.position, 0), column,
                         begin + (g.rotary_moves ? r.position : 0));
}

// Eight elements of a row in fp16, over a factor. Rows of any magnitude fit: they are brought to
// fp16 by a power of two, which scores get back.
struct HalvedRow {
    Halves elements;
    float factor;
};
// Neighbouring lanes of a warp have a row.
template <class T, int lanes = WARP_THREADS>
__device__ __forceinline__ HalvedRow halved_row(const uint4& chunk) {
    const auto x = arch::bit_cast<typename RotaryTable<T>::Vector>(chunk);
    float2 values[4];
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        values[i] = unpack_pair<T>(x.pairs[i]);
        largest = fmaxf(largest, fmaxf(fabsf(values[i].x), fabsf(values[i].y)));
    }
#pragma unroll
    for (int d = lanes / 2; d > 0; d /= 2) {
        largest = fmaxf(largest, arch::shuffle_xor(largest, d));
    }
    const int exponent = exponent_of(largest) - 10;
    const float down = power_of_two(-exponent);
    HalvedRow row;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        row.elements.pairs[i] =
            arch::bit_cast<uint32_t>(pack_pair<half>(values[i].x * down, values[i].y * down));
    }
    row.factor = power_of_two(exponent);
    return row;
}

// Of the mask, bits [first, first + 64) of a row, those before the first set.
template <class Kernel>
__device__ __forceinline__ uint64_t mask_bits(const Globals<Kernel>& g, const Segments& segment,
                                              const Row& row, int first) {
    if (!row.exists) return 0;
    const int64_t token = g.q.packed ? segment.s.q_begin + row.position
                                     : int64_t(segment.b()) * g.work.q_length + row.position;
    const auto word = [&](int index) -> uint64_t {
        if (index < 0) return ~0u;
        if (index >= g.mask_words) return 0;
        return static_cast<uint32_t>(
            arch::load_global_readonly(g.mask + token * g.mask_stride + index));
    };
    const int index = first >> 5, offset = first & 31;
    const uint64_t low = word(index) | word(index + 1) << 32;
    return offset == 0 ? low : low >> offset | word(index + 2) << (64 - offset);
}

// Scores of a tile that a warp has. `row` tells which the thread's upper (0) and lower (1) row are:
// most blocks need it not.
template <class Kernel, class RowOf>
struct VisibleKeys {
    const Globals<Kernel>& g;
    const Segments& segment;
    RowOf row;

    // Softcap and ALiBi, then -inf where a row does not see a key, of the tile from `first_key` on
    // in a block.
    template <any_register_tile Tile>
    __device__ __forceinline__ Shift apply(Tile& x, int block, int first_key) const {
        using T = typename Kernel::T;
        const KeyBlocks& keys = segment.item.keys;
        const bool cut = block >= keys.unmasked_end || block < keys.unmasked_begin;
        if (!cut && !g.score_mod.has_slopes()) {
            return g.score_mod.template apply<T>(x, {0, 0}, {0.0f, 0.0f});
        }
        const Row upper = row(0), lower = row(1);
        const Lengths& s = segment.s;
        const int b = segment.b(), first_column = first_key + 2 * (laneid() % 4);
        // A key's distance from the diagonal, for the thread's first column.
        const auto columns = [&](int offset) -> Int2 {
            return {upper.position - first_column + offset, lower.position - first_column + offset};
        };
        const float2 slope = {g.score_mod.slope(b, upper.exists ? upper.head : 0),
                              g.score_mod.slope(b, lower.exists ? lower.head : 0)};
        const Shift shift = g.score_mod.template apply<T>(x, columns(s.diagonal), slope);
        if (cut) {
            Int2 low = columns(s.low), high = columns(s.high);
            if (g.work.chunk > 0) {
                const int2 a = g.work.chunk_of(s, upper.position);
                const int2 c = g.work.chunk_of(s, lower.position);
                low = {::max(low.x, a.x - first_column), ::max(low.y, c.x - first_column)};
                high = {::min(high.x, a.y - 1 - first_column),
                        ::min(high.y, c.y - 1 - first_column)};
            }
            const int begin = s.k_begin - first_column, end = s.k_length - 1 - first_column;
            mask_outside(x, {::max(low.x, begin), ::max(low.y, begin)},
                         {::min(high.x, end), ::min(high.y, end)});
            if (g.mask != nullptr) apply_mask(x, upper, lower, first_key);
        }
        return shift;
    }

  private:
    // The newest keys, those of the queries themselves, are seen where the mask has a bit; all
    // before are.
    template <any_register_tile Tile>
    __device__ __forceinline__ void apply_mask(Tile& x, const Row& upper, const Row& lower,
                                               int first_key) const {
        const int first_bit = first_key - segment.s.diagonal;
        const uint64_t visible[] = {mask_bits(g, segment, upper, first_bit),
                                    mask_bits(g, segment, lower, first_bit)};
        const int mine = 2 * (laneid() % 4);
        for_each_element(x, [&](float& value, int column, bool low) {
            if ((visible[low] >> (column + mine) & 1) == 0) value = -INFINITY;
        });
    }
};

// The schedule was made for another call: a result that is no number shows it.
template <class Kernel>
__device__ __forceinline__ void poison(const Globals<Kernel>& g) {
    using T = typename Kernel::T;
    const auto& to = g.results;
    const int64_t rows = int64_t(to.heads) * to.positions * (g.q.packed ? 1 : g.work.batch);
    for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
        const int position = static_cast<int>(row % to.positions);
        const int line = static_cast<int>(row / to.positions);
        T* const out = to.out.at(line / to.heads, line % to.heads, position, 0);
        for (int i = static_cast<int>(threadIdx.x); i < to.value_dim; i += Kernel::threads) {
            arch::store_global(out + i, T(NAN));
        }
        if (to.lse != nullptr && threadIdx.x == 0) arch::store_global(to.lse + row, NAN);
    }
}

}  // namespace thunderkittens::attention::decode
