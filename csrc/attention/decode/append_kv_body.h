// The body of append_kv, on any back end. Host C++ without torch.
#pragma once

#include "csrc/attention/decode/cache.h"
#include "csrc/attention/decode/dispatch.h"

namespace thunderkittens::attention::decode {

template <class Tensor>
struct AppendOptions {
    std::optional<Tensor> page_table, seq_lens, slot_mapping, cache_batch_idx, cu_seqlens_k_new;
    std::optional<Tensor> rotary_cos, rotary_sin, rotary_positions, rotary_seqlens;
    bool rotary_interleaved = false;
    std::optional<Tensor> k_scale, v_scale, k_block_scale, v_block_scale;
    bool int8 = false;  // codes that the emulator has as those of fp8
};

template <class Tensor>
void append_kv_body(const Backend<Tensor>& on, const Tensor& k_in, const Tensor& v_in,
                    const Tensor& k_cache, const Tensor& v_cache,
                    const AppendOptions<Tensor>& options) {
    constexpr const char* OP = "tk.append_kv";
    check_cuda(OP, "k", k_in);
    AppendParams params;
    AppendProblem& p = params.problem;
    p.dtype = check_dtype(OP, "k", k_in, {DType::bf16, DType::fp16});
    const std::tuple<const char*, const Tensor&> others[] = {
        {"v", v_in}, {"k_cache", k_cache}, {"v_cache", v_cache}};
    for (const auto& [name, x] : others) {
        check_same_device(OP, name, x, "k", k_in);
    }
    check_same_dtype(OP, "v", v_in, "k", k_in);
    params.format = format_of(OP, k_cache, v_cache, k_in, options.k_block_scale,
                              options.v_block_scale, options.int8);
    p.codes = params.format != CacheFormat::same;
    p.nvfp4 = params.format == CacheFormat::nvfp4;
    check_dims(OP, "k", k_in, {3, 4});
    check_dims(OP, "v", v_in, {k_in.dim()});
    const bool packed = k_in.dim() == 3;
    for (int64_t i = 0; i < k_in.dim() - 1; ++i) {
        TK_CHECK(v_in.size(i) == k_in.size(i), OP, ": v must match k's shape ", shape_text(k_in),
                 ", got ", shape_text(v_in));
    }
    params.batch = packed ? 1 : k_in.size(0);
    params.row_count = k_in.size(packed ? 0 : 1);
    p.tokens = packed ? params.row_count : params.batch * params.row_count;
    p.kv_heads = k_in.size(k_in.dim() - 2);
    p.head_dim = k_in.size(k_in.dim() - 1);
    p.value_dim = v_in.size(v_in.dim() - 1);
    check_caches(OP, k_cache, v_cache, p.kv_heads, p.head_dim, p.value_dim, params.format);
    if (p.nvfp4) {
        params.block_scales = {
            block_scale_of(OP, "k_block_scale", *options.k_block_scale, "k_cache", k_cache),
            block_scale_of(OP, "v_block_scale", *options.v_block_scale, "v_cache", v_cache)};
    }
    params.pages_count = k_cache.size(0);
    const bool by_slot = options.slot_mapping.has_value();
    TK_CHECK(by_slot != options.seq_lens.has_value(), OP,
             ": either slot_mapping or seq_lens says where tokens go");
    if (by_slot) {
        const Tensor& slots = *options.slot_mapping;
        check_same_device(OP, "slot_mapping", slots, "k", k_in);
        TK_CHECK(Backend<Tensor>::is_int64(slots, p.tokens) && slots.is_contiguous(), OP,
                 ": slot_mapping must be contiguous int64 (", p.tokens, ",), got ",
                 shape_text(slots), " of ", dtype_text_of(slots));
        params.slot_mapping = data_as<const int64_t>(slots);
        params.pages.page_size = std::max<int64_t>(k_cache.size(1), 1);
    } else {
        const Tensor& lengths = *options.seq_lens;
        check_vector(OP, "seq_lens", lengths, DType::int32, k_in);
        check_dims(OP, "seq_lens", lengths, {1});
        params.k_lengths = data_as<const int>(lengths);
        if (packed) {
            TK_CHECK(options.cu_seqlens_k_new, OP,
                     ": packed keys need cu_seqlens_k_new beside seq_lens");
            check_vector(OP, "cu_seqlens_k_new", *options.cu_seqlens_k_new, DType::int32, k_in);
            TK_CHECK(options.cu_seqlens_k_new->dim() == 1 &&
                         options.cu_seqlens_k_new->size(0) == lengths.size(0) + 1,
                     OP, ": cu_seqlens_k_new must be (", lengths.size(0) + 1, ",), got ",
                     shape_text(*options.cu_seqlens_k_new));
            params.batch = lengths.size(0);
            params.cu_new = data_as<const int>(options.cu_seqlens_k_new);
        }
        TK_CHECK(lengths.size(0) == params.batch, OP, ": seq_lens must be (", params.batch,
                 ",), got ", shape_text(lengths));
        params.pages = pages_of(OP, "k", k_in, k_cache, options.page_table, options.cache_batch_idx,
                                params.batch);
        const int64_t pages = options.page_table ? options.page_table->size(1) : 1;
        params.most_keys = std::min<int64_t>(pages * k_cache.size(1), INT32_MAX);
    }
    params.k_scale =
        scales_of(OP, "k_scale", options.k_scale, k_cache, params.batch, params.format);
    params.v_scale =
        scales_of(OP, "v_scale", options.v_scale, v_cache, params.batch, params.format);
    for (const Scales* scales : {&params.k_scale, &params.v_scale}) {
        TK_CHECK(!by_slot || scales->tokens || scales->strides[0] + scales->strides[1] == 0, OP,
                 ": with slot_mapping a scale is one, or that of each token of the cache");
    }
    if (options.rotary_cos || options.rotary_sin) {
        TK_CHECK(options.rotary_cos && options.rotary_sin, OP,
                 ": rotary_cos and rotary_sin must be given together");
        params.rotary = rotary_of(OP, *options.rotary_cos, *options.rotary_sin,
                                  options.rotary_interleaved, "k", k_in, p.head_dim);
        if (options.rotary_positions) {
            const Tensor& positions = *options.rotary_positions;
            check_vector(OP, "rotary_positions", positions, DType::int32, k_in);
            TK_CHECK(positions.dim() == 1 && positions.size(0) == p.tokens, OP,
                     ": rotary_positions must be (", p.tokens, ",), got ", shape_text(positions));
            params.rotary_positions = data_as<const int>(positions);
        }
        if (options.rotary_seqlens) {
            const Tensor& begins = *options.rotary_seqlens;
            check_vector(OP, "rotary_seqlens", begins, DType::int32, k_in);
            TK_CHECK(!by_slot && begins.dim() == 1 && begins.size(0) == params.batch, OP,
                     ": rotary_seqlens must be (", params.batch, ",), beside seq_lens, got ",
                     shape_text(begins));
            params.rotary_begins = data_as<const int>(begins);
        }
        TK_CHECK(!by_slot || options.rotary_positions, OP,
                 ": with slot_mapping rotary needs rotary_positions");
    }
    const auto guard = on.guard(k_in);
    check_supported(OP, unsupported_append(p, on.device(k_in)));
    if (k_in.numel() + v_in.numel() == 0 || k_cache.size(0) == 0) return;
    const Tensor k = for_tensor_map(k_in), v = for_tensor_map(v_in);
    const auto operand_of = [&](const Tensor& x) -> Operand {
        const View view = as_4d(x);
        return {view.data, packed ? 0 : view.stride[0], view.stride[2], view.stride[1]};
    };
    params.k = operand_of(k);
    params.v = operand_of(v);
    params.k_cache = cache_of(OP, "k_cache", k_cache);
    params.v_cache = cache_of(OP, "v_cache", v_cache);
    const AppendChoice choice = on.chosen("append_kv", choose_append(p, on.device(k_in)));
    auto launch = on.launch("append_kv", choice, k_in);
    launch.may_read("k", k);
    launch.may_read("v", v);
    for (const auto& [name, x] : {std::pair{"page_table", &options.page_table},
                                  {"seq_lens", &options.seq_lens},
                                  {"slot_mapping", &options.slot_mapping},
                                  {"cache_batch_idx", &options.cache_batch_idx},
                                  {"cu_seqlens_k_new", &options.cu_seqlens_k_new},
                                  {"rotary_cos", &options.rotary_cos},
                                  {"rotary_sin", &options.rotary_sin},
                                  {"rotary_positions", &options.rotary_positions},
                                  {"rotary_seqlens", &options.rotary_seqlens}}) {
        launch.may_read(name, *x);
    }
    for (const auto& [name, x, scales] : {std::tuple{"k_scale", &options.k_scale, &params.k_scale},
                                          {"v_scale", &options.v_scale, &params.v_scale}}) {
        if (!*x) continue;
        if (scales->tokens)
            launch.may_write(name, **x);
        else
            launch.may_read(name, **x);
    }
    launch.may_write("k_cache", k_cache);
    launch.may_write("v_cache", v_cache);
    launch.may_write("k_block_scale", options.k_block_scale);
    launch.may_write("v_block_scale", options.v_block_scale);
    launch_append_of(choice, params, launch.stream);
}

}  // namespace thunderkittens::attention::decode
