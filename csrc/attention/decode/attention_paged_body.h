// The bodies of attention_paged and attention_schedule, on any back end: check what memory safety
// needs, allocate, choose and launch. Host C++ without torch.
#pragma once

#include "csrc/attention/decode/cache.h"
#include "csrc/attention/decode/dispatch.h"
#include "csrc/attention/decode/prefill.h"

namespace thunderkittens::attention::decode {

// The arguments of the ops that say which keys and queries there are, in the order of the schemas.
#define DECODE_SEQUENCES                                                       \
    std::optional<Tensor> cu_seqlens_q, int64_t max_seqlen_q,                  \
        std::optional<Tensor> cu_seqlens_k_new, int64_t new_keys,              \
        std::optional<Tensor> cache_leftpad, bool causal, int64_t window_left, \
        int64_t window_right, int64_t attention_chunk, int64_t split_size
#define DECODE_SEQUENCE_VALUES             \
    {.seq_lens = seq_lens,                 \
     .cu_seqlens_q = cu_seqlens_q,         \
     .max_seqlen_q = max_seqlen_q,         \
     .cu_seqlens_k_new = cu_seqlens_k_new, \
     .new_keys = new_keys,                 \
     .cache_leftpad = cache_leftpad,       \
     .causal = causal,                     \
     .window_left = window_left,           \
     .window_right = window_right,         \
     .attention_chunk = attention_chunk,   \
     .split_size = split_size}

template <class Tensor>
struct SequenceOptions {
    Tensor seq_lens;
    std::optional<Tensor> cu_seqlens_q;
    int64_t max_seqlen_q = 0;
    std::optional<Tensor> cu_seqlens_k_new;
    int64_t new_keys = 0;
    std::optional<Tensor> cache_leftpad;
    bool causal = true;
    int64_t window_left = -1, window_right = -1;
    int64_t attention_chunk = 0, split_size = 0;

