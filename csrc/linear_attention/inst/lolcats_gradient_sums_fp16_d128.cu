#include "csrc/linear_attention/lolcats/gradient_sums_sm90.cuh"

namespace thunderkittens::linear_attention {
template void launch_lolcats_gradient_sums<DType::fp16, 128, 32>(const LolcatsBackwardParams&,
                                                                 const LolcatsBackwardWorkspace&,
                                                                 Stream);
template void launch_lolcats_gradient_sums<DType::fp16, 128, 64>(const LolcatsBackwardParams&,
                                                                 const LolcatsBackwardWorkspace&,
                                                                 Stream);
}  // namespace thunderkittens::linear_attention
