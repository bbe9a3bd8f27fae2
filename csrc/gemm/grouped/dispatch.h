// Runs a choice of grouped_gemm's kernels, of whichever op. Host C++ only.
#pragma once

#include "csrc/gemm/common/listed.h"
#include "csrc/gemm/grouped/portable.h"

namespace thunderkittens::grouped_gemm {

// False when there is no such kernel.
inline bool launch_choice(const Choice& choice, const Params& params, Stream stream) {
    if (!choice.portable) {
        return gemm::launch_listed<config_at, CONFIGS>(choice.config, [&]<gemm::Config c>() {
            return grouped_gemm::launch<c>(params, stream), true;
        });
    }
    if constexpr (BUILDS_PORTABLE) {
        return gemm::launch_listed<portable_config_at, PORTABLE_CONFIGS>(
            gemm::portable_config(choice.config), [&]<gemm::PortableConfig c>() {
                return grouped_gemm::launch_portable<c>(params, stream), true;
            });
    }
    return false;
}

}  // namespace thunderkittens::grouped_gemm
