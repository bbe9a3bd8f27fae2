#include "csrc/linear_attention/lolcats/key_gradient_sm90.cuh"

namespace thunderkittens::linear_attention {
template void launch_lolcats_key_gradient<DType::bf16, 128, 32>(const LolcatsBackwardParams&,
                                                                const LolcatsBackwardWorkspace&,
                                                                Stream);
template void launch_lolcats_key_gradient<DType::bf16, 128, 64>(const LolcatsBackwardParams&,
                                                                const LolcatsBackwardWorkspace&,
                                                                Stream);
}  // namespace thunderkittens::linear_attention
