// Checks of arguments that the products of quantised operands share, on any back end. Host C++
// without torch.
#pragma once

#include "csrc/common/backend.h"

namespace thunderkittens::gemm {

// The dtype of the output, `otherwise` where the call says nothing.
template <class Tensor>
DType checked_out_dtype(const char* op,
                        std::optional<typename Backend<Tensor>::ScalarType> out_type,
                        DType otherwise = DType::bf16) {
    using Types = Backend<Tensor>;
    const std::optional<DType> dtype = out_type ? Types::dtype_of(*out_type) : otherwise;
    TK_CHECK(dtype == DType::bf16 || dtype == DType::fp16 || dtype == DType::fp32, op,
             ": out_dtype is ", Types::dtype_text(*out_type),
             "; supported are torch.bfloat16, torch.float16 and torch.float32");
    return *dtype;
}

inline void check_activation(const char* op, int64_t activation) {
    TK_CHECK(activation >= 0 && activation <= 4, op, ": activation is ", activation,
             "; it must be from 0 to 4");
}

// The dtype of a bias of n columns beside a.
template <class Tensor>
DType check_bias(const char* op, const Tensor& bias, const Tensor& a, int64_t n,
                 std::initializer_list<DType> allowed) {
    check_same_device(op, "bias", bias, "a", a);
    const DType dtype = check_dtype(op, "bias", bias, allowed);
    TK_CHECK(bias.dim() == 1 && bias.size(0) == n, op, ": bias has shape ", shape_text(bias),
             "; expected (", n, ",)");
    return dtype;
}

// The factors in fp32 of `count` matrices, or of one that is no batch, beside the argument `name`.
template <class Tensor>
void check_global_scale(const char* op, const Tensor& scale, const char* name, const Tensor& x,
                        bool batched, int64_t count) {
    check_same_device(op, "global_scale", scale, name, x);
    check_dtype(op, "global_scale", scale, {DType::fp32});
    TK_CHECK(scale.dim() == (batched ? 1 : 0) && scale.numel() == count, op,
             ": global_scale has shape ", shape_text(scale), "; expected one value per matrix of ",
             name);
}

// The ends of the groups of rows of a.
template <class Tensor>
void check_ends(const char* op, const Tensor& offs, const Tensor& a, int64_t groups) {
    check_same_device(op, "offs", offs, "a", a);
    check_dtype(op, "offs", offs, {DType::int32});
    TK_CHECK(offs.dim() == 1 && offs.size(0) == groups, op, ": offs has shape ", shape_text(offs),
             "; expected (", groups, ",), the end of each group's rows");
}

}  // namespace thunderkittens::gemm
