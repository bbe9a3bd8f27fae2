// Rows of keys and values between the caches of a state and the order of tokens: the first 128 rows
// that a continued call sees, and the caches of the state after the last token. A warp copies rows
// of both, 16 bytes per lane. And the launch of the prefix sums. The portable kernel is this one.
#pragma once

#include "csrc/linear_attention/based/scan_sm90.cuh"
#include "csrc/linear_attention/lolcats/types.cuh"

namespace thunderkittens::linear_attention {

constexpr int KV_CACHE_THREADS = 128;

struct KvCacheGlobals {
    Operand k, v;  // the new tokens
    const uint4 *cached_keys, *cached_values;
    const int* lengths;  // before the new tokens; null: no state
    uint4 *keys, *values;
    int* lengths_after;           // null: the rows in the order of tokens are wanted
    int kv_heads, length, words;  // words of 16 bytes per row
};

template <bool portable>
__global__ __launch_bounds__(KV_CACHE_THREADS) void lolcats_kv_cache_kernel(
    const __grid_constant__ KvCacheGlobals g) {
    const int batch_head = int(blockIdx.x), b = batch_head / g.kv_heads,
              head = batch_head % g.kv_heads;
    const Terrace terrace(g.lengths, b, g.length);
    const int after = terrace.before + g.length, first = terrace.before - terrace.cached;
    if (g.lengths_after != nullptr && blockIdx.y == 0 && head == 0 && threadIdx.x == 0)
        arch::store_global(g.lengths_after + b, after);
    const int index = int(blockIdx.y) * KV_CACHE_THREADS + int(threadIdx.x);
    const int row = index / g.words, word = index % g.words;
    if (row >= CACHE) return;
    int token = first + row;  // -1: none
    if (g.lengths_after != nullptr) {
        token = after - 1 - (((after - 1 - row) % CACHE + CACHE) % CACHE);
        if (token < ::max(after / WINDOW - 1, 0) * WINDOW) token = -1;
    } else if (token >= after) {
        token = -1;
    }
    const auto copy = [&](uint4* to, const uint4* cached, const Operand& x) {
        uint4 value = make_uint4(0, 0, 0, 0);
        if (token >= terrace.before) {
            const auto* rows = static_cast<const uint16_t*>(x.data) + b * x.batch_stride +
                               head * x.head_stride + (token - terrace.before) * x.row_stride;
            value = arch::load_global(reinterpret_cast<const uint4*>(rows) + word);
        } else if (token >= 0) {
            value = arch::load_global(
                cached + (int64_t(batch_head) * CACHE + token % CACHE) * g.words + word);
        }
        arch::store_global(to + (int64_t(batch_head) * CACHE + row) * g.words + word, value);
    };
    copy(g.keys, g.cached_keys, g.k);
    copy(g.values, g.cached_values, g.v);
}

template <bool portable>
void launch_kv_cache(const LolcatsParams& params, void* keys, void* values, int* lengths_after,
                     Stream stream) {
    const LolcatsProblem& p = params.problem;
    const KvCacheGlobals globals{.k = params.k,
                                 .v = params.v,
                                 .cached_keys = static_cast<const uint4*>(params.initial.keys),
                                 .cached_values = static_cast<const uint4*>(params.initial.values),
                                 .lengths = params.initial.lengths,
                                 .keys = static_cast<uint4*>(keys),
                                 .values = static_cast<uint4*>(values),
                                 .lengths_after = lengths_after,
                                 .kv_heads = int(p.kv_heads),
                                 .length = int(p.length),
                                 .words = int(p.head_dim / 8)};
    const auto blocks = unsigned(CACHE * globals.words / KV_CACHE_THREADS);
    kittens::launch(lolcats_kv_cache_kernel<portable>, dim3(unsigned(p.batch * p.kv_heads), blocks),
                    dim3(KV_CACHE_THREADS), dim3(1), 0, stream, globals);
}

template <bool portable>
void launch_lolcats_first_rows(const LolcatsParams& params, const LolcatsWorkspace& workspace,
                               Stream stream) {
    launch_kv_cache<portable>(params, workspace.first_keys, workspace.first_values, nullptr,
                              stream);
}
template <bool portable>
void launch_lolcats_kv_cache(const LolcatsParams& params, Stream stream) {
    launch_kv_cache<portable>(params, params.final.keys, params.final.values, params.final.lengths,
                              stream);
}

template <bool portable>
void launch_lolcats_scan(const LolcatsParams& params, const LolcatsWorkspace& workspace,
                         Stream stream) {
    static_assert(!portable, "what makes the sums has a scan of its own");
    const LolcatsProblem& p = params.problem;
    launch_scan<float4>({workspace.segment_states, nullptr, nullptr, int(state_floats_of_head(p)),
                         params.segments, false},
                        p.batch * p.heads, stream);
}

}  // namespace thunderkittens::linear_attention
