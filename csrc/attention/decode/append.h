// Writing new keys and values into a cache, and merging results of parts of the keys: one call of
// each. Host C++ only.
#pragma once

#include "csrc/attention/decode/decode.h"

namespace thunderkittens::attention::decode {

struct AppendProblem {
    DType dtype = DType::bf16;
    int64_t tokens = 0, kv_heads = 0;
    int64_t head_dim = 0, value_dim = 0;
    bool codes = false;  // into a cache of 8 bits, or less
    bool nvfp4 = false;  // of 4
};
struct AppendChoice {
    bool codes = false, nvfp4 = false;
    DType dtype = DType::bf16;
    bool portable = false;
};

struct AppendParams {
    AppendProblem problem;
    Operand k, v;  // rows of tokens: (tokens, heads, dim), or with batches of row_count
    int64_t row_count = 0;
    Cache k_cache, v_cache;
    int64_t pages_count = 0;
    Pages pages;
    // Where tokens go: a slot each, page * page_size + offset, none if negative; or behind the keys
    // that their sequence has.
    const int64_t* slot_mapping = nullptr;
    const int* k_lengths = nullptr;  // (batch,)
    const int* cu_new = nullptr;     // (batch + 1,); null: row_count tokens each
    int64_t batch = 0, most_keys = 0;
    CacheFormat format = CacheFormat::same;
    BlockScales block_scales;            // of NVFP4: they are written
    Scales k_scale, v_scale;             // of tokens: they are written, too
    const int* rotary_begins = nullptr;  // (batch,) positions of first tokens; null: k_lengths
    Rotary rotary;
    const int* rotary_positions = nullptr;  // (tokens,); null: where the token goes
};

TK_FIELDS(AppendProblem, dtype, tokens, kv_heads, head_dim, value_dim, codes, nvfp4)
TK_FIELDS(AppendChoice, codes, nvfp4, dtype, portable)

std::string unsupported_append(const AppendProblem& problem, const DeviceProperties& device);
AppendChoice choose_append(const AppendProblem& problem, const DeviceProperties& device);
std::string kernel_name(const AppendChoice& choice);

template <DType dtype>
void launch_append(const AppendParams& params, Stream stream);
template <DType dtype>
void launch_portable_append(const AppendParams& params, Stream stream);

constexpr int MOST_MERGED = 16;
struct MergeProblem {
    DType dtype = DType::bf16;
};
struct MergeChoice {
    DType dtype = DType::bf16;
    bool portable = false;
};
TK_FIELDS(MergeProblem, dtype)
TK_FIELDS(MergeChoice, dtype, portable)

std::string unsupported_merge(const MergeProblem& problem, const DeviceProperties& device);
MergeChoice choose_merge(const MergeProblem& problem, const DeviceProperties& device);
std::string kernel_name(const MergeChoice& choice);

struct MergeParams {
    DType dtype = DType::bf16;
    int64_t batch = 0, heads = 0, length = 0, dim = 0;
    int count = 0;
    Operand parts[MOST_MERGED], out;
    // By batch, head and position.
    const float* lses[MOST_MERGED] = {};
    int64_t lse_strides[MOST_MERGED][3] = {};
    float* lse = nullptr;  // (batch, heads, length)
};

template <DType dtype>
void launch_merge(const MergeParams& params, Stream stream);
template <DType dtype>
void launch_portable_merge(const MergeParams& params, Stream stream);

}  // namespace thunderkittens::attention::decode
