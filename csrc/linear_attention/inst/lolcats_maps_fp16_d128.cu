#include "csrc/linear_attention/lolcats/maps_sm90.cuh"

namespace thunderkittens::linear_attention {
template void launch_lolcats_map_gradients<DType::fp16, 128, 32>(const LolcatsBackwardParams&,
                                                                 const LolcatsBackwardWorkspace&,
                                                                 Stream);
template void launch_lolcats_map_gradients<DType::fp16, 128, 64>(const LolcatsBackwardParams&,
                                                                 const LolcatsBackwardWorkspace&,
                                                                 Stream);
}  // namespace thunderkittens::linear_attention
