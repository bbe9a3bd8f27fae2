// Attention over a cache for every GPU from Ampere on: the kernel of few rows, of any format of the
// cache, and for as many rows as there are. Of a tile of up to 16 rows the four warps that multiply
// share the keys of a block; of more, each has 16 rows and goes over all keys of the block, part by
// part. Two warps copy.
//
// What a block has on its way hides the latency of memory: with two blocks on a multiprocessor,
// where each has 81 KB, twice what memory at full speed delivers in a microsecond. 99 KB, and one
// block, are as much in proportion to the slower memory of those GPUs. Queries and results take
// turns in one place.
#pragma once

#include "csrc/attention/decode/combine_sm90.cuh"

namespace thunderkittens::attention::decode {

template <Config config>
void launch_portable(const Params& params, Stream stream) {
    using Kernel = decode::Kernel<config>;
    static_assert(Kernel::portable && sizeof(Shared<Kernel>) <= shared_bytes(config),
                  "shared_bytes() must count all of the block's shared memory");
    const Globals<Kernel> globals(params);
    kittens::launch({.blocks_per_sm = Kernel::blocks_per_sm}, few_rows_kernel<Kernel>,
                    dim3(params.parts), dim3(Kernel::threads), dim3(1), shared_bytes(config),
                    stream, globals);
}

template <class T>
__global__ __launch_bounds__(COMBINE_THREADS) void portable_combine_kernel(
    const __grid_constant__ CombineGlobals<T> g) {
    combine(g);
}
template <DType dtype>
void launch_portable_combine(const Params& params, Stream stream) {
    using T = std::conditional_t<dtype == DType::bf16, bf16, half>;
    launch_combine_by<T>(portable_combine_kernel<T>, false, params, stream);
}

}  // namespace thunderkittens::attention::decode
