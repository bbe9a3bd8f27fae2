// What Based carries from chunk to chunk, in fp32 registers of a warpgroup: the sums of
// phi(k) v^T, and of phi(k) for the denominator.
#pragma once

#include "csrc/linear_attention/based/feature_map.cuh"

namespace thunderkittens::linear_attention {

// A state in memory, in the public order; null: all zeros, or not wanted.
struct StateView {
    float* numerator = nullptr;    // (FEATURES, value_dim)
    float* denominator = nullptr;  // (FEATURES,)
    int value_dim = 0;

    // The i-th of several that lie packed.
    __device__ __forceinline__ StateView at(int64_t i) const {
        StateView view = *this;
        if (numerator) view.numerator += i * FEATURES * value_dim;
        if (denominator) view.denominator += i * FEATURES;
        return view;
    }
};

// The lane, such that what follows from it is computed again: kept over the loop from the state's
// load to its store, places and weights of features would take a dozen registers.
__device__ __forceinline__ int fresh_lane() {
    auto lane = static_cast<uint32_t>(laneid());
    arch::pin_register(lane);
    return static_cast<int>(lane);
}

// A warp has 16 rows of each of three groups of four blocks of features; the last two blocks of the
// third group do not exist. Sums are `unit` times too large.
template <class T, bool weighted>
struct RunningState {
    static constexpr float unit = state_unit<T, weighted>;
    using Rows = FeatureRows<T>;
    rt_fl<16, VALUES> sums[3];

    // Calls f(two neighbouring values, row of the state in memory, its weight, column).
    template <class F>
    __device__ __forceinline__ void for_each_pair(F f) {
        const int lane = fresh_lane();
#pragma unroll
        for (int group = 0; group < 3; ++group) {
            const int block = 4 * group + warpgroup::warpid();
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const FeaturePair pair = feature_pair(block, lane / 4 + 8 * r);
                const StateRow feature = state_row_of(pair.a, pair.b);
#pragma unroll
                for (int j = 0; j < VALUES / 16; ++j) {
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        f(sums[group].tiles[0][j].data[2 * half + r], feature,
                          16 * j + 8 * half + 2 * (lane % 4));
                    }
                }
            }
        }
    }
    // Without branches, so that all loads are in flight together.
    __device__ __forceinline__ void load(const StateView& from, int first_column) {
        for_each_pair([](float2& pair, const StateRow&, int) { pair = {0.0f, 0.0f}; });
        if (from.numerator == nullptr) return;
        const int last = from.value_dim - 2;
        for_each_pair([&](float2& pair, const StateRow& feature, int column) {
            const int at = first_column + column;
            const bool exists = feature.row >= 0 && at <= last;
            const float factor = exists ? unit / feature.weight : 0.0f;
            pair = arch::load_global(reinterpret_cast<const float2*>(
                from.numerator + int64_t(::max(feature.row, 0)) * from.value_dim +
                ::min(at, last)));
            pair = {factor * pair.x, factor * pair.y};
        });
    }
    __device__ __forceinline__ void store(const StateView& to, int first_column) {
        if (to.numerator == nullptr) return;
        for_each_pair([&](const float2& pair, const StateRow& feature, int column) {
            const int at = first_column + column;
            if (feature.row < 0 || at >= to.value_dim) return;
            const float factor = feature.weight / unit;
            arch::store_global(
                reinterpret_cast<float2*>(to.numerator + int64_t(feature.row) * to.value_dim + at),
                float2{factor * pair.x, factor * pair.y});
        });
    }

    // Issues sums += phi(x)^T values for a chunk, in three products. Between the first two and the
    // last the caller may wait for what it has issued before, and so free registers. The operands
    // must live until wait().
    struct Operands {
        typename Rows::fragment groups[3];
    };
    __device__ __forceinline__ void add_most(Operands& features, const Rows& rows,
                                             const value_tile<T>& values) {
        typename Rows::fragment own;
        rows.load_own(own);
        rows.template make<0>(features.groups[0], own);
        warpgroup::mma_AB(sums[0], features.groups[0], values);
        rows.template make<1>(features.groups[1], own);
        warpgroup::mma_AB(sums[1], features.groups[1], values);
    }
    __device__ __forceinline__ void add_rest(Operands& features, const Rows& rows,
                                             const value_tile<T>& values) {
        rows.template make<2>(features.groups[2], features.groups[2]);
        warpgroup::mma_AB(sums[2], features.groups[2], values);
    }
    __device__ __forceinline__ void wait() {
        warpgroup::mma_async_wait<0>(sums[0]);
        pin(sums[1]);
        pin(sums[2]);
    }

    // The power of two that brings sums in half into its range, the same for all; else 1.
    template <bool scaled_always = false>
    __device__ __forceinline__ float operand_scale(sv<float, 16>& scratch) const {
        float scale = 1.0f;
        if constexpr (scaled_always || std::is_same_v<T, half>) {
            float most = 0.0f;
#pragma unroll
            for (int group = 0; group < 3; ++group) {
#pragma unroll
                for (int j = 0; j < VALUES / 16; ++j) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const float2 pair = sums[group].tiles[0][j].data[i];
                        most = fmaxf(most, fmaxf(fabsf(pair.x), fabsf(pair.y)));
                    }
                }
            }