    void check(const char* op, const Tensor& first) const {
        check_vector(op, "seq_lens", seq_lens, DType::int32, first);
        check_dims(op, "seq_lens", seq_lens, {1});
        for (const auto& [name, x] :
             {std::pair{"cu_seqlens_q", &cu_seqlens_q}, {"cu_seqlens_k_new", &cu_seqlens_k_new}}) {
            if (!*x) continue;
            check_vector(op, name, **x, DType::int32, first);
            TK_CHECK((*x)->dim() == 1 && (*x)->size(0) == seq_lens.size(0) + 1, op, ": ", name,
                     " must be (", seq_lens.size(0) + 1, ",), got ", shape_text(**x));
        }
        if (cache_leftpad) {
            check_vector(op, "cache_leftpad", *cache_leftpad, DType::int32, first);
            TK_CHECK(cache_leftpad->dim() == 1 && cache_leftpad->size(0) == seq_lens.size(0), op,
                     ": cache_leftpad must be (", seq_lens.size(0), ",), got ",
                     shape_text(*cache_leftpad));
        }
        TK_CHECK(max_seqlen_q >= 0 && new_keys >= 0, op,
                 ": max_seqlen_q and the number of new keys must not be negative, got ",
                 max_seqlen_q, " and ", new_keys);
    }
    void fill(Problem& p, Params& params) const {
        p.batch = seq_lens.size(0);
        p.q_length = max_seqlen_q;
        p.causal = causal;
        p.window_left = window_left;
        p.window_right = window_right;
        p.attention_chunk = attention_chunk;
        p.split_size = split_size;
        p.varlen = cu_seqlens_q.has_value();
        params.sequences.k_lengths = data_as<const int>(seq_lens);
        params.sequences.cu_q = data_as<const int>(cu_seqlens_q);
        params.sequences.cu_new = data_as<const int>(cu_seqlens_k_new);
        params.sequences.new_keys = new_keys;
        params.sequences.first_keys = data_as<const int>(cache_leftpad);
    }
    template <class Launch>
    void may_be_read_by(Launch& launch) const {
        launch.may_read("seq_lens", seq_lens);
        launch.may_read("cu_seqlens_q", cu_seqlens_q);
        launch.may_read("cu_seqlens_k_new", cu_seqlens_k_new);
        launch.may_read("cache_leftpad", cache_leftpad);
    }
};

// Where the keys are, and what is done to scores.
template <class Tensor>
struct CacheOptions {
    std::optional<Tensor> page_table, cache_batch_idx;
    std::optional<double> scale;
    double softcap = 0;
    std::optional<Tensor> alibi_slopes, sink, mask, schedule;
    std::optional<Tensor> rotary_cos, rotary_sin, rotary_seqlens;  // of the queries
    bool rotary_interleaved = false;
    std::optional<Tensor> k_scale, v_scale, q_scale;
    std::optional<Tensor> k_block_scale, v_block_scale;
    bool int8 = false;  // codes that the emulator has as those of fp8
};

// At the begin of `memory`.
template <class Tensor>
void write_schedule(const Backend<Tensor>& on, const SequenceOptions<Tensor>& sequences,
                    Params& params, const Choice& choice, const Tensor& memory) {
    params.schedule = data_as<int>(memory);
    auto launch = on.launch("attention_paged schedule", memory);
    sequences.may_be_read_by(launch);
    launch.may_write("schedule", memory);
    launch_schedule_of(choice.config.portable, params, launch.stream);
}

template <class Tensor>
Tensor attention_schedule_body(const Backend<Tensor>& on, const SequenceOptions<Tensor>& sequences,
                               int64_t q_heads, int64_t kv_heads, int64_t head_dim,
                               int64_t value_dim, bool mask, bool codes) {
    constexpr const char* OP = "tk.attention_schedule";
    check_cuda(OP, "seq_lens", sequences.seq_lens);
    sequences.check(OP, sequences.seq_lens);
    const auto guard = on.guard(sequences.seq_lens);
    Params params;
    Problem& p = params.problem;
    sequences.fill(p, params);
    p.q_heads = q_heads;
    p.kv_heads = kv_heads;
    p.head_dim = head_dim;
    p.value_dim = value_dim;
    p.k_length = int64_t{1} << 28;
    p.mask = mask;
    p.codes = codes;
    params.sequences.tokens = INT32_MAX;
    check_supported(OP, unsupported(p, on.device(sequences.seq_lens)));
    const Choice choice = choose(p, on.device(sequences.seq_lens));
    params.parts = choice.parts;
    Tensor schedule =
        empty({schedule_shape(p, choice.parts).ints()}, DType::int32, sequences.seq_lens);
    write_schedule(on, sequences, params, choice, schedule);
    return schedule;
}

template <class Tensor>
Tensor attention_paged_body(const Backend<Tensor>& on, const Tensor& q_in, const Tensor& k_cache,
                            const Tensor& v_cache, const SequenceOptions<Tensor>& sequences,
                            const CacheOptions<Tensor>& options, Tensor* lse) {
    constexpr const char* OP = "tk.attention_paged";
    check_cuda(OP, "q", q_in);
    Params params;
    Problem& p = params.problem;
    p.dtype = check_dtype(OP, "q", q_in, {DType::bf16, DType::fp16});
    for (const auto& [name, x] : {std::pair{"k_cache", &k_cache}, {"v_cache", &v_cache}}) {
        check_same_device(OP, name, *x, "q", q_in);
        check_dims(OP, name, *x, {4});
    }
    sequences.check(OP, q_in);
    sequences.fill(p, params);
    const int64_t rows = p.varlen ? 3 : 4;
    check_dims(OP, "q", q_in, {rows});
    p.q_heads = q_in.size(rows - 2);
    p.kv_heads = k_cache.size(2);
    p.head_dim = q_in.size(rows - 1);
    params.format = format_of(OP, k_cache, v_cache, q_in, options.k_block_scale,
                              options.v_block_scale, options.int8);
    p.codes = params.format != CacheFormat::same;
    p.nvfp4 = params.format == CacheFormat::nvfp4;
    p.value_dim = columns_of(v_cache, params.format);
    if (!p.varlen) {
        TK_CHECK(q_in.size(0) == p.batch, OP, ": q must have as many sequences as seq_lens, ",
                 p.batch, ", got ", shape_text(q_in));
        p.q_length = q_in.size(1);
    }
    check_caches(OP, k_cache, v_cache, p.kv_heads, p.head_dim, p.value_dim, params.format);
    params.pages =
        pages_of(OP, "q", q_in, k_cache, options.page_table, options.cache_batch_idx, p.batch);
    params.sequences.tokens = p.varlen ? q_in.size(0) : 0;
    p.q_length = p.varlen ? std::min(p.q_length, q_in.size(0)) : p.q_length;
    const int64_t pages = options.page_table ? options.page_table->size(1) : 1;
    p.k_length = k_cache.size(0) == 0 ? 0 : pages * k_cache.size(1);
    p.tokens = p.varlen ? q_in.size(0) : p.batch * p.q_length;
    p.page_size = options.page_table ? k_cache.size(1) : 0;
    p.leftpad = sequences.cache_leftpad.has_value();
    if (p.nvfp4) {
        params.block_scales = {
            block_scale_of(OP, "k_block_scale", *options.k_block_scale, "k_cache", k_cache),
            block_scale_of(OP, "v_block_scale", *options.v_block_scale, "v_cache", v_cache)};
    }
    params.k_scale = scales_of(OP, "k_scale", options.k_scale, k_cache, p.batch, params.format);
    params.v_scale = scales_of(OP, "v_scale", options.v_scale, v_cache, p.batch, params.format);
    params.q_scale = scales_of(OP, "q_scale", options.q_scale, k_cache, p.batch, params.format);
    TK_CHECK(!params.q_scale.tokens, OP, ": q_scale must have one element, or be (", p.batch, ", ",
             p.kv_heads, "), got ", shape_text(*options.q_scale));
    p.mask = options.mask.has_value();
    if (p.mask) {
        check_vector(OP, "mask", *options.mask, DType::int32, q_in);
        check_dims(OP, "mask", *options.mask, {2});
        TK_CHECK(options.mask->size(0) == p.tokens, OP, ": mask must have a row for each of the ",
                 p.tokens, " queries, got ", shape_text(*options.mask));
        params.mask = data_as<const int>(options.mask);
        params.mask_stride = options.mask->stride(0);
        params.mask_words = options.mask->size(1);
    }
    p.rotary = options.rotary_cos || options.rotary_sin;
    if (p.rotary) {
        TK_CHECK(options.rotary_cos && options.rotary_sin, OP,
                 ": rotary_cos and rotary_sin must be given together");
        params.rotary = rotary_of(OP, *options.rotary_cos, *options.rotary_sin,
                                  options.rotary_interleaved, "q", q_in, p.head_dim);
        if (options.rotary_seqlens) {
            const Tensor& begins = *options.rotary_seqlens;
            check_vector(OP, "rotary_seqlens", begins, DType::int32, q_in);
            TK_CHECK(begins.dim() == 1 && begins.size(0) == p.batch, OP,
                     ": rotary_seqlens must be (", p.batch, ",), got ", shape_text(begins));
            params.sequences.rotary_begins = data_as<const int>(begins);
        }
    }
    const DeviceProperties& device = on.device(q_in);
    const auto guard = on.guard(q_in);
    Tensor out =
        p.varlen ? empty({q_in.size(0), p.q_heads, p.value_dim}, q_in.scalar_type(), q_in)
                 : empty({p.batch, p.q_length, p.q_heads, p.value_dim}, q_in.scalar_type(), q_in);
    if (lse) {
        *lse = p.varlen ? empty({p.q_heads, q_in.size(0)}, DType::fp32, q_in)
                        : empty({p.batch, p.q_heads, p.q_length}, DType::fp32, q_in);
    }
    attention::Problem for_scores{
        .dtype = p.dtype, .batch = p.batch, .q_heads = p.q_heads, .head_dim = p.head_dim};
    const Options<Tensor> score_options{.scale = options.scale,
                                        .softcap = options.softcap,
                                        .alibi_slopes = options.alibi_slopes,
                                        .sink = options.sink};
    params.scores = scores_of(OP, for_scores, score_options, q_in);
    if (out.numel() == 0) return out;
    check_supported(OP, unsupported(p, device));
    params.k = cache_of(OP, "k_cache", k_cache);
    params.v = cache_of(OP, "v_cache", v_cache);
    const Tensor q = signed_query(q_in, p.varlen, params.scores);
    // Tokens, then heads: as they are packed.
    const auto operand_of = [&](const Tensor& x) -> Operand {
        const View view = as_4d(x);
        return {view.data, p.varlen ? 0 : view.stride[0], view.stride[2], view.stride[1]};
    };
    params.q = operand_of(q);
    params.out = operand_of(out);
    params.lse = lse ? data_as<float>(*lse) : nullptr;
    const Choice choice = on.chosen("attention_paged", choose(p, device));
    const auto reads_operands = [&](auto& launch) {
        sequences.may_be_read_by(launch);
        for (const auto& [name, x] :
             {std::pair{"q", &q}, {"k_cache", &k_cache}, {"v_cache", &v_cache}}) {
            launch.may_read(name, *x);
        }
        for (const auto& [name, x] : {std::pair{"page_table", &options.page_table},
                                      {"cache_batch_idx", &options.cache_batch_idx},
                                      {"alibi_slopes", &options.alibi_slopes},
                                      {"sink", &options.sink}}) {
            launch.may_read(name, *x);
        }
        launch.may_write("out", out);
        if (lse) launch.may_write("lse", *lse);
    };
    const int64_t k_page_rows = page_rows_of(k_cache), v_page_rows = page_rows_of(v_cache);
    if (choice.prefill && can_prefill(p) && k_page_rows >= 0 && v_page_rows >= 0) {
        ForwardParams whole =
            forward_params(params, k_page_rows, v_page_rows, k_cache.size(0), device.sm_count);
        const attention::Choice kernel = attention::choose_paged(whole.problem, device);
        whole.section_heads = kernel.section_heads;
        auto launch = on.launch("attention_paged", kernel, q_in);
        reads_operands(launch);
        attention::launch_choice(OP, kernel, whole, launch.stream);
        return out;
    }
    params.parts = choice.parts;
    const ScheduleShape shape = schedule_shape(p, choice.parts);
    // One allocation, as each takes host time: a schedule of the call's own, then partial results,
    // which begin with a line of 128 bytes.
    const int64_t own_ints = options.schedule ? 0 : round_up(shape.ints(), 32);
    const int64_t partial_rows = shape.slots * p.tile_rows();
    Tensor workspace = empty({own_ints + partial_rows * (p.value_dim + 1)}, DType::int32, q_in);
    params.partial_out = data_as<float>(workspace) + own_ints;
    params.partial_lse = params.partial_out + partial_rows * p.value_dim;
    if (options.schedule) {
        const Tensor& schedule = *options.schedule;
        check_vector(OP, "schedule", schedule, DType::int32, q_in);
        TK_CHECK(schedule.numel() == shape.ints(), OP, ": schedule must have ", shape.ints(),
                 " numbers for this call, got ", schedule.numel(),
                 "; tk.attention_schedule makes it from the same arguments");
        TK_CHECK(reinterpret_cast<uintptr_t>(schedule.data_ptr()) % 16 == 0, OP,
                 ": schedule must begin at a multiple of 16 bytes");
        params.schedule = data_as<int>(schedule);
    } else {
        write_schedule(on, sequences, params, choice, workspace);
    }
    auto launch = on.launch("attention_paged", choice, q_in);
    reads_operands(launch);
    for (const auto& [name, x] : {std::pair{"mask", &options.mask},
                                  {"rotary_cos", &options.rotary_cos},
                                  {"rotary_sin", &options.rotary_sin},
                                  {"k_scale", &options.k_scale},
                                  {"v_scale", &options.v_scale},
                                  {"q_scale", &options.q_scale},
                                  {"k_block_scale", &options.k_block_scale},
                                  {"v_block_scale", &options.v_block_scale},
                                  {"rotary_seqlens", &options.rotary_seqlens},
                                  {"schedule", &options.schedule}}) {
        launch.may_read(name, *x);
    }
    launch.may_write("workspace", workspace);
    TK_CHECK(launch_choice(choice, params, launch.stream), OP, ": no kernel ", kernel_name(choice),
             " in this build");
    if (shape.slots > 0) launch_combine_of(choice.config.portable, p.dtype, params, launch.stream);
    return out;
}

}  // namespace thunderkittens::attention::decode
