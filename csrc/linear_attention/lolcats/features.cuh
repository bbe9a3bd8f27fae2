// Features of LoLCATS and their sums with fewer instructions than in state.cuh, for the
// forward, whose time these are, and where the gradient's kernels have registers to spare.
#pragma once

#include "csrc/linear_attention/lolcats/state.cuh"

namespace thunderkittens::linear_attention {

// The state before a segment: sums of all of its predecessors', or a scan has left them.
template <class K>
__device__ __forceinline__ void add_segments_before(LolcatsSums<K>& sums, const float* states,
                                                    const LolcatsItem& item, int segments,
                                                    uint32_t buffer) {
    constexpr int64_t size = int64_t(2 * K::features) * (K::head_dim + 1);
    const bool scanned = segments > ADDED_SEGMENTS;
    const int first = item.line * segments + (scanned ? item.segment : 0);
    sums.add_segments(states + first * size, scanned ? 1 : item.segment, buffer);
}

// `make_features` times `scale`. The maxima, which keep exponentials finite and sums of them from
// 0, are looked for only where a warp needs them: maxima of magnitudes are half the work.
template <class K>
__device__ __forceinline__ void make_scaled_features(typename K::Features& features,
                                                     const typename K::projection& z, float scale) {
    constexpr float harmless = 40.0f;
    float top = 0.0f;
#pragma unroll
    for (int j = 0; j < K::features / 16; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 pair = z.tiles[0][j].data[i];
            top = fmaxf(top, fmaxf(fabsf(pair.x), fabsf(pair.y)));
        }
    }
    float2 most = {0.0f, 0.0f}, least = {0.0f, 0.0f};
    if (arch::any_lane(!(top < harmless))) {
        projection_maxima<K>(z, most, least);
    }
    softmax_features<K>(features, z, 1.0f, most, 0, scale);
    softmax_features<K>(features, z, -1.0f, least, K::features / 16, scale);
}

// Where a lane names the rows of 16 x 16 elements to ldmatrix and stmatrix, in a tile of rows of
// 128 bytes: one address for all columns, because columns change bits that nothing else does.
template <any_shared_tile Tile>
struct TileParts {
    static_assert(Tile::swizzle_bytes == 128 && sizeof(typename Tile::T) == 2);
    using T = typename Tile::T;
    uint32_t first;

    __device__ __forceinline__ TileParts(const Tile& tile, int row)
        : first(kittens::detail::matrix_row_address<typename rt<T, 16, 16>::base>(tile, row, 0)) {}
    // Of columns from 16 j on, `ahead` bytes behind the tile.
    __device__ __forceinline__ uint32_t at(int j, int ahead) const {
        return (first ^ uint32_t(32 * (j % 4))) + uint32_t(j / 4 * Tile::stripe_bytes + ahead);
    }
    __device__ __forceinline__ void store(int j, const packed_type<T> (&data)[4],
                                          int ahead = 0) const {
        arch::store_matrix_x4(at(j, ahead), arch::bit_cast<uint32_t>(data[0]),
                              arch::bit_cast<uint32_t>(data[1]), arch::bit_cast<uint32_t>(data[2]),
                              arch::bit_cast<uint32_t>(data[3]));
    }
};

template <class K>
__device__ __forceinline__ void store_feature_parts(typename K::feature_tile (&to)[K::groups],
                                                    const typename K::Features& features) {
    const TileParts<typename K::feature_tile> parts(to[0], 16 * warpgroup::warpid());
#pragma unroll
    for (int t = 0; t < K::groups; ++t) {
#pragma unroll
        for (int j = 0; j < 4; ++j)
            parts.store(j, features.groups[t].tiles[0][j].data, t * int(sizeof(to[0])));
    }
}

// `LolcatsSums::publish`.
template <class K>
__device__ __forceinline__ void publish_parts(const LolcatsSums<K>& sums,
                                              typename K::state_tile (&to)[K::groups],
                                              float factor) {
    const TileParts<typename K::state_tile> parts(to[0], 16 * warpgroup::warpid());
#pragma unroll
    for (int t = 0; t < K::groups; ++t) {
#pragma unroll
        for (int j = 0; j < K::head_dim / 16; ++j) {
            packed_type<typename K::T> part[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 pair = sums.numerator[t].tiles[0][j].data[i];
                part[i] = pack_pair<typename K::T>(factor * pair.x, factor * pair.y);
            }
            parts.store(j, part, t * int(sizeof(to[0])));
        }
    }
}

// `LolcatsSums::add_denominator` on the tensor cores, by a product with ones: fewer instructions.
template <class K>
__device__ __forceinline__ void count_features(
    LolcatsSums<K>& total, const typename K::feature_tile (&features)[K::groups]) {
    using T = typename K::T;
    constexpr int warp_pairs = LolcatsSums<K>::warp_pairs;
    constexpr int tiles = warp_pairs / 4;  // of 8 features
    const int first = 2 * warp_pairs * warpgroup::warpid();
    const auto& tile = features[K::groups > 1 ? first / 64 : 0];
    const uint32_t one = arch::bit_cast<uint32_t>(pack_pair<T>(1.0f, 1.0f));
    const uint32_t ones[4] = {one, one, one, one};
    float sums[tiles][4] = {};
#pragma unroll
    for (int j = 0; j < tiles / 2; ++j) {
        const uint32_t place =
            kittens::detail::matrix_row_address<typename rt<T, 16, 16, col_l>::base>(
                tile, 0, first % 64 + 16 * j);
#pragma unroll
        for (int k = 0; k < CHUNK / 16; ++k) {
            uint32_t words[4];
            arch::load_matrix_x4_transposed(words[0], words[1], words[2], words[3],
                                            place + uint32_t(2048 * k));
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                auto& sum = sums[2 * j + n];
                const uint32_t pair[2] = {words[n], words[n + 2]};
                const float before[4] = {sum[0], sum[1], sum[2], sum[3]};
                arch::mma_sync<T, T>::fma(sum, ones, pair, before);
            }
        }
    }
    const int own = laneid() % warp_pairs / 4;
#pragma unroll
    for (int t = 0; t < tiles; ++t) {
        total.denominator.x += own == t ? sums[t][0] : 0.0f;
        total.denominator.y += own == t ? sums[t][1] : 0.0f;
    }
}

}  // namespace thunderkittens::linear_attention
