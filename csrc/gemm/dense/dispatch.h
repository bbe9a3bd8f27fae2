// Which kernel runs a call. Its configuration is chosen; some have several kernels, and some leave
// the calls that they do not compute to others. Host C++ only.
#pragma once

#include "csrc/gemm/dense/single_wave.h"
#include "csrc/gemm/dense/split_k.h"

namespace thunderkittens::gemm {

// Whether the kernel for all cases is that of one_consumer_sm90.cuh.
constexpr bool has_one_consumer(const Config& c) {
    return !c.swap_ab && !c.fused && !c.masked && c.consumers == 1;
}

// Runs a kernel of a configuration.
template <Config c>
void launch_kernel(const Params& params, Stream stream) {
    if constexpr (c.swap_ab) {
        launch_swap_ab<c>(params, stream);
    } else if constexpr (c.balanced) {
        if (runs_itself(c, params)) return launch_balanced<c>(params, stream);
        launch_kernel<fallback_config(c)>(fallback_params(params), stream);
    } else {
        const SingleWave kind = single_wave(c, params);
        if constexpr (has_single_wave(c)) {
            if (kind == SingleWave::tile_128x256) return launch_single_wave<c>(params, stream);
        }
        if constexpr (has_single_wave_64x64(c)) {
            if (kind == SingleWave::tile_64x64) return launch_single_wave_64x64<c>(params, stream);
        }
        if constexpr (has_one_consumer(c))
            launch_one_consumer<c>(params, stream);
        else
            launch<c>(params, stream);
    }
}

// The same for a configuration that is known at run time; false when there is no such kernel.
template <std::size_t i = 0>
bool launch_any(const Config& config, const Params& params, Stream stream) {
    if constexpr (i < CONFIGS) {
        if (config != config_at(i)) return launch_any<i + 1>(config, params, stream);
        launch_kernel<config_at(i)>(params, stream);
        return true;
    } else {
        return false;
    }
}

// As launch_any, for split-K configurations too. Where the context does not have all SMs of the
// GPU, as a green context, the fallback runs.
inline bool launch_choice(const Config& config, const Params& params, const Workspace& workspace,
                          Stream stream) {
    if (!is_split_k(config)) return launch_any(config, params, stream);
    const auto launch =
        config.dtype == DType::bf16 ? &launch_split_k<DType::bf16> : &launch_split_k<DType::fp16>;
    if (runs_split_k(config, params) && launch(config, params, workspace, stream)) return true;
    return launch_any(fallback_config(config), fallback_params(params), stream);
}

}  // namespace thunderkittens::gemm
