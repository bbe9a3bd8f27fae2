// The launches that make up one call of LoLCATS, for the ops and for the emulator. Host C++ only.
#pragma once

#include "csrc/linear_attention/lolcats/portable.h"

namespace thunderkittens::linear_attention {

// Calls f.template operator()<dtype, head_dim, features>().
template <typename Problem, typename F>
void dispatch_lolcats(const Problem& p, F f) {
    const auto with_dtype = [&]<DType dtype>() {
        if (p.head_dim == 128)
            p.features == 64 ? f.template operator()<dtype, 128, 64>()
                             : f.template operator()<dtype, 128, 32>();
        else
            p.features == 64 ? f.template operator()<dtype, 64, 64>()
                             : f.template operator()<dtype, 64, 32>();
    };
    if (p.dtype == DType::bf16)
        with_dtype.template operator()<DType::bf16>();
    else
        with_dtype.template operator()<DType::fp16>();
}

inline LolcatsWorkspace workspace_of(const LolcatsParams& params) {
    const LolcatsProblem& p = params.problem;
    const int64_t sums = segment_floats(p, params.segments), rows = first_rows_floats(p);
    LolcatsWorkspace w;
    if (params.segments > 1) w.segment_states = params.workspace;
    if (p.continued) {
        w.first_keys = params.workspace + sums;
        w.first_values = params.workspace + sums + rows;
    }
    if (params.portable) {
        w.q_features = params.workspace + sums + 2 * rows;
        w.k_features = params.workspace + sums + 2 * rows + feature_floats(p);
    }
    return w;
}

inline void run_native_lolcats(const LolcatsParams& params, const LolcatsWorkspace& w,
                               Stream stream) {
    if (params.final.keys != nullptr) launch_lolcats_kv_cache<false>(params, stream);
    if (params.problem.continued) launch_lolcats_first_rows<false>(params, w, stream);
    dispatch_lolcats(params.problem, [&]<DType dtype, int head_dim, int features>() {
        if (params.segments > 1) {
            launch_lolcats_segment_states<dtype, head_dim, features>(params, w, stream);
            if (scans(params.segments)) launch_lolcats_scan<false>(params, w, stream);
        }
        launch_lolcats_forward<dtype, head_dim, features>(params, w, stream);
    });
}
inline void run_lolcats(const LolcatsParams& params, Stream stream) {
    const LolcatsWorkspace w = workspace_of(params);
    if (!params.portable) return run_native_lolcats(params, w, stream);
    if constexpr (BUILDS_PORTABLE) {
        if (params.final.keys != nullptr) launch_lolcats_kv_cache<true>(params, stream);
        if (params.problem.continued) launch_lolcats_first_rows<true>(params, w, stream);
        dispatch_lolcats(params.problem, [&]<DType dtype, int head_dim, int features>() {
            launch_portable_lolcats_features<dtype, head_dim, features>(params, w, stream);
            if (params.segments > 1)
                launch_portable_lolcats_segment_states<dtype, head_dim, features>(params, w,
                                                                                  stream);
            launch_portable_lolcats_forward<dtype, head_dim, features>(params, w, stream);
        });
    }
}

inline void run_lolcats_decode(const LolcatsDecodeParams& params, Stream stream) {
    dispatch_lolcats(params.problem, [&]<DType dtype, int head_dim, int features>() {
        if (!params.portable)
            launch_lolcats_decode<dtype, head_dim, features>(params, stream);
        else if constexpr (BUILDS_PORTABLE)
            launch_portable_lolcats_decode<dtype, head_dim, features>(params, stream);
    });
}

}  // namespace thunderkittens::linear_attention
