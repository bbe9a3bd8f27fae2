#include "csrc/linear_attention/lolcats/decode_sm90.cuh"

namespace thunderkittens::linear_attention {
template void launch_lolcats_decode<DType::fp16, 64, 32>(const LolcatsDecodeParams&, Stream);
template void launch_lolcats_decode<DType::fp16, 64, 64>(const LolcatsDecodeParams&, Stream);
template void launch_lolcats_decode<DType::fp16, 128, 32>(const LolcatsDecodeParams&, Stream);
template void launch_lolcats_decode<DType::fp16, 128, 64>(const LolcatsDecodeParams&, Stream);
}  // namespace thunderkittens::linear_attention
