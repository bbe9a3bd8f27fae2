// From a choice of a portable kernel to its launch. Host C++ only.
#pragma once

#include "csrc/gemm/nvfp4/portable.h"

namespace thunderkittens::nvfp4_gemm {

// Runs a choice; false when there is no such kernel.
inline bool launch_portable(const Choice& choice, const Params& params, Stream stream) {
    if constexpr (BUILDS_PORTABLE) {
        if (choice.kernel == Kernel::portable_few_rows) {
            const auto launch = choice.config.dtype == DType::bf16 ? &launch_few_rows<DType::bf16>
                                                                   : &launch_few_rows<DType::fp16>;
            return launch(choice.config, params, stream), true;
        }
        return gemm::launch_listed<portable_config_at, PORTABLE_CONFIGS>(
            portable_config(choice.config),
            [&]<gemm::PortableConfig c>() { return launch_portable<c>(params, stream), true; });
    }
    return false;
}

}  // namespace thunderkittens::nvfp4_gemm
