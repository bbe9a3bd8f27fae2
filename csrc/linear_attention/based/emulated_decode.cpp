// based_decode on the emulator, as based_decode.cpp does it on CUDA tensors; it changes the state
// in place.
#include "csrc/common/emulated.h"
#include "csrc/linear_attention/based/based_decode.h"

namespace thunderkittens::linear_attention {
namespace {

using emulated::Array;

emulated::Result run(const emulated::Call& call) {
    const Array &q = call.array("q"), &k = call.array("k"), &v = call.array("v");
    const Array &numerator = call.array("numerator"), &denominator = call.array("denominator");
    BasedDecodeParams params;
    BasedDecodeProblem& p = params.problem;
    TK_CHECK(q.dims() == 4 && q.size[3] == ELEMENTS && v.dims() == 4 && k.size == q.size &&
                 numerator.dims() == 4 && numerator.size[2] == FEATURES &&
                 numerator.size[3] == v.size[3] && denominator.dims() == 3,
             "tk.based_decode: q ", tuple_text(q.size), ", k ", tuple_text(k.size), ", v ",
             tuple_text(v.size), " and the state do not match");
    p.dtype = q.dtype;
    p.batch = q.size[0];
    p.heads = q.size[1];
    p.value_dim = v.size[3];
    p.normalize = call.scalar("normalize", false);
    const std::string reason = unsupported(p, call.device);
    TK_CHECK(reason.empty(), "tk.based_decode: ", reason);
    BasedDecodeChoice choice = choose_decode(p, call.device);
    emulated::force(choice, call);
    const bool in_place = decodes_in_place(numerator.view(), denominator.view());
    const auto packed = [](const Array& x) {
        Array copy = emulated::allocate(x.size, x.dtype);
        emulated::copy_elements(copy, x);
        return copy;
    };
    const Array numerators = in_place ? numerator : packed(numerator);
    const Array denominators = in_place ? denominator : packed(denominator);
    Array out = emulated::allocate({p.batch, p.heads, 1, p.value_dim}, p.dtype);
    params.threads = choice.threads;
    params.q = token(q.view());
    params.k = token(k.view());
    params.v = token(v.view());
    params.numerator = numerator_operand(numerators.view());
    params.denominator = denominator_operand(denominators.view());
    params.out = out.data;
    params.eps = static_cast<float>(call.scalar("eps", 1e-12));
    emulated::Launch scope("based_decode " + kernel_name(choice));
    scope.may_read("q", q);
    scope.may_read("k", k);
    scope.may_read("v", v);
    scope.may_write("state's numerator", numerators);
    scope.may_write("state's denominator", denominators);
    scope.may_write("out", out);
    run_decode(params, nullptr);
    if (!in_place) {
        emulated::copy_elements(numerator, numerators);
        emulated::copy_elements(denominator, denominators);
    }
    emulated::Result result;
    result.arrays["out"] = out;
    result.choice = detail::fields_of(choice);
    result.choice.emplace("kernel", kernel_name(choice));
    return result;
}

const bool registered = emulated::register_run("based_decode", &run);

}  // namespace
}  // namespace thunderkittens::linear_attention
