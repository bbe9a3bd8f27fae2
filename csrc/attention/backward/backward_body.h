// The body of the gradient ops of attention, on any back end: checks what memory safety needs,
// allocates, chooses and launches. Host C++ without torch.
#pragma once

#include <tuple>
#include <utility>
#include <vector>

#include "csrc/attention/backward/backward_deterministic.h"
#include "csrc/attention/common/operands.h"

namespace thunderkittens::attention {

constexpr std::size_t BACKWARD_KERNELS =
    2 * (std::size(BACKWARD_CONFIGS) + std::size(PORTABLE_BACKWARD_CONFIGS));
constexpr BackwardConfig backward_config_at(std::size_t i) {
    constexpr std::size_t native = std::size(BACKWARD_CONFIGS);
    const BackwardConfig& c =
        i / 2 < native ? BACKWARD_CONFIGS[i / 2] : PORTABLE_BACKWARD_CONFIGS[i / 2 - native];
    return with_dtype(c, i % 2 == 0 ? DType::bf16 : DType::fp16);
}
template <std::size_t... indices>
void launch_any_of(const BackwardChoice& choice, const BackwardParams& params, Stream stream,
                   std::index_sequence<indices...>) {
    const bool found =
        ((choice.config == backward_config_at(indices)
              ? (launch_any_backward<backward_config_at(indices)>(params, stream), true)
              : false) ||
         ...);
    TK_CHECK(found, OP, ": no kernel ", kernel_name(choice), " in this build");
}

template <class Tensor>
void check_shape(const char* name, const Tensor& x, std::vector<int64_t> shape, DType dtype,
                 const Tensor& q) {
    check_same_device(OP, name, x, "q", q);
    TK_CHECK(x.scalar_type() == Backend<Tensor>::scalar_type(dtype), OP, ": ", name, " must be ",
             torch_name(dtype), ", got ", dtype_text_of(x));
    bool same = x.dim() == static_cast<int64_t>(shape.size());
    for (std::size_t i = 0; same && i < shape.size(); ++i) {
        same = x.size(static_cast<int64_t>(i)) == shape[i];
    }
    TK_CHECK(same, OP, ": ", name, " must be ", tuple_text(shape), ", got ", shape_text(x));
}

// A gradient of x, and what the kernel writes: the gradient itself, or a buffer that is copied into
// it where x has a layout that TMA cannot write.
template <class Tensor>
struct Gradient {
    Tensor result, buffer;
    bool direct = true;

    Gradient(const Tensor& x, bool needed)
        : result(needed ? empty_as(x) : empty({0}, x.scalar_type(), x)), buffer(result) {
        if (!needed || result.numel() == 0) return;
        direct = fits_tensor_map(as_4d(result), 2) && !overlaps();
        if (!direct) buffer = empty(x.sizes(), x.scalar_type(), x);
    }
    Operand target(bool packed) const {
        if (result.numel() == 0) return {};
        return packed ? packed_operand(buffer) : operand(buffer);
    }
    void finish() {
        if (!direct) copy_(result, buffer);
    }

