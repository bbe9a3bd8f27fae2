"""General matrix product on the tensor cores.

`gemm` checks the operands, brings them to the two forms that the ops take, (M, K) and (B, M, K)
times (K, N) or (B, K, N), by views where strides can express them, and calls `gemm_forward`, or the
differentiable `gemm` when a gradient is wanted. Its gradient is the same product on transposed
views, so it can be differentiated any number of times.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import emulation
from ..reference.gemm import gemm as reference_gemm
from ._eager_autograd import differentiable
from ._registration import (
    autocast_active,
    autocast_operands,
    forward_mode_active,
    refuse_forward_mode,
    register,
    require_operands,
    transform_active,
)

_OUT_DTYPES = (None, torch.bfloat16, torch.float16, torch.float32)
_NUMBERS = (float, int)
_forward = torch.ops.thunderkittens.gemm_forward.default
_differentiable = torch.ops.thunderkittens.gemm.default


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
    if autocast_active():
        a, b, bias = autocast_operands(a, b, bias)
        residual = _gemm_fused.autocast_residual(a, residual, out_dtype, out)
    if (
        activation is None
        and residual is None
        and out is None
        and type(alpha) in _NUMBERS  # a tensor's value would have to be waited for
        and alpha == 1
        and type(beta) in _NUMBERS
        and gate_layout == "blocked"
    ):
        return _broadcast_product(_product, a, b, bias, out_dtype)
    return fused(a, b, bias, activation, residual, alpha, beta, gate_layout, out_dtype, out)


def gemm_shape(
    a: Tensor, b: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[int, ...]:
    """Shape of the product, (..., M, N); raises what `gemm` documents."""
    if bias is None:
        require_operands("gemm", ("a", "b"), a, b)
    else:
        require_operands("gemm", ("a", "b", "bias"), a, b, bias)
    if out_dtype not in _OUT_DTYPES:
        raise TypeError(
            f"tk.gemm: out_dtype is {out_dtype}; supported are torch.bfloat16, torch.float16, "
            "torch.float32 and None"
        )
    shape_a, shape_b = a.shape, b.shape
    if len(shape_a) < 2 or len(shape_b) < 2:
        name, shape = ("a", shape_a) if len(shape_a) < 2 else ("b", shape_b)
        raise ValueError(
            f"tk.gemm: {name} has shape {tuple(shape)}; it must have at least 2 dimensions "
            "(add one with unsqueeze)"
        )
    if shape_a[-1] != shape_b[-2]:
        raise ValueError(
            f"tk.gemm: a has shape {tuple(shape_a)} and b has shape {tuple(shape_b)}; the last "
            f"dimension of a ({shape_a[-1]}) must equal the second to last of b ({shape_b[-2]})"
        )
    columns = shape_b[-1]
    if bias is not None:
        shape = bias.shape
        if len(shape) != 1 or shape[0] != columns:
            raise ValueError(
                f"tk.gemm: bias has shape {tuple(shape)}; it must be ({columns},), one value per "
                "column of b"
            )
    if len(shape_b) == 2:
        return (*shape_a[:-1], columns)
    return (*_broadcast(shape_a[:-2], shape_b[:-2]), shape_a[-2], columns)


def _broadcast(batch_a: torch.Size, batch_b: torch.Size) -> tuple[int, ...]:
    longest = max(len(batch_a), len(batch_b))
    result = []
    for x, y in zip(
        (1,) * (longest - len(batch_a)) + tuple(batch_a),
        (1,) * (longest - len(batch_b)) + tuple(batch_b),
        strict=True,
    ):
        if x != y and x != 1 and y != 1:
            raise ValueError(
                f"tk.gemm: the batch dimensions {tuple(batch_a)} of a and {tuple(batch_b)} of b "
                "do not broadcast"
            )
        result.append(y if x == 1 else x)
    return tuple(result)


def _broadcast_product(
    product: Callable[..., Tensor],
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
    columns: int | None = None,
) -> Tensor:
    """Checks the operands, brings them to the forms that the ops take and calls `product`, whose
    result has `columns` columns, or those of b."""
    shape = gemm_shape(a, b, bias, out_dtype)
    if columns is not None:
        shape = (*shape[:-1], columns)
    if len(shape) == 2:
        return product(a, b, bias, out_dtype)
    batch, inner = shape[:-2], a.shape[-1]
    if b.dim() > 2 and math.prod(b.shape[:-2]) == 1:
        b = b.reshape(b.shape[-2:])
        a = a.expand(*batch, *a.shape[-2:])
    if b.dim() == 2:
        if _rows_merge(a):
            a = a.reshape(math.prod(a.shape[:-1]), inner)
        elif a.dim() > 3:
            a = a.reshape(math.prod(a.shape[:-2]), *a.shape[-2:])
    else:
        count = math.prod(batch)
        a = a.expand(*batch, *a.shape[-2:]).reshape(count, *a.shape[-2:])
        b = b.expand(*batch, *b.shape[-2:]).reshape(count, *b.shape[-2:])
    return product(a, b, bias, out_dtype).view(shape)


def _rows_merge(x: Tensor) -> bool:
    """Whether all dimensions but the last can be viewed as one."""
    if x.is_contiguous():
        return True
    expected = None
    for length, stride in zip(reversed(x.shape[:-1]), reversed(x.stride()[:-1]), strict=True):
        if length == 1:
            continue
        if expected is not None and stride != expected:
            return False
        expected = length * stride
    return True


def _product(a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
    """The product of operands in the forms that the ops take, by the cheapest op that will do."""
    if forward_mode_active():
        refuse_forward_mode("gemm", a, b, bias)
    if (
        torch.is_grad_enabled()
        and (a.requires_grad or b.requires_grad or (bias is not None and bias.requires_grad))
    ) or transform_active():
        result: Tensor = _recorded(a, b, bias, out_dtype)
        return result
    return _forward(a, b, bias, out_dtype)


# What the ops thunderkittens::gemm_forward and thunderkittens::gemm do beside the CUDA
# implementation.


def op_shape(
    a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None
) -> tuple[int, ...]:
    """`gemm_shape` for the forms that the ops take."""
    shape = gemm_shape(a, b, bias, out_dtype)
    if a.dim() > 3 or b.dim() > a.dim() or (b.dim() == 3 and a.shape[0] != b.shape[0]):
        raise ValueError(
            f"thunderkittens::gemm: a has shape {tuple(a.shape)} and b has shape "
            f"{tuple(b.shape)}; the op takes (M, K) @ (K, N), (B, M, K) @ (K, N) and "
            "(B, M, K) @ (B, K, N)"
        )
    return shape


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
    return 2 * math.prod(a_shape) * b_shape[-1]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    a, b = ctx.saved_tensors
    # The dispatcher drops trailing arguments that have their default value.
    needs = (*ctx.needs_input_grad, False)[:3]
    return (*product_gradients(a, b, grad, 1.0, *needs), None)


def product_gradients(
    a: Tensor,
    b: Tensor,
    grad: Tensor,
    alpha: float,
    needs_a: bool,
    needs_b: bool,
    needs_bias: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of `alpha * a @ b + bias`, those that are needed, in the order of a and of b."""
    grad_a = grad_b = grad_bias = None
    if needs_bias:
        grad_bias = grad.sum(tuple(range(grad.dim() - 1))).to(a.dtype)
    if grad.dtype is not a.dtype:
        grad = grad.to(a.dtype)

    def product(x: Tensor, y: Tensor) -> Tensor:
        return _product(x, y, None, None) if alpha == 1 else gemm(x, y, alpha=alpha)

    if needs_a:
        if column_by_column(a) and a.dim() == b.dim():
            grad_a = product(b, grad.mT).mT
        else:
            grad_a = product(grad, b.mT)
    if needs_b:
        if a.dim() > b.dim():  # one product over all rows of the batch
            a = a.reshape(a.shape[0] * a.shape[1], a.shape[2])
            grad = grad.reshape(grad.shape[0] * grad.shape[1], grad.shape[2])
        grad_b = product(grad.mT, a).mT if column_by_column(b) else product(a.mT, grad)
    return grad_a, grad_b, grad_bias


