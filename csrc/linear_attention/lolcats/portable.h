// LoLCATS for every GPU from compute capability 8.0 on: its launches, and what they need of shared
// memory. Host C++ only.
//
// A first kernel makes the features of all queries and keys. The forward is one more, and what
// makes segments' sums; in the gradient the linear part walks over the chunks, while the window's
// part has a block for each.
#pragma once

#include "csrc/linear_attention/lolcats/backward.h"

namespace thunderkittens::linear_attention {

// Dynamic shared memory of a block: 99 KB at most, which every GPU has.
constexpr int PORTABLE_FEATURES_BYTES = 48 * 1024, PORTABLE_LOLCATS_SEGMENTS_BYTES = 16 * 1024,
              PORTABLE_FEATURE_MAP_GRADIENT_BYTES = 48 * 1024;
constexpr int portable_lolcats_forward_bytes(int head_dim, int features) {
    return 3 * CHUNK * head_dim * 2 + 2 * CHUNK * VALUES * 2 + 2 * features * VALUES * 2 +
           2 * features * 4 + 256;
}
constexpr int portable_linear_gradient_bytes(int head_dim, int features) {
    return 2 * CHUNK * head_dim * 2 + 2 * features * head_dim * 2 + CHUNK * features * 4 +
           2 * features * 4 + 256;
}
constexpr int portable_window_gradient_bytes(int head_dim) {
    return 6 * CHUNK * head_dim * 2 + 2 * 4 * CHUNK * 4 + 256;
}
constexpr int PORTABLE_LOLCATS_BYTES = portable_window_gradient_bytes(128);
static_assert(PORTABLE_LOLCATS_BYTES <= 99 * 1024);

// Features of queries times their weights are small numbers in half.
constexpr float HALF_WEIGHT_UNIT = 32.0f;

template <DType dtype, int head_dim, int features>
void launch_portable_lolcats_features(const LolcatsParams& params, const LolcatsWorkspace& w,
                                      Stream stream);
template <DType dtype, int head_dim, int features>
void launch_portable_lolcats_forward(const LolcatsParams& params, const LolcatsWorkspace& w,
                                     Stream stream);
// With the scan behind it.
template <DType dtype, int head_dim, int features>
void launch_portable_lolcats_segment_states(const LolcatsParams& params, const LolcatsWorkspace& w,
                                            Stream stream);
template <DType dtype, int head_dim, int features>
void launch_portable_lolcats_segment_state_gradients(const LolcatsBackwardParams& params,
                                                     const LolcatsBackwardWorkspace& w,
                                                     Stream stream);
template <DType dtype, int head_dim, int features>
void launch_portable_lolcats_rows(const LolcatsBackwardParams& params,
                                  const LolcatsBackwardWorkspace& w, Stream stream);
template <DType dtype, int head_dim, int features>
void launch_portable_lolcats_linear_queries(const LolcatsBackwardParams& params,
                                            const LolcatsBackwardWorkspace& w, Stream stream);
template <DType dtype, int head_dim, int features>
void launch_portable_lolcats_linear_keys(const LolcatsBackwardParams& params,
                                         const LolcatsBackwardWorkspace& w, Stream stream);
template <DType dtype, int head_dim, int features>
void launch_portable_lolcats_query_gradient(const LolcatsBackwardParams& params,
                                            const LolcatsBackwardWorkspace& w, Stream stream);
template <DType dtype, int head_dim, int features>
void launch_portable_lolcats_key_gradient(const LolcatsBackwardParams& params,
                                          const LolcatsBackwardWorkspace& w, Stream stream);
template <DType dtype, int head_dim, int features>
void launch_portable_lolcats_feature_map_gradient(const LolcatsBackwardParams& params,
                                                  const LolcatsBackwardWorkspace& w, Stream stream);

}  // namespace thunderkittens::linear_attention
