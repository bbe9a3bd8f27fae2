// The op merge_attention for CUDA.
#include <tuple>
#include <vector>

#include "csrc/attention/decode/merge_attention_body.h"
#include "csrc/common/tensor.h"

namespace thunderkittens::attention::decode {

std::tuple<Tensor, Tensor> merge_attention(std::vector<Tensor> outs, std::vector<Tensor> lses) {
    Tensor lse;
    Tensor out = merge_attention_body<Tensor>(gpu, outs, lses, lse);
    return {out, lse};
}

STABLE_TORCH_LIBRARY_IMPL(thunderkittens, CUDA, m) {
    m.impl("merge_attention", TORCH_BOX(&merge_attention));
}

}  // namespace thunderkittens::attention::decode
