// Which kernel runs a call. Its configuration is chosen; some have several kernels, and some leave
// the calls that they do not compute to others. Host C++ only.
#pragma once

#include "csrc/gemm/dense/single_wave.h"
#include "csrc/gemm/dense/split_k.h"

namespace thunderkittens::gemm {

// Whether the kernel for all cases is that of one_consumer_sm90.cuh.
constexpr bool has_small(const Config& c) {
    return !c.streamed && !c.fused && !c.marked && c.consumers == 1;
}

// Runs a kernel of a configuration.
template <Config c>
void launch_kernel(const Params& params, Stream stream) {
    if constexpr (c.streamed) {
        launch_streamed<c>(params, stream);
    } else if constexpr (c.varied) {
        if (suits(c, params)) return launch_varied<c>(params, stream);
        launch_kernel<whole_config(c)>(in_whole_tiles(params), stream);
    } else {
        const OneTile kind = one_tile(c, params);
        if constexpr (has_once(c)) {
            if (kind == OneTile::once) return launch_once<c>(params, stream);
        }
        if constexpr (has_single(c)) {
            if (kind == OneTile::single) return launch_single<c>(params, stream);
        }
        if constexpr (has_small(c))
            launch_small<c>(params, stream);
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

// As launch_any, of divided tiles too. Where the context has not all SMs of the GPU, as a green
// context, they are computed whole.
inline bool launch_choice(const Config& config, const Params& params, const Scratch& scratch,
                          Stream stream) {
    if (!is_divided(config)) return launch_any(config, params, stream);
    const auto launch =
        config.dtype == DType::bf16 ? &launch_divided<DType::bf16> : &launch_divided<DType::fp16>;
    if (suits_divided(config, params) && launch(config, params, scratch, stream)) return true;
    return launch_any(whole_config(config), in_whole_tiles(params), stream);
}

}  // namespace thunderkittens::gemm
