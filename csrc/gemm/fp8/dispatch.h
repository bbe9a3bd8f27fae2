// From a choice to its kernel: whether a call's pointers, bias and activation, which a problem does
// not tell of, allow it, what runs instead, and the launch. Host C++ only.
#pragma once

#include "csrc/gemm/common/listed.h"
#include "csrc/gemm/fp8/fp8_gemm.h"
#include "csrc/gemm/fp8/portable.h"
#include "csrc/gemm/fp8/split_k.h"

namespace thunderkittens::fp8_gemm {

// Whether the kernel that was chosen computes a call.
inline bool allows(const Choice& choice, const Params& p) {
    switch (choice.kernel) {
        case Kernel::rowwise: return runs_rowwise(choice.config, p);
        case Kernel::split_k: return runs_split_k(choice.config, p);
        default: return true;
    }
}

// What runs where it does not: instead of the kernel for row-wise scales the other one of its
// configuration, instead of split-K tiles of 128 x 128.
inline Choice fallback(Choice choice) {
    if (choice.kernel == Kernel::split_k) {
        const auto* whole = std::find_if(
            std::begin(TILE_SHAPES), std::end(TILE_SHAPES),
            [&](const TileShape& s) { return s.sums == choice.config.sums && s.block_n == 128; });
        choice.config = make_config(*whole, {choice.config.a_dtype, choice.config.b_dtype});
        choice.schedule = {.blocks = choice.schedule.blocks};
    }
    choice.kernel = kernel_of(choice.config);
    return choice;
}

inline Choice runnable(const Choice& choice, const Params& params) {
    return allows(choice, params) ? choice : fallback(choice);
}

// Runs a kernel of a configuration; false when it has no such kernel.
template <Config c>
bool launch_kernel(Kernel kernel, const Params& params, Stream stream) {
    switch (kernel) {
        case Kernel::persistent:
            if constexpr (!c.swap_ab) return launch<c>(params, stream), true;
            break;
        case Kernel::rowwise:
            if constexpr (has_rowwise_kernel(c)) return launch_rowwise<c>(params, stream), true;
            break;
        case Kernel::swap_ab:
            if constexpr (c.swap_ab) return launch_swap_ab<c>(params, stream), true;
            break;
        // One kernel for all of its configurations, and one with configurations of its own.
        case Kernel::split_k:
        case Kernel::portable: break;
    }
    return false;
}

// Runs a choice that allows the call; false when there is no such kernel.
inline bool launch_choice(const Choice& choice, Params params, Stream stream) {
    params.schedule = choice.schedule;
    if (choice.kernel == Kernel::split_k) {
        const auto launch = choice.config.sums == Sums::fast ? &launch_split_k<Sums::fast>
                                                             : &launch_split_k<Sums::promoted>;
        return launch(choice.config, params, stream), true;
    }
    if (choice.kernel == Kernel::portable) {
        if constexpr (BUILDS_PORTABLE) {
            return gemm::launch_listed<portable_config_at, PORTABLE_CONFIGS>(
                choice.config,
                [&]<Config c>() { return launch_portable<c>(params, stream), true; });
        }
    }
    return gemm::launch_listed<config_at, CONFIGS>(
        choice.config, [&]<Config c>() { return launch_kernel<c>(choice.kernel, params, stream); });
}

}  // namespace thunderkittens::fp8_gemm