#pragma unroll
            for (int distance = 16; distance > 0; distance /= 2)
                most = fmaxf(most, arch::shuffle_xor(most, distance));
            if (laneid() == 0) scratch.set(warpgroup::warpid(), most);
            warpgroup::sync(2);
#pragma unroll
            for (int w = 0; w < 4; ++w) most = fmaxf(most, scratch.get(w));
            const int exponent = int(arch::bit_cast<uint32_t>(most) >> 23) - 127;
            // 2^13 at most, so that nothing overflows; zeros, infinities and NaN stay.
            if (exponent > -100 && exponent < 128)
                scale = arch::bit_cast<float>(uint32_t(127 + 13 - exponent) << 23);
        }
        return scale;
    }
    // Writes the state as an operand, in 16 bits. What is multiplied with it must be multiplied by
    // the result.
    template <bool scaled_always = false>
    __device__ __forceinline__ float store_operand(state_tile<T>& tile,
                                                   sv<float, 16>& scratch) const {
        const float scale = operand_scale<scaled_always>(scratch);
#pragma unroll
        for (int group = 0; group < 3; ++group) {
            const int block = 4 * group + warpgroup::warpid();
            if (block >= FEATURE_BLOCKS) continue;
            if constexpr (scaled_always || std::is_same_v<T, half>) {
                rt_fl<16, VALUES> scaled;
                warp::mul(scaled, sums[group], scale);
                warp::store(tile.template subtile<16, VALUES>({block, 0}), scaled);
            } else {
                warp::store(tile.template subtile<16, VALUES>({block, 0}), sums[group]);
            }
        }
        return 1.0f / (scale * unit);
    }
};

// The sum of two bf16 numbers is a float to 16 bits.
template <class L>
__device__ __forceinline__ void split_bf16(rt<bf16, 16, 16, L>& high, rt<bf16, 16, 16, L>& low,
                                           const rt<float, 16, 16, L>& x) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 pair = x.tiles[0][0].data[i];
        const bf16_2 h = pack_pair<bf16>(pair.x, pair.y);
        const float2 rounded = unpack_pair<bf16>(h);
        high.tiles[0][0].data[i] = h;
        low.tiles[0][0].data[i] = pack_pair<bf16>(pair.x - rounded.x, pair.y - rounded.y);
    }
}
template <class T, class L>
__device__ __forceinline__ void to_float(rt<float, 16, 16, L>& to, const rt<T, 16, 16, L>& from) {
#pragma unroll
    for (int i = 0; i < 4; ++i) to.tiles[0][0].data[i] = unpack_pair<T>(from.tiles[0][0].data[i]);
}

// The denominator's state is a quadratic form: the sum of 1, of x, and of x x^T. Every warp keeps
// all of it, and its products are small and of one warp each.
template <class T>
struct RunningDenominator {
    rt_fl<16, 16> products;
    float2 elements[2];  // columns 2c and 8 + 2c of a tile whose rows are equal
    float count = 0.0f;  // weighted: this lane's share

    template <bool weighted>
    __device__ __forceinline__ void load(const StateView& from) {
        zero(products);
        elements[0] = elements[1] = {0.0f, 0.0f};
        count = 0.0f;
        if (from.denominator == nullptr) return;
        if (!weighted || laneid() == 0) count = arch::load_global(from.denominator);
        for_each([&](float& product, float& element, int row, int column) {
            const StateRow p = state_row_of(row, column), e = state_row_of(column, ONE);
            product = arch::load_global(from.denominator + p.row) / p.weight;
            element = arch::load_global(from.denominator + e.row) / e.weight;
        });
    }
    // By one warp.
    template <bool weighted>
    __device__ __forceinline__ void store(const StateView& to) {
        if (to.denominator == nullptr) return;
        float total = count;
        if constexpr (weighted) total = warp_sum(total);
        if (laneid() == 0) arch::store_global(to.denominator, total);
        for_each([&](float product, float element, int row, int column) {
            const StateRow p = state_row_of(row, column), e = state_row_of(column, ONE);
            if (row <= column) arch::store_global(to.denominator + p.row, product * p.weight);
            if (row == 0) arch::store_global(to.denominator + e.row, element * e.weight);
        });
    }

