// The launches that make up one call of tk.ssd or tk.linear_attention, for the ops and for the
// emulator. Host C++ only.
#pragma once

#include "csrc/recurrent/common/recurrent.h"

namespace thunderkittens::recurrent {

using Launch = void (*)(const RecurrentParams&, int, float*, bool, Stream);

template <DType dtype>
Launch launch_of(const RecurrentConfig& c) {
    if constexpr (BUILDS_PORTABLE) {
        if (c.portable) {
            return c.keys == 64 ? &launch_portable_recurrent<dtype, 64>
                                : &launch_portable_recurrent<dtype, 128>;
        }
    }
    if (c.keys == 64) {
        return c.warpgroups == 1 ? &launch_recurrent<RecurrentConfig{dtype, 64, 1}>
                                 : &launch_recurrent<RecurrentConfig{dtype, 64, 3}>;
    }
    return c.warpgroups == 1 ? &launch_recurrent<RecurrentConfig{dtype, 128, 1}>
                             : &launch_recurrent<RecurrentConfig{dtype, 128, 2}>;
}

inline void run_forward(const RecurrentParams& params, const RecurrentConfig& c, float* workspace,
                        Stream stream) {
    const Launch launch =
        c.dtype == DType::bf16 ? launch_of<DType::bf16>(c) : launch_of<DType::fp16>(c);
    if (c.segments > 1) launch(params, c.segments, workspace, true, stream);
    launch(params, c.segments, workspace, false, stream);
}

}  // namespace thunderkittens::recurrent
