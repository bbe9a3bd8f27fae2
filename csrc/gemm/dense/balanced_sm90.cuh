// Matrix product on Hopper with balanced tiling: tiles of 128 rows whose two widths, of up to 256
// columns, are chosen for a problem at run time. It is the kernel of persistent_sm90.cuh, for
// outputs of the operands' type that TMA stores.
#pragma once

#include "csrc/gemm/dense/persistent_sm90.cuh"

namespace thunderkittens::gemm {

// Whether the kernel computes a call; if not, the launcher below falls back to tiles of 128 x 256.
template <Config C>
bool runs_balanced(const Params& p) {
    static_assert(sm90::DeferredStore<C>::subtiles == (C.block_n + 63) / 64);
    return runs_balanced(C, p);
}

#define TK_LAUNCH_BALANCED(DTYPE, B_N_MAJOR)                                                     \
    template <>                                                                                  \
    void launch<fallback_config(balanced_config(DTYPE, B_N_MAJOR))>(const Params&, Stream);      \
    template <>                                                                                  \
    void launch<balanced_config(DTYPE, B_N_MAJOR)>(const Params& params, Stream stream) {        \
        constexpr Config C = balanced_config(DTYPE, B_N_MAJOR);                                  \
        if (!runs_balanced<C>(params))                                                           \
            return launch<fallback_config(C)>(fallback_params(params), stream);                  \
        using Traits = sm90::KernelTraits<C>;                                                    \
        kittens::launch(kittens::LaunchOptions{.dependent = true},                               \
                        sm90::persistent_gemm_kernel<Traits>, dim3(params.schedule.blocks),      \
                        dim3(Traits::threads), dim3(1), sizeof(typename Traits::Shared), stream, \
                        sm90::make_globals<C>(params));                                          \
    }

}  // namespace thunderkittens::gemm
