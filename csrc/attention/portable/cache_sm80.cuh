// The kernels around attention over a cache, for every GPU from Ampere on: the schedule, new keys
// and values, and what merges results.
#pragma once

#include "csrc/attention/decode/append_sm90.cuh"
#include "csrc/attention/decode/merge_sm90.cuh"
#include "csrc/attention/decode/schedule_sm90.cuh"

namespace thunderkittens::attention::decode {

template <int THREADS>
__global__ __launch_bounds__(THREADS) void portable_schedule_kernel(
    const __grid_constant__ ScheduleGlobals g) {
    write_schedule(g);
}
template <int threads>
void launch_portable_schedule(const Params& params, Stream stream) {
    static_assert(threads == SCHEDULE_THREADS);
    launch_schedule_by(portable_schedule_kernel<threads>, false, params, stream);
}

template <class T>
__global__ __launch_bounds__(APPEND_THREADS) void portable_append_kernel(
    const __grid_constant__ AppendGlobals<T> g) {
    append(g);
}
template <class T>
__global__ __launch_bounds__(APPEND_THREADS) void portable_append_codes_kernel(
    const __grid_constant__ AppendGlobals<T> g) {
    append_codes(g);
}
template <class T>
__global__ __launch_bounds__(APPEND_THREADS) void portable_append_nvfp4_kernel(
    const __grid_constant__ AppendGlobals<T> g, const __grid_constant__ BlockScales block_scales) {
    append_nvfp4(g, block_scales);
}
template <DType dtype>
void launch_portable_append(const AppendParams& params, Stream stream) {
    using T = std::conditional_t<dtype == DType::bf16, bf16, half>;
    launch_append_by<T>({portable_append_kernel<T>, portable_append_codes_kernel<T>,
                         portable_append_nvfp4_kernel<T>, false},
                        params, stream);
}

template <DType dtype>
void launch_portable_merge(const MergeParams& params, Stream stream) {
    launch_merge_kernel<dtype, true>(params, stream);
}

}  // namespace thunderkittens::attention::decode
