// What the kernels of LoLCATS's gradient share: the rows' weights, the way back through the feature
// map, and the operands in shared memory.
#pragma once

#include "csrc/linear_attention/lolcats/backward.h"
#include "csrc/linear_attention/lolcats/feature_map.cuh"
#include "csrc/linear_attention/lolcats/running_state.cuh"

namespace thunderkittens::linear_attention {

// Per chunk: float4 of each token, as LolcatsBackwardWorkspace::rows has them; float2, as weights.
using RowVector = sv<float, 4 * CHUNK>;
using WeightVector = sv<float, 2 * CHUNK>;
using RowsLayout = gl<float, 1, 1, -1, -1, RowVector>;
using WeightsLayout = gl<float, 1, 1, -1, -1, WeightVector>;

template <class K>
struct LolcatsGradient {
    using T = typename K::T;
    static constexpr int dim = K::head_dim, features = K::features;
    using projected_tile = st<T, CHUNK, features>;
    using projected_layout = gl<T, 1, -1, -1, features, projected_tile>;
    using scores = rt_fl<16, CHUNK>;
    using weights = rt<T, 16, CHUNK>;
    using output = rt_fl<16, dim>;
    static constexpr bool is_half = std::is_same_v<T, half>;
    static constexpr float scale = dim == 128 ? 0.08838834764831845f : 0.125f;  // of the scores
    static constexpr float unit = scale * LOG2_E;
    // Features of queries times their weights are small numbers in half.
    static constexpr float weight_unit = is_half ? 32.0f : 1.0f;
};

template <class K>
typename LolcatsGradient<K>::projected_layout projected_layout_of(void* data,
                                                                  const LolcatsProblem& p) {
    return typename LolcatsGradient<K>::projected_layout(static_cast<typename K::T*>(data), nullptr,
                                                         p.batch * p.heads, chunks_of(p) * CHUNK,
                                                         nullptr);
}

// Flags of heads, by which blocks of a kernel wait for single blocks of the one before. A block
// clears its own before it lets the next kernel begin, and sets it when all that others read has
// been written, by one thread that knows of that.
__device__ __forceinline__ void clear_flag(int* flag) {
    arch::store_release_global(flag, 0);
    arch::fence_gpu();
}
__device__ __forceinline__ void set_flag(int* flag) {
    arch::fence_async();
    arch::store_release_global(flag, 1);
}
// By the thread that then loads by TMA.
__device__ __forceinline__ void wait_for_flag(const int* flag) {
    while (arch::load_acquire_global(flag) == 0) {
    }
    arch::fence_async();
}

// dO S^T for the features of one sign, S the sums.
template <class K>
__device__ __forceinline__ void issue_feature_gradient(typename K::projection& gradient,
                                                       const typename K::token_tile& x,
                                                       typename K::state_tile (&state)[K::groups],
                                                       int sign) {
    if constexpr (K::groups == 2)
        warpgroup::mm_ABt(gradient, x, state[sign]);
    else
        warpgroup::mm_ABt(gradient, x,
                          state[0].template subtile<K::features, K::head_dim>({sign, 0}));
}

// Of the lane's two rows.
struct QueryRows {
    float2 reciprocal, delta;

    __device__ __forceinline__ explicit QueryRows(const sv<float, 2 * CHUNK>& rows) {
        const int row = lane_row();
        const auto upper = arch::load_shared<float2>(rows.address_of(2 * row));
        const auto lower = arch::load_shared<float2>(rows.address_of(2 * row + 16));
        reciprocal = {upper.x, lower.x};
        delta = {upper.y, lower.y};
    }
};

// Calls work(j, i, low, sum) for each pair i of a lane's elements in block j of one sign's
// features, `low` in its lower row, and the sums of the pair's features.
template <class K, int sign, class Work>
__device__ __forceinline__ void for_each_with_sums(const sv<float, 2 * K::features>& sums,
                                                   Work work) {
#pragma unroll
    for (int j = 0; j < K::features / 16; ++j) {
        arch::sync_warp();  // else all of the sums are loaded before, into registers
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int column = 16 * j + 8 * half + 2 * (laneid() % 4);
            const float2 s =
                arch::load_shared<float2>(sums.address_of(sign * K::features + column));
#pragma unroll
            for (int low = 0; low < 2; ++low) work(j, 2 * half + low, low != 0, s);
        }
    }
}

