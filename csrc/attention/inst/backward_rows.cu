#include "csrc/attention/backward_rows_sm90.cuh"

namespace thunderkittens::attention {

void launch_prepare(const BackwardParams& params, const Workspace& workspace, const DqTiles& tiles,
                    Stream stream) {
    if (params.problem.dtype == DType::bf16)
        launch_prepare_kernel<kittens::bf16>(params, workspace, tiles, stream);
    else
        launch_prepare_kernel<kittens::half>(params, workspace, tiles, stream);
}

void launch_finish(const BackwardParams& params, const Workspace& workspace, const DqTiles& tiles,
                   Stream stream) {
    if (params.dsink != nullptr) launch_sink_kernel(params, workspace, stream);
    if (params.dq.data == nullptr) return;
    if (params.problem.dtype == DType::bf16)
        launch_finish_of<kittens::bf16>(params, workspace, tiles, stream);
    else
        launch_finish_of<kittens::half>(params, workspace, tiles, stream);
}

}  // namespace thunderkittens::attention
