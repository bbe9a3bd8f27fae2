"""Products of groups of rows, of columns or of parts of K, as a mixture of experts needs them.

`grouped_gemm` checks the operands and calls `grouped_gemm_forward`, or the differentiable
`grouped_gemm` when a gradient is wanted. The gradients of each of its three forms are products of
the other two, with the same groups, so it can be differentiated any number of times.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .. import emulation
from ..reference.grouped_gemm import grouped_gemm as reference_grouped_gemm
from ._eager_autograd import differentiable
from ._gemm_product import column_by_column
from ._gradient_call import one_by_one
from ._registration import (
    autocast_active,
    autocast_operands,
    forward_mode_active,
    refuse_forward_mode,
    register,
    require_operands,
    transform_active,
)

_forward = torch.ops.thunderkittens.grouped_gemm_forward.default
_differentiable = torch.ops.thunderkittens.grouped_gemm.default


def grouped_gemm(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """One product per group, in one kernel, as `torch.nn.functional.grouped_mm`.

    Group e is [offs[e - 1], offs[e]) of one dimension, from 0 on, and may be empty. Which dimension
    that is, the operands' dimensions tell:

    - (M, K) and (E, K, N): rows of a. The rows of group e are a[group e] @ b[e]: (M, N).
    - (E, M, K) and (K, N): columns of b. Those of group e are a[e] @ b[:, group e]: (M, N).
    - (M, K) and (K, N): K. Product e is a[:, group e] @ b[group e]: (E, M, N), 0 for an empty one.

    offs is read on the device, without waiting for it. What belongs to no group is 0, and is not
    read into any other result, even if it is NaN. An offset outside of the dimension, or before
    that of an earlier group, is moved to its edge, or to that offset. Groups may begin and end
    anywhere, and need no padding.

    Products are accumulated in float32 and rounded once. Reruns give the same bits. Operands are
    read where they are if one of the last two strides is 1, and base and other strides are
    multiples of 16 bytes; others are copied. Differentiable any number of times with respect to a
    and b. Under autocast a and b are converted to the autocast dtype. On CPU tensors it runs
    `tk.reference.grouped_gemm`.

    Args:
        a: (M, K) or (E, M, K), bfloat16 or float16.
        b: (K, N) or (E, K, N), dtype and device of a. a and b are not both three-dimensional.
        offs: int32 (E,), the ends of the groups, ascending, on the device of a.

    Returns:
        (M, N), or (E, M, N) if a and b are two-dimensional, dtype of a, contiguous.

    Raises:
        TypeError: an operand is no dense tensor, has an unsupported dtype, or is on another device
            than a.
        ValueError: shapes do not match.

    The formula is `tk.reference.grouped_gemm`.
    """
    if autocast_active():
        a, b = autocast_operands(a, b)
    grouped_gemm_shape(a, b, offs)
    return _product(a, b, offs)


def grouped_gemm_shape(a: Tensor, b: Tensor, offs: Tensor) -> tuple[int, ...]:
    """Shape of the result; raises what `grouped_gemm` documents."""
    name = "tk.grouped_gemm"
    require_operands("grouped_gemm", ("a", "b"), a, b)
    if not isinstance(offs, Tensor):
        raise TypeError(f"{name}: offs must be a torch.Tensor, got {type(offs).__name__}")
    if offs.layout is not torch.strided:
        raise TypeError(f"{name}: offs must be a dense tensor (torch.strided), got {offs.layout}")
    if offs.dtype != torch.int32:
        raise TypeError(f"{name}: offs is {offs.dtype}; it must be torch.int32")
    if offs.device != a.device:
        raise TypeError(f"{name}: offs is on {offs.device}, a is on {a.device}")
    dims = (a.dim(), b.dim())
    if dims not in ((2, 3), (3, 2), (2, 2)):
        raise ValueError(
            f"{name}: a has shape {tuple(a.shape)} and b has shape {tuple(b.shape)}; they must be "
            "(M, K) and (E, K, N), (E, M, K) and (K, N), or (M, K) and (K, N)"
        )
    if a.shape[-1] != b.shape[-2]:
        raise ValueError(
            f"{name}: a has shape {tuple(a.shape)} and b has shape {tuple(b.shape)}; the last "
            f"dimension of a ({a.shape[-1]}) must equal the second to last of b ({b.shape[-2]})"
        )
    if offs.dim() != 1:
        raise ValueError(f"{name}: offs has shape {tuple(offs.shape)}; it must be (E,)")
    shape = (a.shape[-2], b.shape[-1])
    if dims == (2, 2):
        return (offs.shape[0], *shape)
    groups = b.shape[0] if dims == (2, 3) else a.shape[0]
    if offs.shape[0] != groups:
        raise ValueError(
            f"{name}: offs has shape {tuple(offs.shape)}; it must be ({groups},), the end of the "
            f"group of each matrix of {'b' if dims == (2, 3) else 'a'}"
        )
    return shape


def _product(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """The products, by the cheapest op that will do."""
    if forward_mode_active():
        refuse_forward_mode("grouped_gemm", a, b)
    if (torch.is_grad_enabled() and (a.requires_grad or b.requires_grad)) or transform_active():
        result: Tensor = _recorded(a, b, offs)
        return result
    value: Tensor = _forward(a, b, offs)
    return value


# What the ops thunderkittens::grouped_gemm_forward and thunderkittens::grouped_gemm do beside the
# CUDA implementation.


def _fake(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    return a.new_empty(grouped_gemm_shape(a, b, offs))


def _cpu(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    grouped_gemm_shape(a, b, offs)
    if emulation.active():
        return emulation.run("grouped_gemm", {"a": a, "b": b, "offs": offs})["out"]
    return reference_grouped_gemm(a, b, offs)


def _flops(a_shape: Any, b_shape: Any, *args: Any, **kwargs: Any) -> int:
    """2 M N K, as if the groups filled the dimension that they divide."""
    operations: int = 2 * math.prod(a_shape[-2:]) * b_shape[-1]
    return operations


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    a, b, offs = ctx.saved_tensors
    needs_a, needs_b = ctx.needs_input_grad[:2]
    grad_a = _ordered_product(grad, b.mT, offs, like=a) if needs_a else None
    grad_b = _ordered_product(a.mT, grad, offs, like=b) if needs_b else None
    return grad_a, grad_b, None


def _ordered_product(a: Tensor, b: Tensor, offs: Tensor, like: Tensor) -> Tensor:
    """The products, in the order of `like`."""
    return _product(b.mT, a.mT, offs).mT if column_by_column(like) else _product(a, b, offs)


for _name, _op in (("grouped_gemm_forward", _forward), ("grouped_gemm", _differentiable)):
    register(_name, fake=_fake, cpu=_cpu, flops=_flops, vmap=one_by_one(_op), autocast=2)
_recorded = differentiable("grouped_gemm", _differentiable, _setup_context, _backward, one_by_one)
