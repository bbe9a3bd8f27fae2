// Matrix product on Hopper with balanced tiling: tiles of 128 rows whose two widths, of up to 256
// columns, are chosen for a problem at run time. It is the kernel of persistent_sm90.cuh, for
// outputs of the operands' type that TMA stores.
#pragma once

#include "csrc/gemm/dense/persistent_sm90.cuh"

namespace thunderkittens::gemm {

// The launcher of the balanced tiling; dispatch.h leaves what it does not compute to tiles of
// 128 x 256.
template <Config C>
void launch_balanced(const Params& params, Stream stream) {
    using Traits = sm90::KernelTraits<C>;
    static_assert(C.balanced && sm90::DeferredStore<C>::subtiles == (C.block_n + 63) / 64);
    kittens::launch(kittens::LaunchOptions{.dependent = true}, sm90::persistent_gemm_kernel<Traits>,
                    dim3(params.schedule.blocks), dim3(Traits::threads), dim3(C.cluster_m),
                    sizeof(typename Traits::Shared), stream, sm90::make_globals<C>(params));
}

}  // namespace thunderkittens::gemm
