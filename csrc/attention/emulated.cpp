// Attention on the emulator, as attention.cpp does it on CUDA tensors.
#include <cmath>

#include "csrc/attention/forward.h"
#include "csrc/common/emulated.h"

namespace thunderkittens::attention {
namespace {

using emulated::Array;

constexpr std::size_t KERNELS = 2 * std::size(CONFIGS);
constexpr Config config_at(std::size_t i) {
    return with_dtype(CONFIGS[i / 2], i % 2 == 0 ? DType::bf16 : DType::fp16);
}
template <std::size_t... indices>
void launch_any(const Config& config, const ForwardParams& params,
                std::index_sequence<indices...>) {
    const bool found =
        ((config == config_at(indices) ? (launch_forward<config_at(indices)>(params, nullptr), true)
                                       : false) ||
         ...);
    TK_CHECK(found, "tk.attention: no kernel ", kernel_name({config}));
}

Operand operand(const Array& x) {
    const View view = x.view();
    return {view.data, view.stride[0], view.stride[1], view.stride[2]};
}

Problem checked_problem(const Array& q, const Array& k, const Array& v, int causal) {
    TK_CHECK(q.dims() == 4 && k.dims() == 4 && v.size == k.size && k.size[0] == q.size[0] &&
                 k.size[3] == q.size[3] && q.dtype == k.dtype && q.dtype == v.dtype,
             "tk.attention: q ", tuple_text(q.size), ", k ", tuple_text(k.size), " and v ",
             tuple_text(v.size), " do not match");
    return {.dtype = q.dtype,
            .batch = q.size[0],
            .q_heads = q.size[1],
            .kv_heads = k.size[1],
            .q_length = q.size[2],
            .k_length = k.size[2],
            .head_dim = q.size[3],
            .causal = causal};
}

// A negative scale puts its sign into q.
Array negative(const Array& x) {
    Array copy = emulated::copy_for_tensor_map(x);
    emulated::for_each_row(copy, [&](int64_t at, int64_t, int64_t, int64_t) {
        for (int64_t c = 0; c < copy.size.back(); ++c) copy.data[2 * (at + c) + 1] ^= 0x80;
    });
    return copy;
}
Array zeros_like(const Array& x) {
    Array copy = emulated::copy_for_tensor_map(x);
    std::memset(copy.data, 0, static_cast<std::size_t>(copy.extent()));
    return copy;
}

emulated::Result run(const emulated::Call& call) {
    const Array &q_in = call.array("q"), &k_in = call.array("k"), &v_in = call.array("v");
    ForwardParams params;
    Problem& p = params.problem;
    p = checked_problem(q_in, k_in, v_in, call.scalar("causal", 0));
    Array out = emulated::allocate(q_in.size, q_in.dtype);
    Array lse = emulated::allocate({p.batch, p.q_heads, p.q_length}, DType::fp32);
    emulated::Result result;
    result.arrays["out"] = out;
    result.arrays["lse"] = lse;
    if (p.batch == 0 || p.q_heads == 0 || p.q_length == 0) return result;
    const std::string reason = unsupported(p, call.device);
    TK_CHECK(reason.empty(), "tk.attention: ", reason);
    params.scale =
        static_cast<float>(call.scalar("scale", 1.0 / std::sqrt(static_cast<double>(p.head_dim))));
    Array q = emulated::for_tensor_map(q_in);
    if (params.scale < 0) {
        q = negative(q_in);
        params.scale = -params.scale;
    } else if (params.scale == 0) {
        q = zeros_like(q_in);
        params.scale = 1;
    }
    // Without keys no key is read, but tensor maps need an address.
    const Array k = p.k_length ? emulated::for_tensor_map(k_in) : q;
    const Array v = p.k_length ? emulated::for_tensor_map(v_in) : q;
    params.q = operand(q);
    params.k = operand(k);
    params.v = operand(v);
    params.out = operand(out);
    params.lse = call.scalar("lse", true) ? reinterpret_cast<float*>(lse.data) : nullptr;
    params.sm_count = call.device.sm_count;
    Choice choice = choose(p, call.device);
    emulated::force(choice, call);
    params.section_heads = choice.section_heads;
    emulated::Launch scope("attention " + kernel_name(choice));
    scope.may_read("q", q);
    scope.may_read("k", k);
    scope.may_read("v", v);
    scope.may_write("out", out);
    scope.may_write("lse", lse);
    launch_any(choice.config, params, std::make_index_sequence<KERNELS>());
    result.choice = detail::fields_of(choice);
    result.choice.emplace("kernel", kernel_name(choice));
    return result;
}

const bool registered = emulated::register_run("attention", &run);

}  // namespace
}  // namespace thunderkittens::attention