def column_by_column(x: Tensor) -> bool:
    """Whether x lies in memory column by column, as the transpose of a weight does.

    Its gradient has to lie so as well: autograd copies one of other strides to accumulate it.
    """
    return x.stride(-2) == 1 and x.stride(-1) != 1


def fused(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    activation: str | None,
    residual: Tensor | None,
    alpha: float,
    beta: float,
    gate_layout: str,
    out_dtype: torch.dtype | None,
    out: Tensor | None,
) -> Tensor:
    """`gemm` with an epilogue: checks, the forms that the ops take, the call."""
    number, gate = _gemm_fused.codes(activation, gate_layout)
    alpha, beta = (
        _gemm_fused.check_factor("alpha", alpha),
        _gemm_fused.check_factor("beta", beta),
    )
    shape = _gemm_fused.result_shape(gemm_shape(a, b, bias, out_dtype), gate)
    dtype = out_dtype or (a.dtype if out is None or not isinstance(out, Tensor) else out.dtype)
    if residual is not None:
        _gemm_fused.check_like_result("residual", residual, shape, dtype, a.device)
    if out is not None:
        _gemm_fused.check_like_result("out", out, shape, dtype, a.device)
        if dtype not in _OUT_DTYPES:
            raise TypeError(f"tk.gemm: out is {dtype}; supported are the dtypes of out_dtype")
        if shape[-1] > 1 and out.stride(-1) != 1:
            raise ValueError(
                f"tk.gemm: out has strides {out.stride()}; the elements of its last dimension must "
                "be adjacent"
            )
        if not torch.compiler.is_compiling():
            _gemm_fused.check_memory(out, a, b, bias, residual)
    if transform_active() and out is None:
        z = _broadcast_product(_product, a, b, None, torch.float32) * alpha
        z = z if bias is None else z + bias
        return _gemm_fused.composed(z, dtype, residual, activation, gate_layout, beta)

    def product(x: Tensor, y: Tensor, row: Tensor | None, _: torch.dtype | None) -> Tensor:
        # The rows of the result as the operands of the op have them.
        form = (*x.shape[:-1], shape[-1])
        addend = None if residual is None else residual.reshape(form)
        options = (row, dtype, addend, number, gate, alpha, beta)
        if out is None:
            return _gemm_fused.product(x, y, *options)
        if out.is_contiguous() or tuple(out.shape) == form:
            _gemm_fused.product(x, y, *options, out=out.view(form))
            return out
        result = out.new_empty(form)
        _gemm_fused.product(x, y, *options, out=result)
        return out.copy_(result.view(shape))

    result = _broadcast_product(product, a, b, bias, out_dtype, columns=shape[-1])
    return result if out is None else out


