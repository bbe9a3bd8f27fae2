// attention_paged and attention_schedule on the emulator.
#include "csrc/common/emulated.h"
#include "csrc/attention/decode/append_kv_body.h"
#include "csrc/attention/decode/attention_paged_body.h"
#include "csrc/attention/decode/merge_attention_body.h"

namespace thunderkittens::attention::decode {
namespace {

using emulated::Array;

SequenceOptions<Array> sequences_of(const emulated::Call& call) {
    return {.seq_lens = call.array("seq_lens"),
            .cu_seqlens_q = call.if_given("cu_seqlens_q"),
            .max_seqlen_q = call.scalar<int64_t>("max_seqlen_q", 0),
            .cu_seqlens_k_new = call.if_given("cu_seqlens_k_new"),
            .new_keys = call.scalar<int64_t>("new_keys", 0),
            .cache_leftpad = call.if_given("cache_leftpad"),
            .causal = call.scalar("causal", true),
            .window_left = call.scalar<int64_t>("window_left", -1),
            .window_right = call.scalar<int64_t>("window_right", -1),
            .attention_chunk = call.scalar<int64_t>("attention_chunk", 0),
            .split_size = call.scalar<int64_t>("split_size", 0)};
}

emulated::Result run_paged(const emulated::Call& call) {
    Backend<Array> on(call);
    CacheOptions<Array> options{.page_table = call.if_given("page_table"),
                                .cache_batch_idx = call.if_given("cache_batch_idx"),
                                .softcap = call.scalar("softcap", 0.0),
                                .alibi_slopes = call.if_given("alibi_slopes"),
                                .sink = call.if_given("sink"),
                                .mask = call.if_given("mask"),
                                .schedule = call.if_given("schedule"),
                                .rotary_cos = call.if_given("rotary_cos"),
                                .rotary_sin = call.if_given("rotary_sin"),
                                .rotary_seqlens = call.if_given("rotary_seqlens"),
                                .rotary_interleaved = call.scalar("rotary_interleaved", false),
                                .k_scale = call.if_given("k_scale"),
                                .v_scale = call.if_given("v_scale"),
                                .q_scale = call.if_given("q_scale"),
                                .k_block_scale = call.if_given("k_block_scale"),
                                .v_block_scale = call.if_given("v_block_scale"),
                                .int8 = call.scalar("int8", false)};
    if (call.scalars.contains("scale")) options.scale = call.scalar("scale", 1.0);
    Array lse;
    const Array out =
        attention_paged_body<Array>(on, call.array("q"), call.array("k_cache"),
                                    call.array("v_cache"), sequences_of(call), options, &lse);
    return on.result({{"out", out}, {"lse", lse}});
}

emulated::Result run_schedule(const emulated::Call& call) {
    Backend<Array> on(call);
    const auto number = [&](const char* name) { return call.scalar<int64_t>(name, 0); };
    const Array schedule = attention_schedule_body<Array>(
        on, sequences_of(call), number("q_heads"), number("kv_heads"), number("head_dim"),
        number("value_dim"), call.scalar("mask", false), call.scalar("codes", false));
    return on.result({{"schedule", schedule}});
}

emulated::Result run_append(const emulated::Call& call) {
    Backend<Array> on(call);
    append_kv_body<Array>(on, call.array("k"), call.array("v"), call.array("k_cache"),
                          call.array("v_cache"),
                          {.page_table = call.if_given("page_table"),
                           .seq_lens = call.if_given("seq_lens"),
                           .slot_mapping = call.if_given("slot_mapping"),
                           .cache_batch_idx = call.if_given("cache_batch_idx"),
                           .cu_seqlens_k_new = call.if_given("cu_seqlens_k_new"),
                           .rotary_cos = call.if_given("rotary_cos"),
                           .rotary_sin = call.if_given("rotary_sin"),
                           .rotary_positions = call.if_given("rotary_positions"),
                           .rotary_seqlens = call.if_given("rotary_seqlens"),
                           .rotary_interleaved = call.scalar("rotary_interleaved", false),
                           .k_scale = call.if_given("k_scale"),
                           .v_scale = call.if_given("v_scale"),
                           .k_block_scale = call.if_given("k_block_scale"),
                           .v_block_scale = call.if_given("v_block_scale"),
                           .int8 = call.scalar("int8", false)});
    return on.result({});
}

emulated::Result run_merge(const emulated::Call& call) {
    Backend<Array> on(call);
    std::vector<Array> outs, lses;
    for (int i = 0; call.if_given(concat("out", i).c_str()); ++i) {
        outs.push_back(call.array(concat("out", i).c_str()));
        lses.push_back(call.array(concat("lse", i).c_str()));
    }
    Array lse;
    const Array out = merge_attention_body<Array>(on, outs, lses, lse);
    return on.result({{"out", out}, {"lse", lse}});
}

const bool registered = emulated::register_run("attention_paged", &run_paged) &&
                        emulated::register_run("attention_schedule", &run_schedule) &&
                        emulated::register_run("append_kv", &run_append) &&
                        emulated::register_run("merge_attention", &run_merge);

}  // namespace
}  // namespace thunderkittens::attention::decode