    __device__ __forceinline__ void add(element_tile<T>& x, int tokens) {
        rt<T, 16, 16, col_l> ones, part;
        rt_fl<16, 16> sum = element_rows();
        one(ones);
#pragma unroll
        for (int k = 0; k < CHUNK / 16; ++k) {
            warp::load(part, x.template subtile<16, 16>({k, 0}));
            mma_AtB(products, part, part, products);
            mma_AtB(sum, ones, part, sum);
        }
        set_elements(sum);
        count += float(tokens);
    }
    __device__ __forceinline__ void add(element_tile<T>& x, const TokenWeights& weights) {
        rt<bf16, 16, 16, col_l> ones, high, low, scaled_high, scaled_low;
        rt_fl<16, 16> sum = element_rows();
        one(ones);
#pragma unroll
        for (int k = 0; k < CHUNK / 16; ++k) {
            rt<T, 16, 16, col_l> part;
            rt<float, 16, 16, col_l> wide, scaled;
            warp::load(part, x.template subtile<16, 16>({k, 0}));
            to_float(wide, part);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 w = TokenWeights::pair(weights.denominator,
                                                    16 * k + 8 * (i / 2) + 2 * (laneid() % 4));
                const float2 pair = wide.tiles[0][0].data[i];
                scaled.tiles[0][0].data[i] = {w.x * pair.x, w.y * pair.y};
            }
            split_bf16(high, low, wide);
            split_bf16(scaled_high, scaled_low, scaled);
            mma_AtB(products, high, scaled_high, products);
            mma_AtB(products, high, scaled_low, products);
            mma_AtB(sum, ones, scaled_high, sum);
            mma_AtB(sum, ones, scaled_low, sum);
            if constexpr (std::is_same_v<T, half>) mma_AtB(products, low, scaled_high, products);
        }
        set_elements(sum);
        count += weights.denominator.get(laneid()) + weights.denominator.get(laneid() + 32);
    }

    // products x for this warp's 16 tokens, as rows.
    __device__ __forceinline__ void apply(rt_fl<16, 16>& result, const rt<T, 16, 16>& x) const {
        rt<bf16, 16, 16> high, low;
        split_bf16(high, low, products);
        zero(result);
        if constexpr (std::is_same_v<T, bf16>) {
            mma_ABt(result, x, high, result);
            mma_ABt(result, x, low, result);
        } else {
            rt_fl<16, 16> wide;
            rt<bf16, 16, 16> x_high, x_low;
            to_float(wide, x);
            split_bf16(x_high, x_low, wide);
            mma_ABt(result, x_high, high, result);
            mma_ABt(result, x_high, low, result);
            mma_ABt(result, x_low, high, result);
        }
    }
    // phi(x) . state for the lane's two rows; each lane of the quad has a part of the sum.
    __device__ __forceinline__ float2 dot(const rt<T, 16, 16>& x) const {
        rt_fl<16, 16> form;
        apply(form, x);
        float2 sum = {0.0f, 0.0f};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 y = form.tiles[0][0].data[i], z = elements[i / 2];
            const float2 w = unpack_pair<T>(x.tiles[0][0].data[i]);
            float& s = i % 2 ? sum.y : sum.x;
            s = fmaf(w.x, fmaf(y.x, 1.0f / 32, 0.25f * z.x), s);
            s = fmaf(w.y, fmaf(y.y, 1.0f / 32, 0.25f * z.y), s);
        }
        return sum;
    }
    // The gradient of `dot` with respect to x, times the rows' factors, added to an accumulator.
    __device__ __forceinline__ void add_gradient(rt_fl<16, 16>& sum, const rt<T, 16, 16>& x,
                                                 float2 factor) const {
        rt_fl<16, 16> form;
        apply(form, x);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 y = form.tiles[0][0].data[i], z = elements[i / 2];
            const float f = 0.25f * (i % 2 ? factor.y : factor.x);
            float2& s = sum.tiles[0][0].data[i];
            s = {fmaf(f, fmaf(y.x, 0.25f, z.x), s.x), fmaf(f, fmaf(y.y, 0.25f, z.y), s.y)};
        }
    }

  private:
    __device__ __forceinline__ rt_fl<16, 16> element_rows() const {
        rt_fl<16, 16> tile;
#pragma unroll
        for (int i = 0; i < 4; ++i) tile.tiles[0][0].data[i] = elements[i / 2];
        return tile;
    }
    __device__ __forceinline__ void set_elements(const rt_fl<16, 16>& tile) {
        elements[0] = tile.tiles[0][0].data[0];
        elements[1] = tile.tiles[0][0].data[2];
    }
    template <class F>
    __device__ __forceinline__ void for_each(F f) {
        const int lane = fresh_lane();
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = lane / 4 + 8 * (i % 2), column = 2 * (lane % 4) + 8 * (i / 2);
            float2 &p = products.tiles[0][0].data[i], &e = elements[i / 2];
            f(p.x, e.x, row, column);
            f(p.y, e.y, row, column + 1);
        }
    }
};

}  // namespace thunderkittens::linear_attention
