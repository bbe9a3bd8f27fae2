#include "csrc/attention/backward_rows_sm90.cuh"

namespace thunderkittens::attention {
#define ROWS const BackwardParams&, const Workspace&, const DqTiles&, Stream
template void launch_prepare<DType::bf16>(ROWS);
template void launch_prepare<DType::fp16>(ROWS);
template void launch_finish<DType::bf16>(ROWS);
template void launch_finish<DType::fp16>(ROWS);
}  // namespace thunderkittens::attention
