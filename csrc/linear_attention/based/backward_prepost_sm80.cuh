// The kernels of backward_prepost_sm90.cuh for every GPU from compute capability 8.0 on.
#pragma once

#include "csrc/linear_attention/based/backward_prepost_sm90.cuh"

namespace thunderkittens::linear_attention {
template <DType dtype>
void launch_portable_based_preprocess(const BasedBackwardParams& params, float* weights,
                                      Stream stream) {
    launch_preprocess(based_preprocess_kernel<type_of<dtype>, true>, params, weights, stream);
}
template <DType dtype>
void launch_portable_based_reduce_partials(const BasedBackwardParams& params,
                                           const BackwardKernelParams& kernel, Stream stream) {
    launch_reduce_partials(based_reduce_partials_kernel<type_of<dtype>, true>, params, kernel,
                           stream);
}

}  // namespace thunderkittens::linear_attention
