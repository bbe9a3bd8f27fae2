// From a choice to the launcher of its kernel. Host C++ only.
#pragma once

#include <utility>

#include "csrc/attention/decode/decode.h"

namespace thunderkittens::attention::decode {

template <std::size_t i>
constexpr Config config_at = with_dtype(CONFIGS[i / 2], i % 2 == 0 ? DType::bf16 : DType::fp16);

inline bool launch_choice(const Choice& choice, const Params& params, Stream stream) {
    return [&]<std::size_t... i>(std::index_sequence<i...>) {
        return ((choice.config == config_at<i> && (launch<config_at<i>>(params, stream), true)) ||
                ...);
    }(std::make_index_sequence<2 * std::size(CONFIGS)>());
}
inline void launch_combine_of(DType dtype, const Params& params, Stream stream) {
    if (dtype == DType::bf16)
        launch_combine<DType::bf16>(params, stream);
    else
        launch_combine<DType::fp16>(params, stream);
}

}  // namespace thunderkittens::attention::decode
