// What the recurrent ops check of their tensors, and what their kernels need of them. Host C++
// without torch.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <optional>
#include <span>

#include "csrc/common/backend.h"
#include "csrc/recurrent/common/recurrent.h"

namespace thunderkittens::recurrent {

template <class Tensor>
void check_shape(const char* op, const char* name, const Tensor& x,
                 std::span<const int64_t> shape) {
    const auto& sizes = x.sizes();
    TK_CHECK(std::equal(sizes.begin(), sizes.end(), shape.begin(), shape.end()), op, ": ", name,
             " must have shape ", tuple_text(shape), ", got ", shape_text(x));
}
template <class Tensor>
void check_shape(const char* op, const char* name, const Tensor& x,
                 std::initializer_list<int64_t> shape) {
    check_shape(op, name, x, std::span(shape.begin(), shape.size()));
}

// A tensor of fp32 or of the operands' dtype.
template <class Tensor>
DType check_numbers(const char* op, const char* name, const Tensor& x,
                    std::span<const int64_t> shape, const Tensor& first, DType dtype) {
    check_same_device(op, name, x, "the first operand", first);
    check_shape(op, name, x, shape);
    return check_dtype(op, name, x, {DType::fp32, dtype});
}

template <class Tensor>
Operand operand(const Tensor& x) {
    const View view = as_4d(x);
    return {view.data, view.stride[0], view.stride[1], view.stride[2]};
}

// (B, H, T), of which any strides are read.
template <class Tensor>
TokenOperand token_operand(const char* op, const char* name, const std::optional<Tensor>& x,
                           const std::array<int64_t, 3>& shape, const Tensor& first, DType dtype) {
    if (!x) return {};
    const DType given = check_numbers(op, name, *x, shape, first, dtype);
    return {x->data_ptr(), given, x->stride(0), x->stride(1), x->stride(2)};
}

// (H,) or, where `columns` is not 0, (H, columns).
template <class Tensor>
HeadOperand head_operand(const char* op, const char* name, const std::optional<Tensor>& x,
                         int64_t heads, int64_t columns, const Tensor& first, DType dtype) {
    if (!x) return {};
    const bool wide = columns > 0 && x->dim() == 2;
    const std::array<int64_t, 2> shape{heads, columns};
    const DType given =
        check_numbers(op, name, *x, std::span(shape).first(wide ? 2 : 1), first, dtype);
    return {x->data_ptr(), given, x->stride(0), wide ? x->stride(1) : 0};
}

// States, (sequences, heads, V, K), or with `keys_first` (sequences, heads, K, V).
template <class Tensor>
StateOperand state_operand(const Tensor& x, bool keys_first) {
    const int64_t value = keys_first ? 3 : 2, key = keys_first ? 2 : 3;
    return {static_cast<float*>(x.data_ptr()), x.stride(0), x.stride(1), x.stride(value),
            x.stride(key)};
}

// cu_seqlens; the number of sequences.
template <class Tensor>
int64_t check_sequences(const char* op, const Tensor& x, const Tensor& first) {
    check_same_device(op, "cu_seqlens", x, "the first operand", first);
    check_dtype(op, "cu_seqlens", x, {DType::int32});
    TK_CHECK(x.dim() == 1 && x.size(0) > 0 && (x.size(0) == 1 || x.stride(0) == 1), op,
             ": cu_seqlens must be a contiguous vector with elements, got shape ", shape_text(x));
    TK_CHECK(first.size(0) == 1, op, ": with cu_seqlens the batch must be 1, got ", first.size(0));
    return x.size(0) - 1;
}

// A tensor that the kernels read as a whole.
template <class Tensor>
struct Read {
    const char* name;
    const std::optional<Tensor>& tensor;
};

// What both ops give to run_recurrent(); names are those of the op's arguments.
template <class Tensor>
struct RecurrentTensors {
    const char *q_name, *k_name, *v_name;
    const Tensor &q, &k, &v;
    const std::optional<Tensor>&z, &initial, &cu_seqlens;
};

template <class Tensor>
RecurrentProblem checked_problem(const char* op, const RecurrentTensors<Tensor>& x) {
    RecurrentProblem p;
    check_cuda(op, x.v_name, x.v);
    p.dtype = check_dtype(op, x.v_name, x.v, {DType::bf16, DType::fp16});
    check_dims(op, x.v_name, x.v, {4});
    check_dims(op, x.k_name, x.k, {4});
    p.batch = x.v.size(0);
    p.heads = x.v.size(1);
    p.length = x.v.size(2);
    p.value_dim = x.v.size(3);
    p.groups = x.k.size(1);
    p.key_dim = x.k.size(3);
    for (auto [name, y] : {std::pair{x.q_name, &x.q}, {x.k_name, &x.k}}) {
        check_same_device(op, name, *y, x.v_name, x.v);
        check_same_dtype(op, name, *y, x.v_name, x.v);
        check_shape(op, name, *y, {p.batch, p.groups, p.length, p.key_dim});
    }
    if (x.z) {
        check_same_device(op, "z", *x.z, x.v_name, x.v);
        check_same_dtype(op, "z", *x.z, x.v_name, x.v);
        check_shape(op, "z", *x.z, {p.batch, p.heads, p.length, p.value_dim});
        p.gate = true;
    }
    if (x.cu_seqlens) p.sequences = check_sequences(op, *x.cu_seqlens, x.v);
    return p;
}

// The factor of the scores.
inline float scale_of(std::optional<double> scale, int64_t key_dim) {
    return static_cast<float>(scale ? *scale : 1.0 / std::sqrt(double(key_dim)));
}

struct StepOptions {
    bool softplus;
    double least, most;
};
inline StepOptions step_options(bool softplus, double least, std::optional<double> most) {
    return {softplus, least, most.value_or(std::numeric_limits<double>::infinity())};
}

// What dt, A and dt_bias make; (batch, heads, length) is dt's shape.
template <class Tensor>
GateOperands step_gates(const char* op, const std::optional<Tensor>& dt,
                        const std::optional<Tensor>& A, const std::optional<Tensor>& dt_bias,
                        const StepOptions& options, const std::array<int64_t, 3>& shape,
                        const Tensor& x, DType dtype) {
    TK_CHECK(options.least >= 0 && options.least <= options.most, op,
             ": the limits of dt must be 0 <= low <= high, got ", options.least, " and ",
             options.most);
    GateOperands gates;
    gates.dt = token_operand(op, "dt", dt, shape, x, dtype);
    gates.A = head_operand(op, "A", A, shape[1], 0, x, dtype);
    gates.dt_bias = head_operand(op, "dt_bias", dt_bias, shape[1], 0, x, dtype);
    gates.softplus = options.softplus;
    gates.dt_min = static_cast<float>(options.least);
    gates.dt_max = static_cast<float>(options.most);
    return gates;
}

}  // namespace thunderkittens::recurrent
