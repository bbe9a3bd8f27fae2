// The launches that make up LoLCATS's gradient, for the op and for the emulator. Host C++ only.
#pragma once

#include "csrc/linear_attention/lolcats/backward.h"
#include "csrc/linear_attention/lolcats/dispatch.h"

namespace thunderkittens::linear_attention {

inline void run_lolcats_backward(const LolcatsBackwardParams& params, Stream stream) {
    const LolcatsParams& call = params.forward;
    const LolcatsBackwardWorkspace w = workspace_of(params);
    const auto with_dtype = [&](auto f) {
        if (call.problem.dtype == DType::bf16)
            f.template operator()<DType::bf16>();
        else
            f.template operator()<DType::fp16>();
    };
    if (call.problem.continued) launch_lolcats_first_rows(call, w.forward, stream);
    dispatch_lolcats(call.problem, [&]<DType dtype, int head_dim, int features>() {
        if (call.segments > 1) {
            launch_lolcats_segment_states<dtype, head_dim, features>(call, w.forward, stream);
            if (scans(call.segments)) launch_lolcats_scan(call, w.forward, stream);
        }
        // The kernel for the keys needs what that for the queries finds of the rows.
        launch_lolcats_query_gradient<dtype, head_dim, features>(params, w, stream);
        if (params.wants_keys()) {
            if (call.segments > 1)
                launch_lolcats_segment_state_gradients<dtype, head_dim, features>(params, w,
                                                                                  stream);
            launch_lolcats_key_gradient<dtype, head_dim, features>(params, w, stream);
        }
        if (params.dq_map != nullptr || params.dk_map != nullptr)
            launch_lolcats_feature_map_gradient<dtype, head_dim, features>(params, w, stream);
    });
    with_dtype([&]<DType dtype>() { launch_lolcats_reduce_partials<dtype>(params, w, stream); });
}

}  // namespace thunderkittens::linear_attention
