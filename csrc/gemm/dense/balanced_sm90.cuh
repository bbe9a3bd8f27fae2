// Matrix product on Hopper in tiles whose two widths are chosen for a problem: the kernel of
// persistent_sm90.cuh, for outputs of the operands' type that TMA stores.
#pragma once

#include "csrc/gemm/dense/persistent_sm90.cuh"

namespace thunderkittens::gemm {

// What it does not compute is left to tiles of 128 x 256.
template <Config C>
bool suits_varied(const Params& p) {
    static_assert(sm90::Finished<C>::pieces == (C.block_n + 63) / 64);
    return suits_varied(C, p);
}

#define TK_LAUNCH_VARIED(DTYPE, B_N_MAJOR)                                                  \
    template <>                                                                             \
    void launch<whole_config(varied_config(DTYPE, B_N_MAJOR))>(const Params&, Stream);      \
    template <>                                                                             \
    void launch<varied_config(DTYPE, B_N_MAJOR)>(const Params& params, Stream stream) {     \
        constexpr Config C = varied_config(DTYPE, B_N_MAJOR);                               \
        if (!suits_varied<C>(params))                                                       \
            return launch<whole_config(C)>(in_whole_tiles(params), stream);                 \
        using K = sm90::Types<C>;                                                           \
        kittens::launch(kittens::LaunchOptions{.dependent = true}, sm90::gemm_kernel<K>,    \
                        dim3(params.schedule.blocks), dim3(K::threads), dim3(1),            \
                        sizeof(typename K::Shared), stream, sm90::make_globals<C>(params)); \
    }

}  // namespace thunderkittens::gemm
