// The attention ops for CUDA: checks what memory safety needs, allocates, chooses and launches.
#include "csrc/attention/forward.h"

#include <cmath>
#include <tuple>
#include <utility>

#include "csrc/common/tensor.h"

namespace thunderkittens::attention {

namespace {

constexpr const char* OP = "tk.attention";

constexpr std::size_t KERNELS = 2 * std::size(CONFIGS);
constexpr Config config_at(std::size_t i) {
    return with_dtype(CONFIGS[i / 2], i % 2 == 0 ? DType::bf16 : DType::fp16);
}
template <std::size_t... indices>
void launch_any(const Config& config, const ForwardParams& params, Stream stream,
                std::index_sequence<indices...>) {
    const bool found =
        ((config == config_at(indices) ? (launch_forward<config_at(indices)>(params, stream), true)
                                       : false) ||
         ...);
    TK_CHECK(found, OP, ": no kernel ", kernel_name({config}), " in this build");
}

Problem checked_problem(const Tensor& q, const Tensor& k, const Tensor& v, int64_t causal) {
    check_cuda(OP, "q", q);
    check_same_device(OP, "k", k, "q", q);
    check_same_device(OP, "v", v, "q", q);
    Problem p;
    p.dtype = check_dtype(OP, "q", q, {DType::bf16, DType::fp16});
    check_same_dtype(OP, "k", k, "q", q);
    check_same_dtype(OP, "v", v, "q", q);
    check_dims(OP, "q", q, {4});
    check_dims(OP, "k", k, {4});
    check_dims(OP, "v", v, {4});
    p.batch = q.size(0);
    p.q_heads = q.size(1);
    p.q_length = q.size(2);
    p.head_dim = q.size(3);
    p.kv_heads = k.size(1);
    p.k_length = k.size(2);
    p.causal = static_cast<int>(causal);
    TK_CHECK(k.size(0) == p.batch && k.size(3) == p.head_dim, OP, ": k must be (", p.batch,
             ", heads, length, ", p.head_dim, ") as q, got ", shape_text(k));
    for (int i = 0; i < 4; ++i) {
        TK_CHECK(v.size(i) == k.size(i), OP, ": v must have k's shape ", shape_text(k), ", got ",
                 shape_text(v));
    }
    return p;
}

Operand operand(const Tensor& x) {
    const View view = as_4d(x);
    return {view.data, view.stride[0], view.stride[1], view.stride[2]};
}

Tensor negative(const Tensor& x) {
    std::array<StableIValue, 1> stack{torch::stable::detail::from(x)};
    TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::neg", "", stack.data(), TORCH_ABI_VERSION));
    return torch::stable::detail::to<Tensor>(stack[0]);
}

Tensor forward(const Tensor& q_in, const Tensor& k_in, const Tensor& v_in, int64_t causal,
               std::optional<double> scale, Tensor* lse) {
    ForwardParams params;
    Problem& p = params.problem;
    p = checked_problem(q_in, k_in, v_in, causal);
    const DeviceGuard guard(q_in.get_device_index());
    Tensor out = torch::stable::empty_like(q_in);
    if (lse) *lse = empty({p.batch, p.q_heads, p.q_length}, ScalarType::Float, q_in);
    if (p.batch == 0 || p.q_heads == 0 || p.q_length == 0) return out;

    const DeviceProperties& device = device_properties(q_in.get_device_index());
    const std::string reason = unsupported(p, device);
    TK_CHECK(reason.empty(), OP, ": ", reason);
    params.scale =
        static_cast<float>(scale ? *scale : 1.0 / std::sqrt(static_cast<double>(p.head_dim)));
    Tensor q = for_tensor_map(q_in);
    // The kernel's running maximum wants a positive scale: the sign goes into q, and zero into
    // both.
    if (params.scale < 0) {
        q = for_tensor_map(negative(q_in));
        params.scale = -params.scale;
    } else if (params.scale == 0) {
        q = torch::stable::new_zeros(q_in, {p.batch, p.q_heads, p.q_length, p.head_dim});
        params.scale = 1;
    }
    // Without keys no key is read, but tensor maps need an address.
    const Tensor k = p.k_length ? for_tensor_map(k_in) : q;
    const Tensor v = p.k_length ? for_tensor_map(v_in) : q;
    // A view of q's layout may be one that TMA cannot write.
    const bool direct = fits_tensor_map(as_4d(out), 2);
    const Tensor out_buffer =
        direct ? out
               : empty({p.batch, p.q_heads, p.q_length, p.head_dim}, q_in.scalar_type(), q_in);
    params.q = operand(q);
    params.k = operand(k);
    params.v = operand(v);
    params.out = operand(out_buffer);
    params.lse = lse ? static_cast<float*>(lse->data_ptr()) : nullptr;
    params.sm_count = device.sm_count;
    const Choice choice = choose(p, device);
    params.section_heads = choice.section_heads;
    launch_any(choice.config, params, current_stream(q_in), std::make_index_sequence<KERNELS>());
    if (!direct) torch::stable::copy_(out, out_buffer);
    return out;
}

}  // namespace

Tensor attention_forward(const Tensor& q, const Tensor& k, const Tensor& v, int64_t causal,
                         std::optional<double> scale) {
    return forward(q, k, v, causal, scale, nullptr);
}

std::tuple<Tensor, Tensor> attention(const Tensor& q, const Tensor& k, const Tensor& v,
                                     int64_t causal, std::optional<double> scale) {
    Tensor lse;
    Tensor out = forward(q, k, v, causal, scale, &lse);
    return {out, lse};
}

STABLE_TORCH_LIBRARY_IMPL(thunderkittens, CUDA, m) {
    m.impl("attention_forward", TORCH_BOX(&attention_forward));
    m.impl("attention", TORCH_BOX(&attention));
}

}  // namespace thunderkittens::attention
