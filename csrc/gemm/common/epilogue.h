// What the epilogue of a product does. Host C++ only, shared by the op, its choice of kernels and
// the kernels.
#pragma once

#include <cstdint>

namespace thunderkittens::gemm {

enum class Activation : int { none, relu, gelu, gelu_tanh, silu };

// Which columns of z hold the gate that the activation is applied to, and which the values that it
// multiplies: the first and the second half, or even and odd ones.
enum class Gate : int { none, blocked, interleaved };

// out = activation(alpha * sum + bias) + beta * residual, with activation(gate) * value in place of
// activation(z) when there is a gate. `aux` receives z itself (the preactivation), rounded to the
// dtype of out, for the gradient. Residual and aux have the dtype of out; aux is packed.
struct Epilogue {
    const void* bias = nullptr;  // (n,) of the operands' dtype
    const void* residual = nullptr;
    void* aux = nullptr;
    int64_t residual_stride = 0, residual_batch_stride = 0;
    float alpha = 1, beta = 1;
    Activation activation = Activation::none;
    Gate gate = Gate::none;
};

}  // namespace thunderkittens::gemm
