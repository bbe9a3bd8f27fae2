"""General matrix product on the tensor cores.

`gemm` checks the operands, brings them to the two forms that the ops take, (M, K) and (B, M, K)
times (K, N) or (B, K, N), by views where strides can express them, and calls `gemm_forward`, or the
differentiable `gemm` when a gradient is wanted. Its gradient is the same product on transposed
views, so it can be differentiated any number of times.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor

from .. import emulation
from ..reference.gemm import gemm as reference_gemm
from ._gemm_fused import KINDS, autocast_residual, fused, plain_fused
from ._gemm_product import (
    broadcast_product,
    differentiable_op,
    forward,
    gemm_shape,
    op_shape,
    product,
    vmap_rule,
)
from ._registration import autocast_active, autocast_operands, plain_call, register

_NUMBERS = (float, int)


def gemm(
    a: Tensor,
    b: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    gate_layout: str = "blocked",
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`activation(alpha * a @ b + bias) + beta * residual` in one kernel.

    The product is accumulated in float32, to which the rest is applied; the result is rounded once.
    Reruns give the same bits.

    Every stride is accepted: row-major, column-major, sliced, transposed and expanded operands are
    read where they are as long as one of the last two strides is 1 and the base and the other
    strides are multiples of 16 bytes, and are copied otherwise. Differentiable any number of times
    with respect to a, b, bias and residual; the gradients have the dtype of a (to which that of the
    result is rounded first), and that of a (K, N) operand sums over the batch in float32. When a
    gradient is wanted, the kernel stores what the activation was applied to beside the result.
    Under autocast, a, b and bias are converted to the autocast dtype, residual to that of the
    result. Works under `torch.compile`, `torch.export`, `torch.func.vmap` and `torch.func.grad`; on
    CPU tensors it runs `tk.reference.gemm`.

    Args:
        a: (..., M, K), bfloat16 or float16.
        b: (K, N) or (..., K, N), dtype and device of a. Batch dimensions broadcast as in
            `torch.matmul`. Any of M, N and K may be 0; K = 0 gives the bias, or zeros.
        bias: (N,), dtype and device of a; added to every row.
        activation: "relu", "gelu", "gelu_tanh", "silu", or one with a gate: "swiglu" and "geglu"
            are silu and gelu of N / 2 columns times the other N / 2.
        residual: the shape, dtype and device of the result.
        alpha: factor of the product.
        beta: factor of the residual.
        gate_layout: where the gates of a gated activation are: "blocked", in the first N / 2
            columns, or "interleaved", in the even ones.
        out_dtype: torch.bfloat16, torch.float16 or torch.float32; None is the dtype of out where
            that is given, else of a.
        out: a tensor to write the result to, in place of a new one: the result's shape and dtype,
            adjacent elements in its last dimension; not with operands that require a gradient. It
            may be the residual, but overlap no other operand, nor itself: code that `torch.compile`
            made does not check this, and gives wrong values.

    Returns:
        (..., M, N), or (..., M, N / 2) with a gate, of out_dtype, contiguous; or out.

    Raises:
        TypeError: an operand is no dense tensor, has an unsupported dtype (float32 included) or one
            that differs from a's, or is on another device; out_dtype is none of the above, or not
            the dtype of out;
            activation or gate_layout is no string, alpha or beta no number.
        ValueError: an operand has less than 2 dimensions, the inner dimensions differ, the batch
            dimensions do not broadcast, bias is not (N,), residual or out has not the result's
            shape; out overlaps an operand, or itself; activation or gate_layout has no such value;
            N is odd and there is a gate.
        RuntimeError: out is given and a gradient is wanted.

    The formula is `tk.reference.gemm`.
    """
    if (
        residual is None
        and out is None
        and type(alpha) in _NUMBERS  # a tensor's value would have to be waited for
        and type(beta) in _NUMBERS
        and not torch.compiler.is_compiling()
    ):
        result = _call_plainly(a, b, bias, activation, gate_layout, alpha, beta, out_dtype)
        if result is not NotImplemented:
            return cast(Tensor, result)
    if autocast_active():
        a, b, bias = autocast_operands(a, b, bias)
        residual = autocast_residual(a, residual, out_dtype, out)
    if (
        activation is None
        and residual is None
        and out is None
        and type(alpha) in _NUMBERS  # a tensor's value would have to be waited for
        and alpha == 1
        and type(beta) in _NUMBERS
        and gate_layout == "blocked"
    ):
        return broadcast_product(product, a, b, bias, out_dtype)
    return fused(a, b, bias, activation, residual, alpha, beta, gate_layout, out_dtype, out)


def _call_plainly(
    a: Any,
    b: Any,
    bias: Any,
    activation: Any,
    gate_layout: Any,
    alpha: float,
    beta: float,
    out_dtype: Any,
) -> Any:
    """The call of an op that takes the operands as they are and checks them itself; NotImplemented
    where there is more to do."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor) and b.dim() == 2 and 2 <= a.dim() <= 3):
        return NotImplemented
    if activation is None and alpha == 1 and gate_layout == "blocked":
        return _plain(a, b, bias, out_dtype)
    if not isinstance(gate_layout, str) or not isinstance(activation, str | None):
        return NotImplemented
    kind = KINDS.get((activation, gate_layout))
    if kind is None:
        return NotImplemented
    return plain_fused(a, b, bias, out_dtype, None, *kind, float(alpha), float(beta))


# What the ops thunderkittens::gemm_forward and thunderkittens::gemm do beside the CUDA
# implementation.


def _fake(
    a: Tensor, b: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    return a.new_empty(op_shape(a, b, bias, out_dtype), dtype=out_dtype or a.dtype)


def _cpu(
    a: Tensor, b: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    op_shape(a, b, bias, out_dtype)
    if emulation.active():
        out = emulation.NAMES[out_dtype or a.dtype]
        return emulation.run("gemm", {"a": a, "b": b, "bias": bias}, out_dtype=out)["out"]
    return reference_gemm(a, b, bias=bias, out_dtype=out_dtype)


def _flops(a_shape: Any, b_shape: Any, *args: Any, **kwargs: Any) -> int:
    """2 M N K per matrix; the bias is not counted, as in PyTorch's formula of addmm."""
    operations: int = 2 * math.prod(a_shape) * b_shape[-1]
    return operations


for _name, _op in (("gemm_forward", forward), ("gemm", differentiable_op)):
    register(_name, fake=_fake, cpu=_cpu, flops=_flops, vmap=vmap_rule(_op), autocast=3)

_plain = plain_call(forward, lambda args: gemm_shape(*args), differentiable_op)
