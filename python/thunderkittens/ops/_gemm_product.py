"""The product of `tk.gemm`: its shape, the op that computes it, and its gradients, which are
products again. `gemm.py` adds the public function, `_gemm_fused.py` what an epilogue does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._eager_autograd import differentiable
from ._registration import (
    forward_mode_active,
    refuse_forward_mode,
    require_operands,
    transform_active,
)

OUT_DTYPES = (None, torch.bfloat16, torch.float16, torch.float32)
forward = torch.ops.thunderkittens.gemm_forward.default
differentiable_op = torch.ops.thunderkittens.gemm.default


def gemm_shape(
    a: Tensor, b: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[int, ...]:
    """Shape of the product, (..., M, N); raises what `gemm` documents."""
    if bias is None:
        require_operands("gemm", ("a", "b"), a, b)
    else:
        require_operands("gemm", ("a", "b", "bias"), a, b, bias)
    if out_dtype not in OUT_DTYPES:
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


def broadcast_product(
    compute: Callable[..., Tensor],
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
    columns: int | None = None,
) -> Tensor:
    """Checks the operands, brings them to the forms that the ops take and calls `compute`, whose
    result has `columns` columns, or those of b."""
    shape = gemm_shape(a, b, bias, out_dtype)
    if columns is not None:
        shape = (*shape[:-1], columns)
    if len(shape) == 2:
        return compute(a, b, bias, out_dtype)
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
    return compute(a, b, bias, out_dtype).view(shape)


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


def product(a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
    """The product of operands in the forms that the ops take, by the cheapest op that will do."""
    if forward_mode_active():
        refuse_forward_mode("gemm", a, b, bias)
    if (
        torch.is_grad_enabled()
        and (a.requires_grad or b.requires_grad or (bias is not None and bias.requires_grad))
    ) or transform_active():
        result: Tensor = _recorded(a, b, bias, out_dtype)
        return result
    value: Tensor = forward(a, b, bias, out_dtype)
    return value


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


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    a, b = ctx.saved_tensors
    # The dispatcher drops trailing arguments that have their default value.
    needs = (*ctx.needs_input_grad, False)[:3]
    return (*product_gradients(a, b, grad, plain_product, *needs), None)


def plain_product(a: Tensor, b: Tensor) -> Tensor:
    return product(a, b, None, None)


def product_gradients(
    a: Tensor,
    b: Tensor,
    grad: Tensor,
    multiply: Callable[[Tensor, Tensor], Tensor],
    needs_a: bool,
    needs_b: bool,
    needs_bias: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of `multiply(a, b) + bias`, a product times a factor, those that are needed, in the
    order of a and of b."""
    grad_a = grad_b = grad_bias = None
    if needs_bias:
        grad_bias = grad.sum(tuple(range(grad.dim() - 1))).to(a.dtype)
    if grad.dtype is not a.dtype:
        grad = grad.to(a.dtype)

    if needs_a:
        if column_by_column(a) and a.dim() == b.dim():
            grad_a = multiply(b, grad.mT).mT
        else:
            grad_a = multiply(grad, b.mT)
    if needs_b:
        if a.dim() > b.dim():  # one product over all rows of the batch
            a = a.reshape(a.shape[0] * a.shape[1], a.shape[2])
            grad = grad.reshape(grad.shape[0] * grad.shape[1], grad.shape[2])
        grad_b = multiply(grad.mT, a).mT if column_by_column(b) else multiply(a.mT, grad)
    return grad_a, grad_b, grad_bias


def column_by_column(x: Tensor) -> bool:
    """Whether x lies in memory column by column, as the transpose of a weight does.

    Its gradient has to lie so as well: autograd copies one of other strides to accumulate it.
    """
    return x.stride(-2) == 1 and x.stride(-1) != 1


def vmap_rule(compute: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, int]]:
    """The rule for `torch.func.vmap`, by broadcasting, on top of `compute`."""

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
            return broadcast_product(compute, a, b, bias, out_dtype), 0
        out = broadcast_product(compute, a, b, None, torch.float32)
        if dim_a is None and dim_b is None:
            out = out.unsqueeze(0)
        bias = bias.movedim(dim_bias, 0)
        bias = bias.reshape(bias.shape[0], *(1,) * (out.dim() - 2), bias.shape[1])
        return (out + bias).to(out_dtype or a.dtype), 0

    return rule


vmap_product = vmap_rule(product)
_recorded = differentiable("gemm", differentiable_op, _setup_context, _backward, vmap_rule)
