// Every op's schema: the package's table of contents. The implementations are elsewhere: for CUDA
// in csrc/<family>/<op>.cpp, for the CPU in python/thunderkittens/reference/<op>.py, autograd and
// the shape functions in python/thunderkittens/ops/<op>.py. An op `x` that is differentiable has a
// raw twin `x_forward` without autograd registration, which a call that needs no gradient goes to,
// because it costs the host less.
#include <torch/csrc/stable/library.h>

#define ATTENTION_OPTIONS                                                        \
    "int causal=0, float? scale=None, int window_left=-1, int window_right=-1, " \
    "float softcap=0.0, Tensor? alibi_slopes=None, Tensor? sink=None, bool? deterministic=None"
#define ATTENTION_GRADIENTS "(Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor grad_sink)"
#define ATTENTION_SEQUENCES \
    "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k"
#define DECODE_SEQUENCES                                                                       \
    "Tensor? cu_seqlens_q=None, SymInt max_seqlen_q=1, Tensor? cu_seqlens_k_new=None, SymInt " \
    "new_keys=0, Tensor? cache_leftpad=None, bool causal=True, SymInt window_left=-1, SymInt " \
    "window_right=-1, SymInt attention_chunk=0, SymInt split_size=0"
#define BASED_OPTIONS                                                                           \
    "bool normalize=False, float eps=1e-12, Tensor? numerator=None, Tensor? denominator=None, " \
    "bool return_state=False"
#define LOLCATS_OPERANDS \
    "Tensor q, Tensor k, Tensor v, Tensor q_map, Tensor k_map, Tensor alpha, Tensor beta"
#define LOLCATS_STATE                                                                            \
    "Tensor? numerator=None, Tensor? denominator=None, Tensor? keys=None, Tensor? values=None, " \
    "Tensor? lengths=None"
#define LOLCATS_RESULTS \
    "Tensor out, Tensor numerator, Tensor denominator, Tensor keys, Tensor values, Tensor lengths"
#define SSD_OPERANDS "Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C"
#define SSD_OPTIONS                                                                              \
    "Tensor? D=None, Tensor? z=None, Tensor? dt_bias=None, Tensor? initial_state=None, Tensor? " \
    "cu_seqlens=None, bool dt_softplus=False, float dt_min=0.0, float? dt_max=None"
#define DECAY_OPTIONS                                                                           \
    "Tensor? decay=None, Tensor? g=None, Tensor? initial_state=None, Tensor? cu_seqlens=None, " \
    "float? scale=None, bool state_v_first=False"

#define CONV_OPERANDS                                                                    \
    "Tensor x, Tensor weight, Tensor? bias=None, int activation=0, Tensor? state=None, " \
    "Tensor? cu_seqlens=None"

#define DELTA_RULE_OPERANDS                                                                     \
    "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? initial_state=None, Tensor? " \
    "A_log=None, Tensor? dt_bias=None, Tensor? cu_seqlens=None"
#define DELTA_RULE_OPTIONS                                                    \
    "float? scale=None, bool qk_l2norm=False, bool beta_sigmoid=False, bool " \
    "allow_neg_eigval=False, bool state_v_first=False"

#define GEMM_EPILOGUE                                                                          \
    "Tensor? bias=None, ScalarType? out_dtype=None, Tensor? residual=None, int activation=0, " \
    "int gate=0, float alpha=1.0, float beta=1.0"

#define RMS_NORM_OPTIONS                                                                        \
    "float eps=1e-6, float weight_offset=0.0, float dropout_p=0.0, bool gate_first=False, int " \
    "group_size=0"
#define RMS_NORM                                                                        \
    "Tensor x, Tensor? weight=None, Tensor? residual=None, Tensor? gate=None, Tensor? " \
    "seed=None, " RMS_NORM_OPTIONS ") -> (Tensor out, Tensor sum)"
#define LAYER_NORM                                                                      \
    "Tensor x, Tensor? weight=None, Tensor? bias=None, Tensor? residual=None, Tensor? " \
    "seed=None, float eps=1e-5, float dropout_p=0.0) -> (Tensor out, Tensor sum)"