// Of one sign of the feature map, whose features phi have the gradient y / denominator, y = g -
// range delta sums: the lane's part of phi . gradient; g becomes sign factor phi (y - phi . y) /
// denominator, plus `first` for the second sign. With
// plain_exponentials z becomes exp(z), then 1 / exp(z).
template <class K, int sign, bool plain_exponentials, class Factor>
__device__ __forceinline__ float softmax_gradient(typename K::projection& g,
                                                  typename K::projection& z,
                                                  const sv<float, 2 * K::features>& sums,
                                                  const sv<float, 2 * CHUNK>& rows, float range,
                                                  Factor factor,
                                                  const rt<typename K::T, 16, K::features>& first) {
    constexpr float unit = sign == 0 ? LOG2_E : -LOG2_E;
    float2 top = {0.0f, 0.0f};
    if constexpr (!plain_exponentials) {
        top = {-INFINITY, -INFINITY};
        for_each_element(z, [&](float x, int, bool low) {
            float& t = low ? top.y : top.x;
            t = fmaxf(t, sign == 0 ? x : -x);
        });
        top = {quad_maximum(top.x) * LOG2_E, quad_maximum(top.y) * LOG2_E};
    }
    const auto exponential = [&](float x, float shift) {
        if constexpr (!plain_exponentials)
            return arch::exp2_approx(fmaf(x, unit, -shift));
        else
            return sign == 0 ? arch::exp2_approx(x * unit) : arch::reciprocal_approx(x);
    };
    float2 sum = {0.0f, 0.0f}, dot = {0.0f, 0.0f};
    float2 delta = QueryRows(rows).delta;
    delta = {range * delta.x, range * delta.y};
    for_each_with_sums<K, sign>(sums, [&](int j, int i, bool low, float2 s) {
        const float d = low ? delta.y : delta.x, shift = low ? top.y : top.x;
        float2 &pair = z.tiles[0][j].data[i], &y = g.tiles[0][j].data[i];
        const float2 e = {exponential(pair.x, shift), exponential(pair.y, shift)};
        if constexpr (plain_exponentials) pair = e;
        y = {fmaf(-d, s.x, y.x), fmaf(-d, s.y, y.y)};
        float &t = low ? sum.y : sum.x, &p = low ? dot.y : dot.x;
        t += e.x + e.y;
        p = fmaf(e.x, y.x, fmaf(e.y, y.y, p));
    });
    const float2 r = {arch::reciprocal_approx(quad_sum(sum.x)),
                      arch::reciprocal_approx(quad_sum(sum.y))};
    dot = {quad_sum(dot.x) * r.x, quad_sum(dot.y) * r.y};
    const float2 reciprocal = QueryRows(rows).reciprocal;
    const float signed_factor = sign == 0 ? factor() : -factor();
    const float2 f = {signed_factor * r.x * reciprocal.x, signed_factor * r.y * reciprocal.y};
    const float2 c = {f.x * dot.x, f.y * dot.y};
#pragma unroll
    for (int j = 0; j < K::features / 16; ++j) {
        arch::sync_warp();
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float fr = i % 2 ? f.y : f.x, cr = i % 2 ? c.y : c.x,
                        shift = i % 2 ? top.y : top.x;
            const float2 pair = z.tiles[0][j].data[i];
            float2& y = g.tiles[0][j].data[i];
            const float2 e = plain_exponentials
                                 ? pair
                                 : float2{exponential(pair.x, shift), exponential(pair.y, shift)};
            y = {fmaf(fr, y.x, -cr), fmaf(fr, y.y, -cr)};
            if constexpr (sign == 0) {
                y = {e.x * y.x, e.y * y.y};
            } else {
                const float2 other = unpack_pair<typename K::T>(first.tiles[0][j].data[i]);
                y = {fmaf(e.x, y.x, other.x), fmaf(e.y, y.y, other.y)};
            }
        }
    }
    return reciprocal.x * dot.x + reciprocal.y * dot.y;
}

// A power of two that brings sums in half into their range; 1 in bf16.
template <class K>
__device__ __forceinline__ float range_factor(LolcatsRunningState<K>& sums, sv<float, 16>& scratch,
                                              int barrier) {
    if constexpr (!LolcatsGradient<K>::is_half) {
        return 1.0f;
    } else {
        float most = sums.largest();
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2)
            most = fmaxf(most, arch::shuffle_xor(most, distance));
        if (laneid() == 0) scratch.set(warpgroup::warpid(), most);
        warpgroup::sync(barrier);
#pragma unroll
        for (int w = 0; w < WARPGROUP_WARPS; ++w) most = fmaxf(most, scratch.get(w));
        const int exponent = int(arch::bit_cast<uint32_t>(most) >> 23) - 127;
        // 2^13 at most, so that nothing overflows; infinities and NaN stay.
        if (exponent < -60 || exponent > 127) return 1.0f;
        return arch::bit_cast<float>(uint32_t(127 + 13 - exponent) << 23);
    }
}

// The sums over 64 tokens of weight(token) times two neighbouring features, those from `feature` on
// of a tile. A warp has `pairs` pairs of features, and so many lanes divide the tokens of each.
template <int pairs, bool few_registers, class Tile, class Weight>
__device__ __forceinline__ float2 weighted_feature_sum(const Tile& tile, int feature,
                                                       Weight weight) {
    using T = typename Tile::T;
    constexpr int parts = WARP_THREADS / pairs;
    constexpr int run = 8 / parts;  // tokens; so that the parts of a warp use different banks
    const int part = laneid() / pairs;
    float2 sum = {0.0f, 0.0f};
#pragma unroll
    for (int t = 0; t < CHUNK / parts; ++t) {
        // Else all are loaded before, into registers.
        if (few_registers && t % 4 == 0) arch::sync_warp();
        const int token = t / run * 8 + part * run + t % run;
        const float2 x =
            unpack_pair<T>(arch::load_shared<packed_type<T>>(tile.address_of(token, feature)));
        const float w = weight(token);
        sum = {fmaf(w, x.x, sum.x), fmaf(w, x.y, sum.y)};
    }
#pragma unroll
    for (int distance = pairs; distance < WARP_THREADS; distance *= 2) {
        sum.x += arch::shuffle_xor(sum.x, distance);
        sum.y += arch::shuffle_xor(sum.y, distance);
    }
    return sum;
}

