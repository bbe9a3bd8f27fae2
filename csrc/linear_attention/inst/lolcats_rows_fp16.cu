#include "csrc/linear_attention/lolcats/rows_sm90.cuh"

namespace thunderkittens::linear_attention {
template void launch_lolcats_combine<DType::fp16>(const LolcatsBackwardParams&,
                                                  const LolcatsBackwardWorkspace&, Stream);
}  // namespace thunderkittens::linear_attention
