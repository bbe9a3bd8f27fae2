// Operands of the ops on the emulator: operands.h for arrays in CPU memory. Optional arrays are
// absent.
#pragma once

#include "csrc/common/emulated.h"
#include "csrc/linear_attention/common/linear_attention.h"

namespace thunderkittens::linear_attention {

using emulated::Array;

inline BasedProblem checked_problem(const emulated::Call& call) {
    const Array &q = call.array("q"), &k = call.array("k"), &v = call.array("v");
    TK_CHECK(q.dims() == 4 && k.size == q.size && v.dims() == 4 && q.size[3] == ELEMENTS &&
                 std::equal(q.size.begin(), q.size.end() - 1, v.size.begin()) &&
                 q.dtype == k.dtype && q.dtype == v.dtype,
             "tk.based: q ", tuple_text(q.size), ", k ", tuple_text(k.size), " and v ",
             tuple_text(v.size), " do not match");
    BasedProblem p;
    p.dtype = q.dtype;
    p.batch = q.size[0];
    p.heads = q.size[1];
    p.length = q.size[2];
    p.value_dim = v.size[3];
    p.normalize = call.scalar("normalize", false);
    return p;
}
inline Operand operand(const Array& x) {
    const View view = x.view();
    return {view.data, view.stride[0], view.stride[1], view.stride[2]};
}
inline float* floats(const Array& x) { return reinterpret_cast<float*>(x.data); }
inline Array packed(const Array& x) {
    Array copy = emulated::allocate(x.size, x.dtype);
    emulated::copy_elements(copy, x);
    return copy;
}

// A state among the call's arrays, packed; empty where there is none.
struct State {
    Array numerator, denominator;

    State() = default;
    State(const emulated::Call& call, const std::string& prefix) {
        if (const Array* x = call.optional(prefix + "numerator")) numerator = packed(*x);
        if (const Array* x = call.optional(prefix + "denominator")) denominator = packed(*x);
    }
    State(const BasedProblem& p, bool with_denominator) {
        numerator = emulated::allocate({p.batch, p.heads, FEATURES, p.value_dim}, DType::fp32);
        if (with_denominator)
            denominator = emulated::allocate({p.batch, p.heads, FEATURES}, DType::fp32);
    }
    StatePointers pointers() const {
        return {numerator.data ? floats(numerator) : nullptr,
                denominator.data ? floats(denominator) : nullptr};
    }
    void may_read(emulated::Launch& scope) const {
        if (numerator.data) scope.may_read("state's numerator", numerator);
        if (denominator.data) scope.may_read("state's denominator", denominator);
    }
    void may_write(emulated::Launch& scope) const {
        if (numerator.data) scope.may_write("state's numerator", numerator);
        if (denominator.data) scope.may_write("state's denominator", denominator);
    }
};

}  // namespace thunderkittens::linear_attention
