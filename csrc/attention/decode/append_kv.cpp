// The op append_kv for CUDA.
#include "csrc/attention/decode/append_kv_body.h"
#include "csrc/common/tensor.h"

namespace thunderkittens::attention::decode {

void append_kv(const Tensor& k, const Tensor& v, const Tensor& k_cache, const Tensor& v_cache,
               std::optional<Tensor> page_table, std::optional<Tensor> seq_lens,
               std::optional<Tensor> slot_mapping, std::optional<Tensor> cache_batch_idx,
               std::optional<Tensor> cu_seqlens_k_new, std::optional<Tensor> rotary_cos,
               std::optional<Tensor> rotary_sin, std::optional<Tensor> rotary_positions,
               std::optional<Tensor> rotary_seqlens, bool rotary_interleaved,
               std::optional<Tensor> k_scale, std::optional<Tensor> v_scale,
               std::optional<Tensor> k_block_scale, std::optional<Tensor> v_block_scale) {
    append_kv_body<Tensor>(gpu, k, v, k_cache, v_cache,
                           {page_table, seq_lens, slot_mapping, cache_batch_idx, cu_seqlens_k_new,
                            rotary_cos, rotary_sin, rotary_positions, rotary_seqlens,
                            rotary_interleaved, k_scale, v_scale, k_block_scale, v_block_scale});
}

STABLE_TORCH_LIBRARY_IMPL(thunderkittens, CUDA, m) { m.impl("append_kv", TORCH_BOX(&append_kv)); }

}  // namespace thunderkittens::attention::decode
