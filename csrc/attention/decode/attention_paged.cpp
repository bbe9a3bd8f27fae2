// The ops attention_paged and attention_schedule for CUDA.
#include <tuple>
#include <utility>

#include "csrc/attention/decode/attention_paged_body.h"
#include "csrc/common/tensor.h"

namespace thunderkittens::attention::decode {

std::tuple<Tensor, Tensor> attention_paged(
    const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, std::optional<Tensor> page_table,
    const Tensor& seq_lens, DECODE_SEQUENCES, std::optional<Tensor> cache_batch_idx,
    std::optional<double> scale, double softcap, std::optional<Tensor> alibi_slopes,
    std::optional<Tensor> sink, std::optional<Tensor> mask, std::optional<Tensor> schedule,
    std::optional<Tensor> rotary_cos, std::optional<Tensor> rotary_sin, bool rotary_interleaved,
    std::optional<Tensor> rotary_seqlens, std::optional<Tensor> k_scale,
    std::optional<Tensor> v_scale, std::optional<Tensor> q_scale,
    std::optional<Tensor> k_block_scale, std::optional<Tensor> v_block_scale) {
    const CacheOptions<Tensor> options{
        page_table, cache_batch_idx, scale,      softcap,       alibi_slopes,   sink,
        mask,       schedule,        rotary_cos, rotary_sin,    rotary_seqlens, rotary_interleaved,
        k_scale,    v_scale,         q_scale,    k_block_scale, v_block_scale};
    Tensor lse;
    Tensor out = attention_paged_body<Tensor>(gpu, q, k_cache, v_cache, DECODE_SEQUENCE_VALUES,
                                              options, &lse);
    return {out, lse};
}

// By few arguments, since each of them costs the host time.
Tensor attention_paged_forward(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                               std::optional<Tensor> page_table, const Tensor& seq_lens,
                               std::optional<Tensor> schedule, std::optional<Tensor> k_scale,
                               std::optional<Tensor> v_scale, std::optional<Tensor> k_block_scale,
                               std::optional<Tensor> v_block_scale, std::optional<double> scale,
                               int64_t new_keys) {
    const SequenceOptions<Tensor> sequences{.seq_lens = seq_lens, .new_keys = new_keys};
    const CacheOptions<Tensor> options{.page_table = std::move(page_table),
                                       .scale = scale,
                                       .schedule = std::move(schedule),
                                       .k_scale = std::move(k_scale),
                                       .v_scale = std::move(v_scale),
                                       .k_block_scale = std::move(k_block_scale),
                                       .v_block_scale = std::move(v_block_scale)};
    return attention_paged_body<Tensor>(gpu, q, k_cache, v_cache, sequences, options, nullptr);
}

Tensor attention_schedule(const Tensor& seq_lens, int64_t q_heads, int64_t kv_heads,
                          int64_t head_dim, int64_t value_dim, DECODE_SEQUENCES, bool mask,
                          bool codes) {
    return attention_schedule_body<Tensor>(gpu, DECODE_SEQUENCE_VALUES, q_heads, kv_heads, head_dim,
                                           value_dim, mask, codes);
}

STABLE_TORCH_LIBRARY_IMPL(thunderkittens, CUDA, m) {
    m.impl("attention_paged", TORCH_BOX(&attention_paged));
    m.impl("attention_paged_forward", TORCH_BOX(&attention_paged_forward));
    m.impl("attention_schedule", TORCH_BOX(&attention_schedule));
}

}  // namespace thunderkittens::attention::decode
