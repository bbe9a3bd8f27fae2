// From a choice to the launcher of its kernel. Host C++ only.
#pragma once

#include <utility>

#include "csrc/attention/decode/append.h"

namespace thunderkittens::attention::decode {

template <const auto& configs, std::size_t i>
constexpr Config config_at = with_dtype(configs[i / 2], i % 2 == 0 ? DType::bf16 : DType::fp16);

inline bool launch_choice(const Choice& choice, const Params& params, Stream stream) {
    if constexpr (BUILDS_PORTABLE) {
        const bool found = [&]<std::size_t... i>(std::index_sequence<i...>) {
            return ((choice.config == config_at<PORTABLE_CONFIGS, i> &&
                     (launch_portable<config_at<PORTABLE_CONFIGS, i>>(params, stream), true)) ||
                    ...);
        }(std::make_index_sequence<2 * std::size(PORTABLE_CONFIGS)>());
        if (found) return true;
    }
    return [&]<std::size_t... i>(std::index_sequence<i...>) {
        return ((choice.config == config_at<CONFIGS, i> &&
                 (launch<config_at<CONFIGS, i>>(params, stream), true)) ||
                ...);
    }(std::make_index_sequence<2 * std::size(CONFIGS)>());
}
// Calls f.template operator()<dtype>().
template <class F>
void with_dtype_of(DType dtype, F f) {
    if (dtype == DType::bf16)
        f.template operator()<DType::bf16>();
    else
        f.template operator()<DType::fp16>();
}
// What runs beside the kernel of a choice, and without one, portable or not.
inline void launch_combine_of(bool portable, DType dtype, const Params& params, Stream stream) {
    with_dtype_of(dtype, [&]<DType type>() {
        if (!portable)
            launch_combine<type>(params, stream);
        else if constexpr (BUILDS_PORTABLE)
            launch_portable_combine<type>(params, stream);
    });
}
inline void launch_schedule_of(bool portable, const Params& params, Stream stream) {
    if (!portable)
        launch_schedule<SCHEDULE_THREADS>(params, stream);
    else if constexpr (BUILDS_PORTABLE)
        launch_portable_schedule<SCHEDULE_THREADS>(params, stream);
}
inline void launch_append_of(const AppendChoice& choice, const AppendParams& params,
                             Stream stream) {
    with_dtype_of(choice.dtype, [&]<DType type>() {
        if (!choice.portable)
            launch_append<type>(params, stream);
        else if constexpr (BUILDS_PORTABLE)
            launch_portable_append<type>(params, stream);
    });
}
inline void launch_merge_of(const MergeChoice& choice, const MergeParams& params, Stream stream) {
    with_dtype_of(choice.dtype, [&]<DType type>() {
        if (!choice.portable)
            launch_merge<type>(params, stream);
        else if constexpr (BUILDS_PORTABLE)
            launch_portable_merge<type>(params, stream);
    });
}

}  // namespace thunderkittens::attention::decode