// The sums of a warp's own features over a chunk, each times one number of its token, on the tensor
// cores: features as rows, tokens' numbers as two columns whose sums are wanted together. Of each
// quad the first lane has them.
template <any_shared_tile Tile, int features>
struct FeatureSums {
    using T = typename Tile::T;
    static constexpr int blocks = features / 16;
    float sums[blocks][4] = {};

    // Columns of `tile` from `first` on; weights(token) is the lane's two tokens' operand.
    template <class Weights>
    __device__ __forceinline__ void add(const Tile& tile, int first, Weights weights) {
        uint32_t place[blocks];
#pragma unroll
        for (int j = 0; j < blocks; ++j)
            place[j] = kittens::detail::matrix_row_address<typename rt<T, 16, 16, col_l>::base>(
                tile, 0, first + 16 * j);
#pragma unroll
        for (int k = 0; k < CHUNK / 16; ++k) {
            const int token = 16 * k + 2 * (laneid() % 4);
            const uint32_t pair[2] = {weights(token), weights(token + 8)};
#pragma unroll
            for (int j = 0; j < blocks; ++j) {
                uint32_t words[4];
                arch::load_matrix_x4_transposed(words[0], words[1], words[2], words[3],
                                                place[j] + uint32_t(2048 * k));
                auto& sum = sums[j];
                const float before[4] = {sum[0], sum[1], sum[2], sum[3]};
                arch::mma_sync<T, T>::fma(sum, words, pair, before);
            }
        }
    }
    // To a vector, from its element `first` on.
    template <any_shared_vector Vector>
    __device__ __forceinline__ void add_to(Vector& to, int first) const {
        if (laneid() % 4 != 0) return;
#pragma unroll
        for (int j = 0; j < blocks; ++j) {
            const int at = first + 16 * j + laneid() / 4;
            to.set(at, to.get(at) + (sums[j][0] + sums[j][1]));
            to.set(at + 8, to.get(at + 8) + (sums[j][2] + sums[j][3]));
        }
    }
};

// FeatureSums' operand of plain sums, and that of sums of features times the weights' second
// numbers: as the high and the low part of 16-bit operands.
template <class T>
struct Ones {
    __device__ __forceinline__ uint32_t operator()(int) const {
        return laneid() / 4 == 0 ? arch::bit_cast<uint32_t>(pack_pair<T>(1.0f, 1.0f)) : 0u;
    }
};
template <class T>
struct DeltaParts {
    const WeightVector& weights;

    __device__ __forceinline__ uint32_t operator()(int token) const {
        const int column = laneid() / 4;
        const auto pairs = arch::load_shared<float4>(weights.address_of(2 * token));
        auto high = pack_pair<T>(pairs.y, pairs.w);
        const float2 whole = unpack_pair<T>(high);
        const auto low = pack_pair<T>(pairs.y - whole.x, pairs.w - whole.y);
        if (column > 1) return 0u;
        return arch::bit_cast<uint32_t>(column == 0 ? high : low);
    }
};

// Features of queries, times their weights, and the sums of these times delta.
template <class K>
__device__ __forceinline__ void make_weighted_features(typename K::Features& features,
                                                       const typename K::projection& z,
                                                       const WeightVector& weights) {
    make_features<K>(features, z);
    const int row = lane_row();
    constexpr float unit = LolcatsGradient<K>::weight_unit;
    const float2 w = {unit * weights.get(2 * row), unit * weights.get(2 * row + 16)};
#pragma unroll
    for (int t = 0; t < K::groups; ++t) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                auto& word = features.groups[t].tiles[0][j].data[i];
                const float2 pair = unpack_pair<typename K::T>(word);
                const float f = i % 2 ? w.y : w.x;
                word = pack_pair<typename K::T>(f * pair.x, f * pair.y);
            }
        }
    }
}
template <class K>
__device__ __forceinline__ void add_delta(LolcatsRunningState<K>& sums,
                                          const typename K::feature_tile (&features)[K::groups],
                                          const WeightVector& weights) {
    using Sums = LolcatsRunningState<K>;
    const int feature = Sums::own_feature();
    const auto& tile = features[K::groups > 1 ? feature / 64 : 0];
    const float2 sum = weighted_feature_sum<Sums::warp_pairs, false>(
        tile, feature % 64, [&](int token) { return weights.get(2 * token + 1); });
    sums.denominator = {sums.denominator.x + sum.x, sums.denominator.y + sum.y};
}

}  // namespace thunderkittens::linear_attention
