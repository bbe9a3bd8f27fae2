#include "csrc/attention/backward_rows_sm90.cuh"

namespace thunderkittens::attention {
#define ROWS const BackwardParams&, const Workspace&, const DqTiles&, Stream
#define FINISH \
    const BackwardParams&, const Workspace&, const DqTiles&, const BackwardConfig&, Stream
template void launch_prepare<DType::bf16>(ROWS);
template void launch_prepare<DType::fp16>(ROWS);
template void launch_finish<DType::bf16>(FINISH);
template void launch_finish<DType::fp16>(FINISH);
}  // namespace thunderkittens::attention
