// The body of rotary, on any back end: checks, allocation, launch. Host C++ without torch.
#pragma once

#include <algorithm>
#include <limits>

#include "csrc/common/apart.h"
#include "csrc/common/backend.h"
#include "csrc/gemm/common/listed.h"
#include "csrc/rotary/rotary.h"

namespace thunderkittens::rotary {

constexpr const char* OP = "tk.rotary";

// A call beside its x.
template <class Tensor>
struct Options {
    const Tensor &cos, &sin;
    std::optional<Tensor> positions, offsets, cu_seqlens;
    bool interleaved = false, inverse = false;
    int64_t heads = -1;  // that are rotated; -1: all
};

// So many integers of 32 or 64 bits, in one dimension or as rows, if so many.
template <class Tensor>
Integers integers(const char* name, const Tensor& tensor, const Tensor& x, int64_t count,
                  int64_t rows = 0) {
    check_same_device(OP, name, tensor, "x", x);
    const bool is_wide = Backend<Tensor>::is_int64(tensor, count);
    if (!is_wide) check_dtype(OP, name, tensor, {DType::int32});
    const bool fits = tensor.dim() == 1 || (tensor.dim() == 2 && tensor.size(0) == rows);
    TK_CHECK(fits && (is_wide || tensor.numel() == count), OP, ": ", name, " has shape ",
             shape_text(tensor), " for x ", shape_text(x));
    return {tensor.data_ptr(), is_wide};
}

// Elements of a row are adjacent, else a copy.
template <class Tensor>
Tensor with_adjacent_rows(const Tensor& x) {
    const int64_t last = x.dim() - 1;
    return x.size(last) <= 1 || x.stride(last) == 1 ? x : packed(x);
}

template <class Tensor>
void check_table(const char* name, const Tensor& table, const Tensor& x, Params& p) {
    check_same_device(OP, name, table, "x", x);
    check_dims(OP, name, table, {2, 3});
    if (table.dim() == 3) {
        TK_CHECK(x.dim() == 4 && table.size(0) == p.batch && table.size(1) == p.length, OP, ": ",
                 name, " has shape ", shape_text(table), " for x ", shape_text(x),
                 "; with 3 dimensions it must have a row for each token");
    }
    TK_CHECK(2 * table.size(-1) <= p.dim, OP, ": ", name, " has shape ", shape_text(table),
             "; twice its columns must be at most the ", p.dim, " elements of a head");
}

// What each thread takes. Tokens are next to each other where a head's are in memory: then some of
// them first, so that warps have whole lines and blocks the same rows of the tables for many heads.
inline void set_threads(Params& p, int heads_of_thread) {
    constexpr int64_t NEIGHBOURS = 64;
    p.rotating = static_cast<int>(ceil_div(p.half, PAIRS));
    const int64_t others = p.in_place ? 0 : ceil_div(p.dim - 2 * p.half, PAIRS);
    const int64_t slots = p.rotating + ceil_div(others, 2);
    const int64_t chunks = ceil_div(p.in_place ? p.rotated_heads : p.heads, heads_of_thread);
    if (slots == 0 || chunks == 0) return;
    int64_t tokens = 1;
    if (p.x_stride[1] > p.x_stride[2])
        tokens = std::clamp<int64_t>(NEIGHBOURS / slots, 1, std::max<int64_t>(p.length, 1));
    p.group_count = ceil_div(p.length, tokens);
    p.slots = gemm::Divisor(static_cast<uint32_t>(slots));
    p.tokens = gemm::Divisor(static_cast<uint32_t>(tokens));
    p.chunks = gemm::Divisor(static_cast<uint32_t>(chunks));
    p.narrow = p.threads() < int64_t{1} << 31;
    if (p.narrow) p.groups = gemm::Divisor(static_cast<uint32_t>(p.group_count));
}

// Writes to `result`, which is x itself in place.
template <class Tensor>
void rotary_body(const Backend<Tensor>& on, const Tensor& input, Tensor* result,
                 const Options<Tensor>& o) {
    check_cuda(OP, "x", input);
    check_dims(OP, "x", input, {3, 4});
    const DType dtype = check_dtype(OP, "x", input, {DType::bf16, DType::fp16, DType::fp32});
    const bool is_packed = input.dim() == 3, in_place = result == nullptr;
    Params p;
    p.batch = is_packed ? 1 : input.size(0);
    p.length = input.size(is_packed ? 0 : 2);
    const int64_t heads = input.size(1);
    TK_CHECK(o.heads >= -1 && o.heads <= heads, OP, ": heads is ", o.heads, "; x has ", heads);
    Problem problem{.batch = p.batch,
                    .heads = heads,
                    .length = p.length,
                    .dim = input.size(-1),
                    .dtype = dtype,
                    .in_place = in_place};
    check_supported(OP, unsupported(problem, on.device(input)));
    p.heads = static_cast<int>(heads), p.dim = static_cast<int>(problem.dim);
    p.rotated_heads = static_cast<int>(o.heads < 0 ? heads : o.heads);
    check_table("cos", o.cos, input, p);
    check_table("sin", o.sin, input, p);
    p.wide_table = check_dtype(OP, "cos", o.cos, {dtype, DType::fp32}) == DType::fp32;
    check_same_dtype(OP, "sin", o.sin, "cos", o.cos);
    const auto &rows = o.cos.sizes(), &others = o.sin.sizes();
    TK_CHECK(std::equal(rows.begin(), rows.end(), others.begin(), others.end()), OP,
             ": sin has shape ", shape_text(o.sin), ", cos has ", shape_text(o.cos));
    p.table_of_tokens = o.cos.dim() == 3;
    TK_CHECK(!p.table_of_tokens || !is_packed, OP, ": cos has shape ", shape_text(o.cos),
             "; it must be (positions, R / 2)");
    const bool any_position = o.positions || o.offsets || o.cu_seqlens;
    TK_CHECK(!p.table_of_tokens || !any_position, OP,
             ": cos with a row for each token takes no positions, offsets or cu_seqlens");
    TK_CHECK(!o.cu_seqlens || is_packed, OP, ": cu_seqlens needs x (tokens, heads, dim), got ",
             shape_text(input));
    const auto guard = on.guard(input);
    const Tensor x = in_place ? input : with_adjacent_rows(input);
    TK_CHECK(x.size(-1) <= 1 || x.stride(x.dim() - 1) == 1, OP,
             ": in place, the elements of a head must be adjacent");
    TK_CHECK(!in_place || surely_apart(x), OP,
             ": in place, each element must have memory of its own; x has strides ",
             tuple_text(x.strides()));
    if (!in_place) *result = empty_as(x);
    const Tensor& out = in_place ? x : *result;

    const std::optional<Tensor> positions = packed(o.positions), offsets = packed(o.offsets),
                                edges = packed(o.cu_seqlens);
    p.sequences = p.batch;
    if (edges) {
        check_same_device(OP, "cu_seqlens", *edges, "x", input);
        check_dtype(OP, "cu_seqlens", *edges, {DType::int32});
        TK_CHECK(edges->dim() == 1 && edges->numel() >= 1, OP, ": cu_seqlens has shape ",
                 shape_text(*edges), "; it must be (sequences + 1,)");
        p.cu_seqlens = data_as<const int>(edges);
        p.sequences = edges->numel() - 1;
    }
    if (positions) {
        const bool of_batch = !is_packed && positions->dim() == 2;
        p.positions = integers("positions", *positions, input, (of_batch ? p.batch : 1) * p.length,
                               of_batch ? p.batch : 0);
        p.positions_stride = of_batch ? p.length : 0;
    }
    if (offsets) {
        check_dims(OP, "offsets", *offsets, {1});
        p.offsets = integers("offsets", *offsets, input, p.sequences);
    }
    if (out.numel() == 0) return;

    const Tensor cos = with_adjacent_rows(o.cos);
    const bool same_strides =
        cos.stride(-2) == o.sin.stride(-2) && cos.stride(0) == o.sin.stride(0);
    const bool together = same_strides && (o.sin.size(-1) <= 1 || o.sin.stride(-1) == 1);
    const Tensor cosines = together ? cos : packed(o.cos), sines = together ? o.sin : packed(o.sin);
    p.half = static_cast<int>(cosines.size(-1));
    p.cos = cosines.data_ptr(), p.sin = sines.data_ptr();
    p.table_rows = cosines.size(-2);
    p.table_stride = cosines.stride(-2);
    p.table_batch_stride = p.table_of_tokens ? cosines.stride(0) : 0;
    p.interleaved = o.interleaved, p.inverse = o.inverse, p.in_place = in_place;
    p.x = x.data_ptr(), p.out = out.data_ptr();
    const auto strides = [&](const Tensor& t, int64_t(&to)[3]) {
        to[0] = is_packed ? 0 : t.stride(0), to[1] = t.stride(1);
        to[2] = t.stride(is_packed ? 0 : 2);
    };
    strides(x, p.x_stride);
    strides(out, p.out_stride);
    const int64_t bytes = size_in_bytes(dtype), table_bytes = p.wide_table ? 4 : bytes;
    const auto whole = [](int64_t count) { return count % 16 == 0; };
    p.aligned = p.half % PAIRS == 0 && (p.dim - 2 * p.half) % PAIRS == 0;
    for (const void* pointer : {p.x, static_cast<const void*>(p.out), p.cos, p.sin}) {
        p.aligned &= whole(static_cast<int64_t>(reinterpret_cast<uintptr_t>(pointer)));
    }
    const int64_t sizes[3] = {p.batch, heads, p.length};
    for (int i = 0; i < 3; ++i) {
        if (sizes[i] <= 1) continue;
        p.aligned &= whole(p.x_stride[i] * bytes) && whole(p.out_stride[i] * bytes);
    }
    p.aligned &= p.table_rows <= 1 || whole(p.table_stride * table_bytes);
    p.aligned &= p.batch <= 1 || whole(p.table_batch_stride * table_bytes);
    set_threads(p, heads_of_thread(dtype));
    problem.rotated = 2 * p.half;
    const int64_t threads = p.threads();
    if (threads == 0) return;
    TK_CHECK(ceil_div(threads, THREADS) <= std::numeric_limits<int32_t>::max(), OP, ": x ",
             shape_text(input), " is too large");
    const Config config = on.chosen("rotary", choose(problem, on.device(input)));
    auto launch = on.launch("rotary", config, input);
    if (!in_place) launch.may_read("x", x);
    launch.may_read("cos", cosines);
    launch.may_read("sin", sines);
    launch.may_read("positions", positions);
    launch.may_read("offsets", offsets);
    launch.may_read("cu_seqlens", edges);
    launch.may_write("out", out);
    const bool found = gemm::launch_listed<config_at, CONFIGS>(config, [&]<Config c>() {
        if constexpr (!c.portable || BUILDS_PORTABLE) rotary::launch<c>(p, launch.stream);
        return true;
    });
    TK_CHECK(found, OP, ": no kernel ", kernel_name(config));
}

}  // namespace thunderkittens::rotary
