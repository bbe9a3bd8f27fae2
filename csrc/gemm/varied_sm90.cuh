// Matrix product on Hopper in tiles whose two widths are chosen for a problem: the kernel of
// gemm_sm90.cuh, for outputs of the operands' type that TMA stores.
#pragma once

#include "csrc/gemm/gemm_sm90.cuh"

namespace thunderkittens::gemm {

// What it does not compute is left to tiles of 128 x 256.
template <Config C>
bool suits_varied(const Params& p) {
    return p.out_dtype == C.dtype && p.batch == 1 && reinterpret_cast<uintptr_t>(p.out) % 16 == 0 &&
           p.out_stride % 8 == 0 && sm90::ceil_div(p.k, BLOCK_K) >= sm90::Finished<C>::pieces &&
           covers(C, p.schedule, p.m, p.n);
}

#define TK_LAUNCH_VARIED(DTYPE, B_N_MAJOR)                                                       \
    template <>                                                                                  \
    void launch<make_config(TILE_SHAPES[0], DTYPE, false, B_N_MAJOR)>(const Params&, Stream);    \
    template <>                                                                                  \
    void launch<varied_config(DTYPE, B_N_MAJOR)>(const Params& params, Stream stream) {          \
        constexpr Config C = varied_config(DTYPE, B_N_MAJOR);                                    \
        if (!suits_varied<C>(params)) {                                                          \
            Params others = params;                                                              \
            others.schedule.columns = 0;                                                         \
            return launch<make_config(TILE_SHAPES[0], DTYPE, false, B_N_MAJOR)>(others, stream); \
        }                                                                                        \
        using K = sm90::Types<C>;                                                                \
        kittens::launch(kittens::LaunchOptions{.dependent = true}, sm90::gemm_kernel<K>,         \
                        dim3(params.schedule.blocks), dim3(K::threads), dim3(1),                 \
                        sizeof(typename K::Shared), stream, sm90::make_globals<C>(params));      \
    }

}  // namespace thunderkittens::gemm
