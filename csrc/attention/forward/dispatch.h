// From a choice to the launcher of its kernel, for the op and for the emulator. Host C++ only.
#pragma once

#include <utility>

#include "csrc/attention/forward/forward.h"

namespace thunderkittens::attention {
namespace dispatch {

template <const auto& configs, std::size_t i>
constexpr Config config_at = with_dtype(configs[i / 2], i % 2 == 0 ? DType::bf16 : DType::fp16);

template <std::size_t... i>
bool launch_forward_any(const Config& config, const ForwardParams& params, Stream stream,
                        std::index_sequence<i...>) {
    return ((config == config_at<CONFIGS, i> &&
             (launch_forward<config_at<CONFIGS, i>>(params, stream), true)) ||
            ...);
}
template <std::size_t... i>
bool launch_portable_any(const Config& config, const ForwardParams& params, Stream stream,
                         std::index_sequence<i...>) {
    return ((config == config_at<PORTABLE_CONFIGS, i> &&
             (launch_portable<config_at<PORTABLE_CONFIGS, i>>(params, stream), true)) ||
            ...);
}
template <std::size_t... i>
bool launch_split_kv_any(const Config& config, const ForwardParams& params, Stream stream,
                         std::index_sequence<i...>) {
    return ((config == config_at<SPLIT_KV_CONFIGS, i> &&
             (launch_split_kv<config_at<SPLIT_KV_CONFIGS, i>>(params, stream), true)) ||
            ...);
}

}  // namespace dispatch

inline void launch_choice(const char* op, const Choice& choice, const ForwardParams& params,
                          Stream stream) {
    constexpr std::make_index_sequence<2 * std::size(CONFIGS)> whole;
    constexpr std::make_index_sequence<2 * std::size(SPLIT_KV_CONFIGS)> split;
    constexpr std::make_index_sequence<2 * std::size(PORTABLE_CONFIGS)> portable;
    const Config& config = choice.config;
    const bool found =
        choice.splits > 0      ? dispatch::launch_split_kv_any(config, params, stream, split)
        : config.is_portable() ? dispatch::launch_portable_any(config, params, stream, portable)
                               : dispatch::launch_forward_any(config, params, stream, whole);
    TK_CHECK(found, op, ": no kernel ", kernel_name(choice), " in this build");
}

}  // namespace thunderkittens::attention
