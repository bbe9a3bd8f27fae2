// Every op's schema: the package's table of contents. The implementations are elsewhere: for CUDA
// in csrc/<family>/<op>.cpp, for the CPU in python/thunderkittens/reference/<op>.py, autograd and
// the shape functions in python/thunderkittens/ops/<op>.py. An op `x` that is differentiable has a
// raw twin `x_forward` without autograd registration, which a call that needs no gradient goes to,
// because it costs the host less.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(thunderkittens, m) {
    // (M, K) @ (K, N) or batched, fp32 accumulation; bias (N,); out_dtype None is the dtype of the
    // inputs.
    m.def("gemm(Tensor a, Tensor b, Tensor? bias=None, ScalarType? out_dtype=None) -> Tensor");
    m.def(
        "gemm_forward(Tensor a, Tensor b, Tensor? bias=None, ScalarType? out_dtype=None) -> "
        "Tensor");

    // q (B, Hq, Sq, D), k and v (B, Hkv, Sk, D); causal: 0 none, 1 aligned lower right, 2 aligned
    // upper left; lse fp32 (B, Hq, Sq), natural logarithm.
    m.def(
        "attention(Tensor q, Tensor k, Tensor v, int causal, float? scale=None) -> (Tensor out, "
        "Tensor lse)");
    m.def(
        "attention_forward(Tensor q, Tensor k, Tensor v, int causal, float? scale=None) -> Tensor");
    m.def(
        "attention_backward(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, "
        "Tensor "
        "out, Tensor lse, "
        "int causal, float? scale, bool[3] needs) -> (Tensor, Tensor, Tensor)");
}
