// The launches that make up LoLCATS's gradient, for the op and for the emulator. Host C++ only.
#pragma once

#include "csrc/linear_attention/lolcats/backward.h"
#include "csrc/linear_attention/lolcats/dispatch.h"

namespace thunderkittens::linear_attention {

inline void run_native_lolcats_backward(const LolcatsBackwardParams& params,
                                        const LolcatsBackwardWorkspace& w, Stream stream) {
    const LolcatsParams& call = params.forward;
    if (call.problem.continued) launch_lolcats_first_rows<false>(call, w.forward, stream);
    dispatch_lolcats(call.problem, [&]<DType dtype, int head_dim, int features>() {
        if (call.segments > 1) {
            launch_lolcats_segment_states<dtype, head_dim, features>(call, w.forward, stream);
            if (scans(call.segments)) launch_lolcats_scan<false>(call, w.forward, stream);
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
        launch_lolcats_reduce_partials<dtype, false>(params, w, stream);
    });
}

inline void run_portable_lolcats_backward(const LolcatsBackwardParams& params,
                                          const LolcatsBackwardWorkspace& w, Stream stream) {
    const LolcatsParams& call = params.forward;
    if (call.problem.continued) launch_lolcats_first_rows<true>(call, w.forward, stream);
    dispatch_lolcats(call.problem, [&]<DType dtype, int head_dim, int features>() {
        const bool split = call.segments > 1;
        launch_portable_lolcats_features<dtype, head_dim, features>(call, w.forward, stream);
        if (split)
            launch_portable_lolcats_segment_states<dtype, head_dim, features>(call, w.forward,
                                                                              stream);
        launch_portable_lolcats_rows<dtype, head_dim, features>(params, w, stream);
        launch_portable_lolcats_linear_queries<dtype, head_dim, features>(params, w, stream);
        // The kernels for the keys need what that for the queries finds of the rows.
        launch_portable_lolcats_query_gradient<dtype, head_dim, features>(params, w, stream);
        if (params.wants_keys()) {
            if (split)
                launch_portable_lolcats_segment_state_gradients<dtype, head_dim, features>(
                    params, w, stream);
            launch_portable_lolcats_linear_keys<dtype, head_dim, features>(params, w, stream);
            if (params.dk.data != nullptr)
                launch_portable_lolcats_key_gradient<dtype, head_dim, features>(params, w, stream);
        }
        if (params.dq_map != nullptr || params.dk_map != nullptr)
            launch_portable_lolcats_feature_map_gradient<dtype, head_dim, features>(params, w,
                                                                                    stream);
        launch_lolcats_reduce_partials<dtype, true>(params, w, stream);
    });
}

inline void run_lolcats_backward(const LolcatsBackwardParams& params, Stream stream) {
    const LolcatsBackwardWorkspace w = workspace_of(params);
    if (!params.forward.portable)
        run_native_lolcats_backward(params, w, stream);
    else if constexpr (BUILDS_PORTABLE)
        run_portable_lolcats_backward(params, w, stream);
}

}  // namespace thunderkittens::linear_attention
