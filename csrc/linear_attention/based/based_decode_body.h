// The body of the op based_decode, on any back end: it checks what memory safety needs, chooses and
// launches. Host C++ without torch.
#pragma once

#include <vector>

#include "csrc/common/accesses.h"
#include "csrc/linear_attention/based/based_decode.h"
#include "csrc/linear_attention/common/operands.h"

namespace thunderkittens::linear_attention {

template <DType dtype>
void run_decode(const BasedDecodeParams& params, Stream stream) {
    if (!params.portable)
        launch_based_decode<dtype>(params, stream);
    else if constexpr (BUILDS_PORTABLE)
        launch_portable_based_decode<dtype>(params, stream);
}
inline void run_decode(const BasedDecodeParams& params, Stream stream) {
    if (params.problem.dtype == DType::bf16)
        run_decode<DType::bf16>(params, stream);
    else
        run_decode<DType::fp16>(params, stream);
}

template <class Tensor>
Tensor based_decode_body(const Backend<Tensor>& on, const Tensor& q, const Tensor& k,
                         const Tensor& v, Tensor& numerator, Tensor& denominator, bool normalize,
                         double eps) {
    constexpr const char* OP = "tk.based_decode";
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
    check_shape(OP, "q", q, {p.batch, p.heads, 1, ELEMENTS});
    check_shape(OP, "k", k, {p.batch, p.heads, 1, ELEMENTS});
    check_shape(OP, "v", v, {p.batch, p.heads, 1, p.value_dim});
    check_shape(OP, "the state's numerator", numerator, {p.batch, p.heads, FEATURES, p.value_dim});
    check_shape(OP, "the state's denominator", denominator, {p.batch, p.heads, FEATURES});
    for (auto [name, x] : {std::pair{"the state's numerator", &numerator},
                           {"the state's denominator", &denominator}}) {
        check_same_device(OP, name, *x, "q", q);
        check_dtype(OP, name, *x, {DType::fp32});
    }
    const auto guard = on.guard(q);
    const DeviceProperties& device = on.device(q);
    const std::string reason = unsupported(p, device);
    TK_CHECK(reason.empty(), OP, ": ", reason);
    Tensor out = empty({p.batch, p.heads, 1, p.value_dim}, q.scalar_type(), q);
    if (out.numel() == 0) return out;

    const bool in_place = decodes_in_place(as_4d(numerator), as_4d(denominator));
    const auto packed = [&](const Tensor& x) {
        Tensor copy = empty(x.sizes(), x.scalar_type(), x);
        copy_(copy, x);
        return copy;
    };
    const Tensor numerators = in_place ? numerator : packed(numerator);
    const Tensor denominators = in_place ? denominator : packed(denominator);
    const BasedDecodeChoice choice = on.chosen("based_decode", choose_decode(p, device));
    params.portable = choice.portable;
    params.threads = choice.threads;
    params.q = token(as_4d(q));
    params.k = token(as_4d(k));
    params.v = token(as_4d(v));
    params.numerator = numerator_operand(as_4d(numerators));
    params.denominator = denominator_operand(as_4d(denominators));
    params.out = out.data_ptr();
    params.eps = static_cast<float>(eps);
    auto launch = on.launch("based_decode", choice, q);
    reads(launch, "q", q, "k", k, "v", v);
    writes(launch, "state's numerator", numerators, "state's denominator", denominators, "out",
           out);
    run_decode(params, launch.stream);
    if (!in_place) {
        copy_(numerator, numerators);
        copy_(denominator, denominators);
    }
    return out;
}

}  // namespace thunderkittens::linear_attention