  private:
    bool overlaps() const {
        for (int64_t i = 0; i < result.dim(); ++i) {
            if (result.size(i) > 1 && result.stride(i) == 0) return true;
        }
        return false;
    }
};

template <class Tensor>
using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor>;

template <class Tensor>
struct BackwardTensors {
    Tensor grad_out;
    std::optional<Tensor> grad_lse;
    Tensor q, k, v, out, lse;
};

template <class Tensor>
Gradients<Tensor> attention_backward_body(const Backend<Tensor>& on,
                                          const BackwardTensors<Tensor>& in,
                                          const Packing<Tensor>* packing,
                                          const Options<Tensor>& options,
                                          const std::vector<bool>& needs) {
    BackwardParams params;
    Problem& p = params.problem;
    p = packing ? checked_problem(OP, in.q, in.k, in.v, *packing, options)
                : checked_problem(OP, in.q, in.k, in.v, options);
    const std::vector<int64_t> out_shape =
        packing ? std::vector<int64_t>{in.q.size(0), p.q_heads, p.value_dim}
                : std::vector<int64_t>{p.batch, p.q_heads, p.q_length, p.value_dim};
    const std::vector<int64_t> row_shape =
        packing ? std::vector<int64_t>{p.q_heads, in.q.size(0)}
                : std::vector<int64_t>{p.batch, p.q_heads, p.q_length};
    check_shape("grad_out", in.grad_out, out_shape, p.dtype, in.q);
    check_shape("out", in.out, out_shape, p.dtype, in.q);
    check_shape("lse", in.lse, row_shape, DType::fp32, in.q);
    if (in.grad_lse) check_shape("grad_lse", *in.grad_lse, row_shape, DType::fp32, in.q);
    TK_CHECK(needs.size() == 4, OP, ": needs must have 4 elements, got ", needs.size());

    const auto guard = on.guard(in.q);
    Gradient<Tensor> dq(in.q, needs[0]), dk(in.k, needs[1]), dv(in.v, needs[2]);
    const bool need_sink = needs[3] && options.sink.has_value();
    Tensor dsink = empty({need_sink ? p.q_heads : 0}, DType::fp32, in.q);
    if (in.q.numel() == 0 || p.batch == 0) {
        for (Tensor* x : {&dq.result, &dk.result, &dv.result, &dsink}) zero_(*x);
        return {dq.result, dk.result, dv.result, dsink};
    }
    const DeviceProperties& device = on.device(in.q);
    const std::string reason = unsupported_backward(p, device);
    TK_CHECK(reason.empty(), OP, ": ", reason);
    params.scores = scores_of(OP, p, options, in.q);
    params.query_scale = params.scores.scale;
    if (packing) params.sequences = sequences_of(*packing, in.q, in.k);
    const Tensor q = signed_query(in.q, p.varlen, params.scores);
    // Without keys no key is read, but tensor maps need an address.
    const bool keys = in.k.numel() > 0;
    const Tensor k = keys ? for_kernel(in.k, p.varlen) : q;
    const Tensor v = keys ? for_kernel(in.v, p.varlen) : q;
    const Tensor out = for_kernel(in.out, p.varlen);
    const Tensor grad_out = for_kernel(in.grad_out, p.varlen);
    const Tensor lse = packed(in.lse);
    std::optional<Tensor> grad_lse;
    if (in.grad_lse) grad_lse = packed(*in.grad_lse);

    const BackwardChoice choice = on.chosen("attention_backward", choose_backward(p, device));
    params.deterministic = options.deterministic.value_or(false);
    params.head_splits = params.deterministic ? deterministic_head_splits(
                                                    p, choice.config, choice.head_splits, device)
                                              : choice.head_splits;
    params.section_heads =
        params.deterministic ? choice.deterministic_section_heads : choice.section_heads;
    const Tensor workspace =
        empty({workspace_floats(p, params.sequences, choice.config, params.head_splits)},
              DType::fp32, in.q);
    const auto describe = packing ? packed_operand<Tensor> : operand<Tensor>;
    params.q = describe(q);
    params.k = describe(k);
    params.v = describe(v);
    params.out = describe(out);
    params.grad_out = describe(grad_out);
    params.lse = data_as<const float>(lse);
    params.grad_lse = data_as<const float>(grad_lse);
    params.dq = dq.target(packing);
    params.dk = dk.target(packing);
    params.dv = dv.target(packing);
    params.dsink = need_sink ? data_as<float>(dsink) : nullptr;
    params.workspace = data_as<float>(workspace);
    params.sm_count = device.sm_count;
    auto launch = on.launch("attention", choice, in.q);
    launch.may_read("q", q);
    launch.may_read("k", k);
    launch.may_read("v", v);
    launch.may_read("out", out);
    launch.may_read("grad_out", grad_out);
    launch.may_read("lse", lse);
    launch.may_read("grad_lse", grad_lse);
    may_read_options(launch, packing, options);
    launch.may_write("dq", dq.buffer);
    launch.may_write("dk", dk.buffer);
    launch.may_write("dv", dv.buffer);
    launch.may_write("dsink", dsink);
    launch.may_write("workspace", workspace);
    launch_any_of(choice, params, launch.stream, std::make_index_sequence<BACKWARD_KERNELS>());
    for (Gradient<Tensor>* g : {&dq, &dk, &dv}) g->finish();
    return {dq.result, dk.result, dv.result, dsink};
}

}  // namespace thunderkittens::attention
