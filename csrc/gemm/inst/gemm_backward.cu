// The gradient through a gate, of every dtype and layout.
#include "csrc/gemm/dense/gemm_backward_sm90.cuh"

namespace thunderkittens::gemm_backward {
template void launch<CONFIGS[0]>(const Params&, Stream);
template void launch<CONFIGS[1]>(const Params&, Stream);
template void launch<CONFIGS[2]>(const Params&, Stream);
template void launch<CONFIGS[3]>(const Params&, Stream);
template void launch<CONFIGS[4]>(const Params&, Stream);
template void launch<CONFIGS[5]>(const Params&, Stream);
}  // namespace thunderkittens::gemm_backward