#define ROTARY_OPTIONS                                                               \
    "Tensor cos, Tensor sin, Tensor? positions=None, Tensor? offsets=None, Tensor? " \
    "cu_seqlens=None, bool interleaved=False, bool inverse=False, SymInt heads=-1"

STABLE_TORCH_LIBRARY(thunderkittens, m) {
    // (M, K) @ (K, N) or batched, fp32 accumulation; bias (N,); out_dtype None is the dtype of the
    // inputs.
    m.def("gemm(Tensor a, Tensor b, Tensor? bias=None, ScalarType? out_dtype=None) -> Tensor");
    m.def(
        "gemm_forward(Tensor a, Tensor b, Tensor? bias=None, ScalarType? out_dtype=None) -> "
        "Tensor");
    // activation(alpha * a @ b + bias) + beta * residual; activation: 0 none, 1 relu, 2 gelu, 3
    // gelu_tanh, 4 silu; gate: 0 none, 1 the first half of the columns, 2 the even ones.
    // `preactivation`, what the activation is applied to, is empty where there is none.
    m.def("gemm.fused(Tensor a, Tensor b, " GEMM_EPILOGUE
          ") -> (Tensor out, Tensor preactivation)");
    m.def("gemm_forward.fused(Tensor a, Tensor b, " GEMM_EPILOGUE ") -> Tensor");
    m.def("gemm_forward.out(Tensor a, Tensor b, " GEMM_EPILOGUE ", *, Tensor(a!) out) -> ()");

    // The gradient of the preactivation with a gate, from that of out: one pass over memory.
    m.def("gemm_backward(Tensor grad, Tensor z, int activation, int gate) -> Tensor");

    // One product per group: (M, K) @ (E, K, N) with rows of a, (E, M, K) @ (K, N) with columns of
    // b, or (M, K) @ (K, N) -> (E, M, N) with parts of K grouped by their ends offs (E,).
    m.def("grouped_gemm(Tensor a, Tensor b, Tensor offs) -> Tensor");
    m.def("grouped_gemm_forward(Tensor a, Tensor b, Tensor offs) -> Tensor");

    // x (M, K); granularity: 0 tensor, 1 row, 2 1x128, 3 128x128; dtype None is float8_e4m3fn; the
    // results are the codes, their scales (x is codes * scale), and, if transposed, those of x^T.
    m.def(
        "fp8_quantize(Tensor x, int granularity=1, ScalarType? dtype=None, Tensor? scale=None, "
        "bool transposed=False) -> (Tensor, Tensor, Tensor, Tensor)");
    // (M, K) @ (K, N), or (E, K, N) with the rows of a grouped by offs (E,); scale_a (1 or M, 1)
    // and scale_b (1, 1 or N), or (M, K / 128) and (K / 128, N / 128 or N); activation: 0 none, 1
    // relu, 2 gelu, 3 gelu_tanh, 4 silu; out_dtype None is bfloat16.
    m.def(
        "fp8_gemm(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias=None, "
        "int activation=0, ScalarType? out_dtype=None, bool accurate=True, Tensor? offs=None) -> "
        "Tensor");

    // Block-scaled formats of x (M, K) or (B, M, K): the elements, and the scales in the 128x4
    // layout (swizzle) or plain. MXFP8: 32 neighbours share an e8m0 scale; with transpose the same
    // of the transpose of x besides, else two empty tensors. NVFP4: 16 neighbours, or 16 x 16,
    // share an e4m3 scale and a matrix one in fp32.
    m.def(
        "mxfp8_quantize(Tensor x, ScalarType dtype, bool floor=False, bool swizzle=True, "
        "bool transpose=False) -> (Tensor data, Tensor scale, Tensor data_t, Tensor scale_t)");
    m.def(
        "mxfp8_dequantize(Tensor data, Tensor scale, ScalarType dtype, bool swizzle=True) -> "
        "Tensor");
    // (M, K) @ (K, N) of MXFP8 operands; scale_b is that of b's transpose (N, K), as mxfp8_quantize
    // makes it; activation as in fp8_gemm. With `rebased`, what mxfp8_prepare has made of a and of
    // b's transpose may be given. With offs b is (E, K, N), the scales of its transposes are in the
    // 128x4 layout, and the rows of a are grouped; not with `rebased`.
    m.def(
        "mxfp8_gemm(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias=None, "
        "int activation=0, ScalarType? out_dtype=None, bool rebased=False, bool swizzle_a=True, "
        "bool swizzle_b=True, Tensor? codes_a=None, Tensor? factor_a=None, Tensor? marks_a=None, "
        "Tensor? codes_b=None, Tensor? factor_b=None, Tensor? marks_b=None, Tensor? offs=None) -> "
        "Tensor");
    // data (rows, K) or (E, rows, K): e4m3 codes whose rows are padded to 16, their scales, a byte
    // for 16 rows.
    m.def(
        "mxfp8_prepare(Tensor data, Tensor scale, bool swizzle=True) -> (Tensor codes, Tensor "
        "factor, Tensor marks)");
    m.def(
        "nvfp4_quantize(Tensor x, Tensor? global_scale=None, bool square=False, bool swizzle=True, "
        "Tensor? seed=None) -> (Tensor data, Tensor block_scale, Tensor scale)");
    m.def(
        "nvfp4_dequantize(Tensor data, Tensor block_scale, Tensor global_scale, ScalarType dtype, "
        "bool swizzle=True) -> Tensor");
    // Of NVFP4 data (N, K / 2) or (E, N, K / 2) what the kernel of nvfp4_gemm reads, uint8
    // ((E,) N / 64, K / 64, 2304), and from there back to values.
    m.def("nvfp4_prepare(Tensor data, Tensor block_scale, bool swizzle=True) -> Tensor");
    m.def(
        "nvfp4_dequantize.prepared(Tensor data, Tensor global_scale, SymInt rows, SymInt columns, "
        "ScalarType dtype) -> Tensor");
    // a (M, K), a prepared b of (N, K) or (E, N, K) with the rows of a grouped by offs (E,);
    // global_scale fp32 () or (E,); activation: 0 none, 1 relu, 2 gelu, 3 gelu_tanh, 4 silu;
    // out_dtype None is that of a.
    m.def(
        "nvfp4_gemm(Tensor a, Tensor b, Tensor global_scale, SymInt n, Tensor? bias=None, "
        "int activation=0, ScalarType? out_dtype=None, Tensor? offs=None) -> Tensor");

    // q (B, Hq, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv); causal: 0 none, 1 aligned lower
    // right, 2 aligned upper left; windows: -1 is unbounded; softcap: 0 is none; alibi_slopes fp32
    // (Hq,) or (B, Hq); sink fp32 (Hq,); lse fp32 (B, Hq, Sq), natural logarithm.
    m.def("attention(Tensor q, Tensor k, Tensor v, " ATTENTION_OPTIONS
          ") -> (Tensor out, Tensor lse)");
    m.def("attention_forward(Tensor q, Tensor k, Tensor v, " ATTENTION_OPTIONS ") -> Tensor");
    m.def(
        "attention_backward(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, "
        "Tensor out, Tensor lse, " ATTENTION_OPTIONS
        ", bool[4] needs=[True, True, True, True]) -> " ATTENTION_GRADIENTS);

    // Packed sequences: q (Tq, Hq, D), k (Tk, Hkv, D), v (Tk, Hkv, Dv), cumulative lengths int32
    // (B + 1,), lse fp32 (Hq, Tq).
    m.def("attention_varlen(Tensor q, Tensor k, Tensor v, " ATTENTION_SEQUENCES
          ", " ATTENTION_OPTIONS ") -> (Tensor out, Tensor lse)");
    m.def("attention_varlen_forward(Tensor q, Tensor k, Tensor v, " ATTENTION_SEQUENCES
          ", " ATTENTION_OPTIONS ") -> Tensor");
    m.def(
        "attention_varlen_backward(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor "
        "v, Tensor out, Tensor lse, " ATTENTION_SEQUENCES ", " ATTENTION_OPTIONS
        ", bool[4] needs=[True, True, True, True]) -> " ATTENTION_GRADIENTS);

    // The newest queries of sequences over their keys in a cache: q (B, s, Hq, D) or packed (T, Hq,
    // D), caches (pages, page_size, Hkv, D or Dv), page_table int32 (sequences, pages) or none for
    // a page each, seq_lens int32 (B,), to which new_keys or cu_seqlens_k_new add; split_size: 0 is
    // none; mask int32 (tokens, words); scales fp32, of caches of 8 bits: one, (B, Hkv) or (pages,
    // page_size, Hkv); caches of NVFP4 have half as many columns, and block scales e4m3 (pages,
    // page_size, Hkv, D / 16 or Dv / 16); lse fp32 (B, Hq, s) or (Hq, T).
    m.def(
        "attention_paged(Tensor q, Tensor k_cache, Tensor v_cache, Tensor? page_table, Tensor "
        "seq_lens, " DECODE_SEQUENCES
        ", Tensor? cache_batch_idx=None, float? scale=None, float softcap=0.0, Tensor? "
        "alibi_slopes=None, Tensor? sink=None, Tensor? mask=None, Tensor? schedule=None, Tensor? "
        "rotary_cos=None, Tensor? rotary_sin=None, bool rotary_interleaved=False, Tensor? "
        "rotary_seqlens=None, Tensor? k_scale=None, Tensor? v_scale=None, Tensor? q_scale=None, "
        "Tensor? k_block_scale=None, Tensor? v_block_scale=None) -> (Tensor out, Tensor lse)");
    // The same of rectangular queries, causal, by the options that most calls have; out alone.
    m.def(
        "attention_paged_forward(Tensor q, Tensor k_cache, Tensor v_cache, Tensor? page_table, "
        "Tensor seq_lens, Tensor? schedule=None, Tensor? k_scale=None, Tensor? v_scale=None, "
        "Tensor? k_block_scale=None, Tensor? v_block_scale=None, float? scale=None, SymInt "
        "new_keys=0) -> Tensor");
    m.def(
        "attention_schedule(Tensor seq_lens, SymInt q_heads, SymInt kv_heads, SymInt head_dim, "
        "SymInt value_dim, " DECODE_SEQUENCES ", bool mask=False, bool codes=False) -> Tensor");
    // New keys and values into a cache: at slots int64 (T,), page * page_size + offset, or behind
    // the seq_lens keys that their sequence has. Scales of a cache of codes are as above; those of
    // tokens and of blocks are written.
    m.def(
        "append_kv(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor? "
        "page_table=None, Tensor? seq_lens=None, Tensor? slot_mapping=None, Tensor? "
        "cache_batch_idx=None, Tensor? cu_seqlens_k_new=None, Tensor? rotary_cos=None, Tensor? "
        "rotary_sin=None, Tensor? rotary_positions=None, Tensor? rotary_seqlens=None, bool "
        "rotary_interleaved=False, Tensor(c!)? k_scale=None, Tensor(d!)? v_scale=None, Tensor(e!)? "
        "k_block_scale=None, Tensor(f!)? v_block_scale=None) -> ()");
    // Attention over parts of the keys, outs of one shape with their lses.
    m.def("merge_attention(Tensor[] outs, Tensor[] lses) -> (Tensor out, Tensor lse)");

    // q and k (B, H, N, 16), v (B, H, N, Dv); a state is numerator (B, H, 153, Dv) and denominator
    // (B, H, 153), fp32, both or none, see csrc/linear_attention/common/linear_attention.h. A final
    // state that is not asked for has batch size 0. denominators (B, H, N), fp32, of the rows, with
    // eps; likewise where nothing is normalised.
    m.def("based(Tensor q, Tensor k, Tensor v, " BASED_OPTIONS
          ") -> (Tensor out, Tensor numerator, Tensor denominator, Tensor denominators)");
    m.def("based_forward(Tensor q, Tensor k, Tensor v, " BASED_OPTIONS
          ") -> (Tensor out, Tensor numerator, Tensor denominator)");
    m.def(
        "based_backward(Tensor grad_out, Tensor? grad_numerator, Tensor? grad_denominator, Tensor "
        "q, Tensor k, Tensor v, Tensor out, Tensor denominators, bool normalize=False, Tensor? "
        "numerator=None, Tensor? denominator=None, bool[4] needs=[True, True, True, True]) -> "
        "(Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor grad_numerator, Tensor "
        "grad_denominator)");
    // One token: q and k (B, H, 1, 16), v (B, H, 1, Dv); the state is brought up to date in place.
    m.def(
        "based_decode(Tensor q, Tensor k, Tensor v, Tensor(a!) numerator, Tensor(b!) denominator, "
        "bool normalize=False, float eps=1e-12) -> Tensor");

    // q (B, H, N, D), k and v (B, Hkv, N, D), maps (H, D, F), alpha and beta fp32 (H,); a state is
    // numerator (B, H, 2F, D) and denominator (B, H, 2F), fp32, keys and values (B, Hkv, 128, D),
    // lengths int32 (B,), all or none. A final state that is not asked for has batch size 0.
    // maxima, of the scores q . k / sqrt(D) in the window, and denominators: fp32 (B, H, N).
    m.def("lolcats(" LOLCATS_OPERANDS ", " LOLCATS_STATE
          ", bool return_state=False) -> "
          "(" LOLCATS_RESULTS ", Tensor maxima, Tensor denominators)");
    m.def("lolcats_forward(" LOLCATS_OPERANDS ", " LOLCATS_STATE
          ", bool return_state=False) -> (" LOLCATS_RESULTS ")");
    m.def("lolcats_backward(Tensor grad_out, " LOLCATS_OPERANDS
          ", Tensor out, Tensor maxima, Tensor denominators, " LOLCATS_STATE
          ", bool[7] needs=[True, True, True, True, True, True, True]) -> "
          "(Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor grad_q_map, Tensor grad_k_map, "
          "Tensor grad_alpha, Tensor grad_beta)");
    m.def("lolcats_decode(" LOLCATS_OPERANDS
          ", Tensor(a!) numerator, Tensor(b!) denominator, Tensor(c!) keys"
          ", Tensor(d!) values, Tensor(e!) lengths, bool sliding=False) -> Tensor");

    // x and z (B, H, T, P), dt (B, H, T), A and dt_bias (H,), B and C (B, G, T, N), D (H,) or (H,
    // P); states fp32 (B, H, P, N), of packed sequences (sequences, H, P, N) with cu_seqlens int32
    // (sequences + 1,) and batch 1; dt_max None is infinity. A final state that is not asked for
    // has no sequences.
    m.def("ssd(" SSD_OPERANDS ", " SSD_OPTIONS
          ", bool return_state=False) -> (Tensor out, Tensor final_state)");
    m.def("ssd_forward(" SSD_OPERANDS ", " SSD_OPTIONS ") -> Tensor");
    m.def("ssd_backward(Tensor grad_out, Tensor? grad_final_state, " SSD_OPERANDS ", " SSD_OPTIONS
          ", bool[9] needs=[True, True, True, True, True, True, True, True, True]) -> "
          "(Tensor grad_x, Tensor grad_dt, Tensor grad_A, Tensor grad_B, Tensor grad_C, Tensor "
          "grad_D, Tensor grad_z, Tensor grad_dt_bias, Tensor grad_initial_state)");
    // A few tokens per sequence; states (slots, H, P, N), of which state_indices int32 (B,) names
    // one for each sequence, or none by -1; they are brought up to date in place. apart: refuse a
    // state that may share memory with an operand or itself, by its addresses alone.
    m.def("ssd_decode(" SSD_OPERANDS
          ", Tensor(a!) state, Tensor? D=None, Tensor? z=None, Tensor? dt_bias=None, Tensor? "
          "state_indices=None, bool dt_softplus=False, float dt_min=0.0, float? dt_max=None, bool "
          "apart=False) -> Tensor");

    // q and k (B, Hk, T, K), v (B, H, T, V), decay (H,) and g (B, H, T), log decays; states fp32
    // (B, H, K, V), with state_v_first (B, H, V, K), of packed sequences as for ssd; scale None is
    // K^-0.5.
    m.def("linear_attention(Tensor q, Tensor k, Tensor v, " DECAY_OPTIONS
          ", bool return_state=False) -> (Tensor out, Tensor final_state)");
    m.def("linear_attention_forward(Tensor q, Tensor k, Tensor v, " DECAY_OPTIONS ") -> Tensor");
    m.def(
        "linear_attention_backward(Tensor grad_out, Tensor? grad_final_state, Tensor q, Tensor k, "
        "Tensor v, " DECAY_OPTIONS
        ", bool[6] needs=[True, True, True, True, True, True]) -> (Tensor grad_q, Tensor grad_k, "
        "Tensor grad_v, Tensor grad_decay, Tensor grad_g, Tensor grad_initial_state)");
    // As ssd_decode.
    m.def(
        "linear_attention_decode(Tensor q, Tensor k, Tensor v, Tensor(a!) state, Tensor? "
        "decay=None, Tensor? g=None, Tensor? state_indices=None, float? scale=None, bool "
        "state_v_first=False, bool apart=False) -> Tensor");

    // x (B, C, T), or packed sequences (1, C, T) with cumulative lengths int32 (N + 1,); weight (C,
    // W), W from 2 to 4, and bias (C,) of the dtype of x or fp32; activation: 0 none, 4 silu; state
    // (N, C, W - 1), the last inputs, of the dtype of x. A final state that is not asked for has
    // batch size 0.
    m.def("causal_conv1d(" CONV_OPERANDS
          ", bool return_state=False) -> (Tensor out, Tensor state)");
    m.def("causal_conv1d_forward(" CONV_OPERANDS ") -> Tensor");
    m.def("causal_conv1d_backward(Tensor grad_out, Tensor? grad_state, " CONV_OPERANDS
          ", bool[4] needs=[True, True, True, True]) -> (Tensor grad_x, Tensor grad_weight, Tensor "
          "grad_bias, Tensor grad_state)");
    // x (B, C) or (B, C, T), the next tokens; state (slots, C, W - 1 or more), brought up to date
    // in place; slots int32 (B,), negative ones are left out.
    m.def(
        "causal_conv1d_update(Tensor x, Tensor(a!) state, Tensor weight, Tensor? bias=None, int "
        "activation=0, Tensor? slots=None, bool apart=False) -> Tensor");

    // x (..., D), weight and bias (D,), of x's dtype or fp32; residual and gate of x's shape, seed
    // int64, of a dropout of x. Statistics are those of group_size neighbours, or of all where it
    // is 0. The sum of x and the residual has the residual's dtype; without one it is empty.
    m.def("rms_norm(" RMS_NORM);
    m.def("rms_norm_forward(" RMS_NORM);
    // Without a residual, and without what goes with one.
    m.def(
        "rms_norm_forward.single(Tensor x, Tensor? weight=None, Tensor? gate=None, float eps=1e-6, "
        "float weight_offset=0.0, bool gate_first=False, int group_size=0) -> Tensor");
    // x is what was normalised, the sum where there was a residual; needs: of x, residual, weight,
    // gate. Where the residual's gradient is that of x, it is empty.
    m.def(
        "rms_norm_backward(Tensor grad_out, Tensor? grad_sum, Tensor x, Tensor? weight, Tensor? "
        "gate, Tensor? seed, " RMS_NORM_OPTIONS
        ", bool[4] needs=[True, True, True, True]) -> (Tensor grad_x, Tensor grad_residual, Tensor "
        "grad_weight, Tensor grad_gate)");
    m.def("layer_norm(" LAYER_NORM);
    m.def("layer_norm_forward(" LAYER_NORM);
    m.def(
        "layer_norm_forward.single(Tensor x, Tensor? weight=None, Tensor? bias=None, float "
        "eps=1e-5) -> Tensor");
    m.def(
        "layer_norm_backward(Tensor grad_out, Tensor? grad_sum, Tensor x, Tensor? weight, Tensor? "
        "seed, float eps=1e-5, float dropout_p=0.0, bool[4] needs=[True, True, True, True]) -> "
        "(Tensor grad_x, Tensor grad_residual, Tensor grad_weight, Tensor grad_bias)");

    // The norms with results in fp8 or NVFP4. output: 0 fp8 with the scale that is given, 1 by
    // rows, 2 by 128 neighbours, 3 NVFP4 with the global scale that is given, the scales of its
    // blocks in the 128x4 layout (swizzle) or plain. Without a residual the sum is empty.
    m.def(
        "rms_norm_quantize(Tensor x, Tensor? weight=None, Tensor? residual=None, Tensor? "
        "scale=None, int output=1, bool swizzle=True, float eps=1e-6, float weight_offset=0.0) -> "
        "(Tensor data, Tensor data_scale, Tensor sum)");
    m.def(
        "layer_norm_quantize(Tensor x, Tensor? weight=None, Tensor? bias=None, Tensor? "
        "residual=None, Tensor? scale=None, int output=1, bool swizzle=True, float eps=1e-5) -> "
        "(Tensor data, Tensor data_scale, Tensor sum)");

    // x (B, H, T, D) or, packed, (T, H, D); cos and sin (positions, R / 2) or (B, T, R / 2), of x's
    // dtype or fp32; positions int32 or int64 (T,) or (B, T), offsets (B,), cu_seqlens int32;
    // heads: those that are rotated, -1 is all.
    m.def("rotary(Tensor x, " ROTARY_OPTIONS ") -> Tensor");
    m.def("rotary_forward(Tensor x, " ROTARY_OPTIONS ") -> Tensor");
    m.def("rotary_forward.in_place(Tensor(a!) x, " ROTARY_OPTIONS ") -> ()");

    // q and k (B, H, T, K), v (B, HV, T, V), g and beta (B, HV, T), A_log and dt_bias fp32 (HV,);
    // states (B, HV, K, V), or (B, HV, V, K) with state_v_first, of fp32 or bf16. With cu_seqlens,
    // int32 (N + 1,), B is 1 and there are N states. A final state that is not asked for has batch
    // size 0, and so has a gradient that is not.
    m.def("gated_delta_rule(" DELTA_RULE_OPERANDS ", " DELTA_RULE_OPTIONS
          ", bool return_state=False) -> (Tensor out, Tensor state)");
    m.def("gated_delta_rule_forward(" DELTA_RULE_OPERANDS ", " DELTA_RULE_OPTIONS ") -> Tensor");
    // needs: of q, k, v, g, beta, initial_state, A_log and dt_bias.
    m.def("gated_delta_rule_backward(Tensor grad_out, Tensor? grad_state, " DELTA_RULE_OPERANDS
          ", " DELTA_RULE_OPTIONS
          ", bool[8] needs=[True, True, True, True, True, True, True, True]) -> "
          "(Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor grad_g, Tensor grad_beta, Tensor "
          "grad_initial_state, Tensor grad_A_log, Tensor grad_dt_bias)");
    // T of 1 to 8; state (B, HV, K, V), or (slots, ...) with state_indices int32 (B,), of which -1
    // is skipped; it is brought up to date in place.
    m.def(
        "gated_delta_rule_decode(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) "
        "state, Tensor? state_indices=None, Tensor? A_log=None, Tensor? "
        "dt_bias=None, " DELTA_RULE_OPTIONS ", bool apart=False) -> Tensor");
}
