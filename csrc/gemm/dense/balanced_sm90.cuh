// Matrix product on Hopper in tiles whose two widths are chosen for a problem: the kernel of
// persistent_sm90.cuh, for outputs of the operands' type that TMA stores.
#pragma once

#include "csrc/gemm/dense/persistent_sm90.cuh"

namespace thunderkittens::gemm {

// What it does not compute, dispatch.h leaves to tiles of 128 x 256.
template <Config C>
void launch_varied(const Params& params, Stream stream) {
    using K = sm90::Types<C>;
    static_assert(C.varied && sm90::Finished<C>::pieces == (C.block_n + 63) / 64);
    kittens::launch(kittens::LaunchOptions{.dependent = true}, sm90::gemm_kernel<K>,
                    dim3(params.schedule.blocks), dim3(K::threads), dim3(1),
                    sizeof(typename K::Shared), stream, sm90::make_globals<C>(params));
}

}  // namespace thunderkittens::gemm