def _vmap_rule(product: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, int]]:
    """The rule for `torch.func.vmap`, by broadcasting, on top of `product`."""

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
        a, b, bias, out_dtype = (*args, None, None)[:4]
        dim_a, dim_b, dim_bias = (*in_dims, None)[:3]
        batched = a.dim() - (dim_a is not None) == 3
        if dim_a is not None:
            a = a.movedim(dim_a, 0)
        if dim_b is not None:
            b = b.movedim(dim_b, 0)
            if batched and b.dim() == 3:
                b = b.unsqueeze(1)
        if dim_bias is None:
            return _broadcast_product(product, a, b, bias, out_dtype), 0
        out = _broadcast_product(product, a, b, None, torch.float32)
        if dim_a is None and dim_b is None:
            out = out.unsqueeze(0)
        bias = bias.movedim(dim_bias, 0)
        bias = bias.reshape(bias.shape[0], *(1,) * (out.dim() - 2), bias.shape[1])
        return (out + bias).to(out_dtype or a.dtype), 0

    return rule


vmap_product = _vmap_rule(_product)
_recorded = differentiable("gemm", _differentiable, _setup_context, _backward, _vmap_rule)

from . import _gemm_fused  # noqa: E402  (it calls back)

for _name, _op in (("gemm_forward", _forward), ("gemm", _differentiable)):
    register(_name, fake=_fake, cpu=_cpu, flops=_flops, vmap=_vmap_rule(_op), autocast=3)
