// A cache of keys and values as the ops take it, and its page table: checks, and the plain structs
// that kernels take. Host C++ without torch.
#pragma once

#include "csrc/attention/common/operands.h"
#include "csrc/attention/decode/decode.h"

namespace thunderkittens::attention::decode {

// How many elements a row of a cache has.
template <class Tensor>
int64_t columns_of(const Tensor& cache, CacheFormat format) {
    return cache.size(3) * (format == CacheFormat::nvfp4 ? 2 : 1);
}

template <class Tensor>
void check_caches(const char* op, const Tensor& k_cache, const Tensor& v_cache, int64_t heads,
                  int64_t head_dim, int64_t value_dim, CacheFormat format) {
    check_dims(op, "k_cache", k_cache, {4});
    check_dims(op, "v_cache", v_cache, {4});
    TK_CHECK(k_cache.size(2) == heads && columns_of(k_cache, format) == head_dim, op,
             ": k_cache must have ", heads, " heads of ", head_dim, ", got ", shape_text(k_cache));
    for (int i = 0; i < 3; ++i) {
        TK_CHECK(v_cache.size(i) == k_cache.size(i), op, ": v_cache must match k_cache's shape ",
                 shape_text(k_cache), ", got ", shape_text(v_cache));
    }
    TK_CHECK(columns_of(v_cache, format) == value_dim, op, ": v_cache must have the value dim ",
             value_dim, ", got ", shape_text(v_cache));
}

// (pages, page_size, heads, dim)
template <class Tensor>
Cache cache_of(const char* op, const char* name, const Tensor& x) {
    const View view = as_4d(x);
    const int64_t bytes = x.element_size();
    bool aligned = reinterpret_cast<uintptr_t>(view.data) % 16 == 0;
    for (int i = 0; i < 3; ++i) aligned &= view.stride[i] * bytes % 16 == 0 || view.size[i] <= 1;
    TK_CHECK(x.numel() == 0 || (aligned && (view.stride[3] == 1 || view.size[3] == 1)), op, ": ",
             name,
             " must have adjacent elements, and rows that begin at multiples of 16 bytes; got "
             "strides ",
             tuple_text(x.strides()));
    return {view.data, view.stride[0], view.stride[1], view.stride[2]};
}

// What both caches hold, beside queries of 16 bits: NVFP4 where there are scales of blocks.
template <class Tensor>
CacheFormat format_of(const char* op, const Tensor& k_cache, const Tensor& v_cache, const Tensor& q,
                      const std::optional<Tensor>& k_block_scale,
                      const std::optional<Tensor>& v_block_scale, bool int8) {
    using Types = Backend<Tensor>;
    check_same_dtype(op, "v_cache", v_cache, "k_cache", k_cache);
    TK_CHECK(k_block_scale.has_value() == v_block_scale.has_value(), op,
             ": k_block_scale and v_block_scale must be given together");
    if (k_block_scale) {
        const auto type = k_cache.scalar_type();
        TK_CHECK(type == Types::E2M1X2 || type == Types::BYTE, op, ": k_cache is ",
                 dtype_text_of(k_cache),
                 "; with k_block_scale it must be torch.float4_e2m1fn_x2 or torch.uint8");
        return CacheFormat::nvfp4;
    }
    if (int8 || Types::is_int8(k_cache)) return CacheFormat::int8;
    const auto dtype = Types::dtype_of(k_cache.scalar_type());
    if (dtype == DType::e4m3) return CacheFormat::e4m3;
    if (dtype == DType::e5m2) return CacheFormat::e5m2;
    TK_CHECK(k_cache.scalar_type() == q.scalar_type(), op, ": k_cache is ", dtype_text_of(k_cache),
             "; it must be q's ", dtype_text_of(q), ", or of 8 bits, or NVFP4 with k_block_scale");
    return CacheFormat::same;
}
// Of NVFP4: (pages, page_size, heads, dim / 16) beside a cache.
template <class Tensor>
Cache block_scale_of(const char* op, const char* name, const Tensor& x, const char* cache_name,
                     const Tensor& cache) {
    check_same_device(op, name, x, cache_name, cache);
    check_dtype(op, name, x, {DType::e4m3});
    check_dims(op, name, x, {4});
    bool fits = 2 * cache.size(3) == NV_BLOCK * x.size(3);
    bool aligned = reinterpret_cast<uintptr_t>(x.data_ptr()) % 4 == 0;
    for (int i = 0; i < 3; ++i) {
        fits &= x.size(i) == cache.size(i);
        aligned &= x.stride(i) % 4 == 0 || x.size(i) <= 1;
    }
    TK_CHECK(fits, op, ": ", name, " must have a scale for each 16 elements of ", cache_name, ", ",
             shape_text(cache), " bytes, got ", shape_text(x));
    TK_CHECK(x.numel() == 0 || (aligned && (x.stride(3) == 1 || x.size(3) == 1)), op, ": ", name,
             " must have adjacent elements, and rows that begin at multiples of 4 bytes; got "
             "strides ",
             tuple_text(x.strides()));
    const View view = as_4d(x);
    return {view.data, view.stride[0], view.stride[1], view.stride[2]};
}
// Of one factor, (batch, heads), or (pages, page_size, heads) as the cache has them.
template <class Tensor>
Scales scales_of(const char* op, const char* name, const std::optional<Tensor>& x,
                 const Tensor& cache, int64_t batch, CacheFormat format) {
    if (!x) return {};
    check_same_device(op, name, *x, "k_cache", cache);
    check_dtype(op, name, *x, {DType::fp32});
    TK_CHECK(format != CacheFormat::same, op, ": ", name, " is for caches of 8 or 4 bits");
    Scales scales{.data = data_as<const float>(x), .tokens = x->dim() == 3};
    TK_CHECK(!scales.tokens || format != CacheFormat::nvfp4, op, ": ", name,
             " of a cache of NVFP4 must have one element, or be of sequences and heads");
    const int64_t heads = cache.size(2);
    if (x->numel() == 1 && x->dim() <= 1) return scales;
    const int64_t of_heads[] = {batch, heads};
    const int64_t of_tokens[] = {cache.size(0), cache.size(1), heads};
    bool fits = x->dim() == 2 || x->dim() == 3;
    for (int64_t i = 0; fits && i < x->dim(); ++i) {
        fits = x->size(i) == (scales.tokens ? of_tokens[i] : of_heads[i]);
        scales.strides[i] = x->stride(i);
    }
    TK_CHECK(fits, op, ": ", name, " must have one element, or be (", batch, ", ", heads, ") or (",
             cache.size(0), ", ", cache.size(1), ", ", heads, "), got ", shape_text(*x));
    return scales;
}

// Of `batch` sequences; without a table each has a page. `first` is an operand on their device.
template <class Tensor>
Pages pages_of(const char* op, const char* first_name, const Tensor& first, const Tensor& k_cache,
               const std::optional<Tensor>& table, const std::optional<Tensor>& rows,
               int64_t batch) {
    Pages pages{.page_size = std::max<int64_t>(k_cache.size(1), 1)};
    int64_t lines = k_cache.size(0);
    if (table) {
        check_vector(op, "page_table", *table, DType::int32, first);
        check_dims(op, "page_table", *table, {2});
        lines = table->size(0);
        pages.table = data_as<const int>(table);
        pages.table_stride = table->stride(0);
    }
    if (rows) {
        check_vector(op, "cache_batch_idx", *rows, DType::int32, first);
        TK_CHECK(rows->dim() == 1 && rows->size(0) == batch, op, ": cache_batch_idx must be (",
                 batch, ",), got ", shape_text(*rows));
        pages.rows = data_as<const int>(rows);
    }
    TK_CHECK(rows || lines >= batch, op, ": ", table ? "page_table" : "k_cache", " has ", lines,
             " sequences, ", first_name, " has ", batch);
    return pages;
}

// A table for rows of so many columns, of which the first are rotated.
template <class Tensor>
Rotary rotary_of(const char* op, const Tensor& cos, const Tensor& sin, bool interleaved,
                 const char* name, const Tensor& x, int64_t columns) {
    for (const auto& [which, table] : {std::pair{"rotary_cos", &cos}, {"rotary_sin", &sin}}) {
        check_same_device(op, which, *table, name, x);
        check_same_dtype(op, which, *table, name, x);
        check_dims(op, which, *table, {2});
        TK_CHECK(table->is_contiguous(), op, ": ", which, " must be contiguous, got strides ",
                 tuple_text(table->strides()));
    }
    TK_CHECK(cos.size(0) == sin.size(0) && cos.size(1) == sin.size(1) && cos.size(0) > 0, op,
             ": rotary_cos and rotary_sin must have one shape, (positions, dim / 2), got ",
             shape_text(cos), " and ", shape_text(sin));
    const int64_t dim = 2 * cos.size(1);
    TK_CHECK(dim > 0 && dim % 16 == 0 && dim <= columns, op,
             ": rotary_cos must have a multiple of 8 columns, at most half of the head dim ",
             columns, ", got ", shape_text(cos));
    TK_CHECK(cos.size(0) <= INT32_MAX, op, ": rotary_cos has too many positions");
    return {cos.data_ptr(), sin.data_ptr(), static_cast<int>(dim), interleaved, cos.size(0)};
}

}  // namespace thunderkittens::attention::decode
