// The op based_decode for CUDA: checks what memory safety needs, chooses and launches.
#include "csrc/linear_attention/based/based_decode.h"

#include <vector>

#include "csrc/common/tensor.h"

namespace thunderkittens::linear_attention {
namespace {

constexpr const char* OP = "tk.based_decode";

void check_shape(const char* name, const Tensor& x, const std::vector<int64_t>& shape) {
    const auto sizes = x.sizes();
    TK_CHECK(std::equal(sizes.begin(), sizes.end(), shape.begin(), shape.end()), OP, ": ", name,
             " must have shape ", tuple_text(shape), ", got ", shape_text(x));
}

Tensor based_decode(const Tensor& q, const Tensor& k, const Tensor& v, Tensor numerator,
                    Tensor denominator, bool normalize, double eps) {
    check_cuda(OP, "q", q);
    BasedDecodeParams params;
    BasedDecodeProblem& p = params.problem;
    p.dtype = check_dtype(OP, "q", q, {DType::bf16, DType::fp16});
    check_dims(OP, "q", q, {4});
    check_dims(OP, "v", v, {4});
    p.batch = q.size(0);
    p.heads = q.size(1);
    p.value_dim = v.size(3);
    p.normalize = normalize;
    for (auto [name, x] : {std::pair{"k", &k}, {"v", &v}}) {
        check_same_device(OP, name, *x, "q", q);
        check_same_dtype(OP, name, *x, "q", q);
    }
    check_shape("q", q, {p.batch, p.heads, 1, ELEMENTS});
    check_shape("k", k, {p.batch, p.heads, 1, ELEMENTS});
    check_shape("v", v, {p.batch, p.heads, 1, p.value_dim});
    check_shape("the state's numerator", numerator, {p.batch, p.heads, FEATURES, p.value_dim});
    check_shape("the state's denominator", denominator, {p.batch, p.heads, FEATURES});
    for (auto [name, x] : {std::pair{"the state's numerator", &numerator},
                           {"the state's denominator", &denominator}}) {
        check_same_device(OP, name, *x, "q", q);
        check_dtype(OP, name, *x, {DType::fp32});
    }
    const DeviceGuard guard(q.get_device_index());
    const DeviceProperties& device = device_properties(q.get_device_index());
    const std::string reason = unsupported(p, device);
    TK_CHECK(reason.empty(), OP, ": ", reason);
    Tensor out = empty({p.batch, p.heads, 1, p.value_dim}, q.scalar_type(), q);
    if (out.numel() == 0) return out;

    const bool in_place = decodes_in_place(as_4d(numerator), as_4d(denominator));
    const auto packed = [&](const Tensor& x) {
        Tensor copy = empty(x.sizes(), x.scalar_type(), x);
        torch::stable::copy_(copy, x);
        return copy;
    };
    const Tensor numerators = in_place ? numerator : packed(numerator);
    const Tensor denominators = in_place ? denominator : packed(denominator);
    params.threads = choose_decode(p, device).threads;
    params.q = token(as_4d(q));
    params.k = token(as_4d(k));
    params.v = token(as_4d(v));
    params.numerator = numerator_operand(as_4d(numerators));
    params.denominator = denominator_operand(as_4d(denominators));
    params.out = out.data_ptr();
    params.eps = static_cast<float>(eps);
    run_decode(params, current_stream(q));
    if (!in_place) {
        torch::stable::copy_(numerator, numerators);
        torch::stable::copy_(denominator, denominators);
    }
    return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(thunderkittens, CUDA, m) {
    m.impl("based_decode", TORCH_BOX(&based_decode));
}

}  // namespace thunderkittens::linear_attention
