// From a choice to its kernel: whether a call's pointers, strides, factor and bias, which a problem
// does not tell of, allow it, what runs instead, and the launch. Host C++ only.
#pragma once

#include "csrc/gemm/common/listed.h"
#include "csrc/gemm/dense/portable.h"
#include "csrc/gemm/dense/runtime_tile.h"
#include "csrc/gemm/dense/single_wave.h"
#include "csrc/gemm/dense/split_k.h"

namespace thunderkittens::gemm {

// The kernel that is preferred where it computes a call; what runs else is kernel_of().
constexpr Kernel preferred_kernel(const Config& c) {
    return has_single_wave(c)         ? Kernel::single_wave
           : has_single_wave_64x64(c) ? Kernel::single_wave_64x64
                                      : kernel_of(c);
}

// Whether the kernel that was chosen computes a call.
inline bool allows(const Choice& choice, const Params& p) {
    switch (choice.kernel) {
        case Kernel::single_wave:
        case Kernel::single_wave_64x64: return runs_single_wave(choice.config, p);
        case Kernel::split_k: return runs_split_k(choice.config, p);
        case Kernel::runtime_tile: return runs_runtime_tile(choice.config, p);
        default: return true;
    }
}

// What runs where it does not: instead of a single-wave kernel the persistent one of its
// configuration, or a block for each cluster tile of 64 x 64; instead of the split-K kernel and of
// run-time tiles those of 128 x 256.
inline Choice fallback(Choice choice) {
    const Config& c = choice.config;
    if (choice.kernel == Kernel::split_k || choice.kernel == Kernel::runtime_tile) {
        choice.config = make_config(tile_shape(128, 256), c.dtype, c.a_m_major, c.b_n_major);
        choice.schedule.splits = choice.schedule.share_m = choice.schedule.share_n = 1;
    } else if (choice.kernel == Kernel::single_wave_64x64) {
        choice.config =
            cluster_tile_config(CLUSTER_TILE_SHAPES[0], c.dtype, c.a_m_major, c.b_n_major);
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
    constexpr Kernel own = kernel_of(c);
    switch (kernel) {
        case Kernel::persistent:
            if constexpr (own == Kernel::persistent) return launch<c>(params, stream), true;
            break;
        case Kernel::single_wave:
            if constexpr (has_single_wave(c)) return launch_single_wave<c>(params, stream), true;
            break;
        case Kernel::single_wave_64x64:
            if constexpr (has_single_wave_64x64(c))
                return launch_single_wave_64x64<c>(params, stream), true;
            break;
        case Kernel::cluster_tile:
            if constexpr (own == Kernel::cluster_tile)
                return launch_cluster_tile<c>(params, stream), true;
            break;
        case Kernel::short_k:
            if constexpr (has_short_k(c)) return launch_short_k<c>(params, stream), true;
            break;
        case Kernel::swap_ab:
            if constexpr (own == Kernel::swap_ab) return launch_swap_ab<c>(params, stream), true;
            break;
        // One kernel for all of its configurations, and one with configurations of its own.
        case Kernel::split_k:
        case Kernel::runtime_tile:
        case Kernel::portable: break;
    }
    return false;
}

template <DType dtype>
bool launch_runtime_tile(const Config& c, const Params& params, Stream stream) {
    switch (runtime_tile_of(c).rows) {
        case 64: return launch_runtime_tile<dtype, 64>(c, params, stream), true;
        case 128: return launch_runtime_tile<dtype, 128>(c, params, stream), true;
        case 192: return launch_runtime_tile<dtype, 192>(c, params, stream), true;
        default: return false;
    }
}

// Runs a choice that allows the call; false when there is no such kernel. Where the context does
// not have all SMs of the GPU, as a green context, split-K falls back, too.
inline bool launch_choice(const Choice& choice, Params params, const Workspace& workspace,
                          Stream stream) {
    params.schedule = choice.schedule;
    if (choice.kernel == Kernel::split_k) {
        const auto launch = choice.config.dtype == DType::bf16 ? &launch_split_k<DType::bf16>
                                                               : &launch_split_k<DType::fp16>;
        return launch(choice.config, params, workspace, stream) ||
               launch_choice(fallback(choice), params, {}, stream);
    }
    if (choice.kernel == Kernel::runtime_tile) {
        const auto launch = choice.config.dtype == DType::bf16 ? &launch_runtime_tile<DType::bf16>
                                                               : &launch_runtime_tile<DType::fp16>;
        return is_runtime_tile(choice.config) && launch(choice.config, params, stream);
    }
    if (choice.kernel == Kernel::portable) {
        if constexpr (BUILDS_PORTABLE) {
            return launch_listed<portable_config_at, PORTABLE_CONFIGS>(
                portable_config(choice.config),
                [&]<PortableConfig c>() { return launch_portable<c>(params, stream), true; });
        }
    }
    return launch_listed<config_at, CONFIGS>(
        choice.config, [&]<Config c>() { return launch_kernel<c>(choice.kernel, params, stream); });
}

}  // namespace thunderkittens::gemm
