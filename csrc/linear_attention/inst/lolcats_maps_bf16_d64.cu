#include "csrc/linear_attention/lolcats/maps_sm90.cuh"

namespace thunderkittens::linear_attention {
template void launch_lolcats_map_gradients<DType::bf16, 64, 32>(const LolcatsBackwardParams&,
                                                                const LolcatsBackwardWorkspace&,
                                                                Stream);
template void launch_lolcats_map_gradients<DType::bf16, 64, 64>(const LolcatsBackwardParams&,
                                                                const LolcatsBackwardWorkspace&,
                                                                Stream);
}  // namespace thunderkittens::linear_attention
