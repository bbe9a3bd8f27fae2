#include "csrc/linear_attention/lolcats/forward_sm90.cuh"

namespace thunderkittens::linear_attention {
template void launch_lolcats_forward<DType::bf16, 64, 32>(const LolcatsParams&,
                                                          const LolcatsWorkspace&, Stream);
template void launch_lolcats_forward<DType::bf16, 64, 64>(const LolcatsParams&,
                                                          const LolcatsWorkspace&, Stream);
}  // namespace thunderkittens::linear_attention
