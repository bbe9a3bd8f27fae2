"""What `rms_norm` and `layer_norm` share: checks, the gradient of a residual, registration."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import emulation
from ..reference._norm import dropout_factors
from ._gradient_call import one_by_one, refuse_double_backward
from ._registration import register

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def check_norm(
    op: str,
    x: Any,
    weight: Any,
    bias: Any,
    residual: Any,
    gate: Any,
    seed: Any,
    eps: Any,
    dropout_p: Any,
    weight_offset: Any = 0.0,
    gate_first: Any = False,
    group_size: Any = 0,
) -> None:
    """Raises what the norms document."""
    name = f"tk.{op}"
    _require_tensor(name, "x", x)
    if x.dtype not in _FLOATS:
        raise TypeError(
            f"{name}: x is {x.dtype}; supported are torch.bfloat16, torch.float16 and torch.float32"
        )
    if x.dim() < 1 or x.shape[-1] < 1:
        raise ValueError(
            f"{name}: x has shape {tuple(x.shape)}; it must have a last dimension with elements"
        )
    columns = x.shape[-1]
    for what, tensor in (("weight", weight), ("bias", bias)):
        if tensor is None:
            continue
        _require_tensor(name, what, tensor)
        if tensor.dtype not in (x.dtype, torch.float32):
            raise TypeError(
                f"{name}: {what} is {tensor.dtype}; it must be {x.dtype}, as x is, or torch.float32"
            )
        _require_device(name, what, tensor, x)
        if tuple(tensor.shape) != (columns,):
            raise ValueError(
                f"{name}: {what} has shape {tuple(tensor.shape)}; it must be ({columns},), an "
                "element for each of a row"
            )
    if bias is not None:
        if weight is None:
            raise ValueError(f"{name}: bias needs a weight")
        if bias.dtype != weight.dtype:
            raise TypeError(
                f"{name}: bias is {bias.dtype}, weight is {weight.dtype}; they must have the same "
                "dtype"
            )
    for what, tensor, dtypes in (
        ("residual", residual, (x.dtype, torch.float32)),
        ("gate", gate, (x.dtype,)),
    ):
        if tensor is None:
            continue
        _require_tensor(name, what, tensor)
        if tensor.dtype not in dtypes:
            allowed = f"{x.dtype}, as x is" + (", or torch.float32" if len(dtypes) > 1 else "")
            raise TypeError(f"{name}: {what} is {tensor.dtype}; it must be {allowed}")
        _require_device(name, what, tensor, x)
        if tensor.shape != x.shape:
            raise ValueError(
                f"{name}: {what} has shape {tuple(tensor.shape)}, x has {tuple(x.shape)}; they "
                "must be equal"
            )
    if seed is not None:
        _require_tensor(name, "seed", seed)
        if seed.dtype != torch.int64:
            raise TypeError(f"{name}: seed is {seed.dtype}; it must be torch.int64")
        _require_device(name, "seed", seed, x)
        if seed.numel() != 1:
            raise ValueError(f"{name}: seed has shape {tuple(seed.shape)}; it must be one number")
    _check_numbers(name, eps, dropout_p, weight_offset)
    if dropout_p > 0:
        if residual is None:
            raise ValueError(
                f"{name}: dropout_p is {dropout_p}, which needs a residual; without one, apply "
                "torch.nn.functional.dropout before"
            )
        if seed is None:
            raise ValueError(f"{name}: dropout_p is {dropout_p}, which needs a seed")
    if not isinstance(group_size, int | torch.SymInt):
        raise TypeError(f"{name}: group_size must be an int, got {type(group_size).__name__}")
    if group_size < 0 or (group_size > 0 and columns % group_size):
        raise ValueError(
            f"{name}: group_size is {group_size}; it must divide the {columns} elements of a row"
        )
    if residual is not None and (gate is not None or group_size not in (0, columns)):
        other = "gate" if gate is not None else "group_size"
        raise ValueError(f"{name}: {other} cannot be given with a residual")
    if gate_first and gate is None:
        raise ValueError(f"{name}: gate_first needs a gate")


def _check_numbers(name: str, eps: Any, dropout_p: Any, weight_offset: Any) -> None:
    for what, value in (("eps", eps), ("dropout_p", dropout_p), ("weight_offset", weight_offset)):
        if not isinstance(value, int | float | torch.SymFloat):
            raise TypeError(f"{name}: {what} must be a number, got {type(value).__name__}")
    if not (eps >= 0 and eps < math.inf):
        raise ValueError(f"{name}: eps is {eps}; it must be finite and at least 0")
    if not (dropout_p >= 0 and dropout_p < 1):
        raise ValueError(f"{name}: dropout_p is {dropout_p}; it must be at least 0 and less than 1")
    if not (weight_offset > -math.inf and weight_offset < math.inf):
        raise ValueError(f"{name}: weight_offset is {weight_offset}; it must be finite")


def _require_tensor(name: str, what: str, tensor: Any) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: {what} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.layout is not torch.strided:
        raise TypeError(
            f"{name}: {what} must be a dense tensor (torch.strided), got {tensor.layout}"
        )


def _require_device(name: str, what: str, tensor: Tensor, x: Tensor) -> None:
    if tensor.device != x.device:
        raise TypeError(f"{name}: {what} is on {tensor.device}, x is on {x.device}")


def empty_results(x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """Results of a norm without their values."""
    total = x.new_empty(0) if residual is None else residual.new_empty(x.shape)
    return x.new_empty(x.shape), total


def is_separate(x: Tensor, dtype: torch.dtype, dropout_p: float) -> bool:
    """Whether the gradient of a residual is not that of x, of what was normalised."""
    return x.dtype != dtype or dropout_p > 0


def rows_for_emulator(tensor: Tensor | None) -> Tensor | None:
    """At most four dimensions, which the emulator's arrays have."""
    if tensor is None or tensor.dim() <= 4:
        return tensor
    return tensor.flatten(0, tensor.dim() - 4)


def emulated(op: str, arrays: dict[str, Tensor | None], **scalars: Any) -> dict[str, Tensor]:
    """An op of the norms on the emulator."""
    seed = arrays.get("seed")
    if seed is not None:
        arrays["seed"] = seed.reshape(1).view(torch.int32)
    return emulation.run(op, {n: rows_for_emulator(x) for n, x in arrays.items()}, **scalars)


def empty_gradients(
    grad_out: Tensor,
    x: Tensor,
    weight: Tensor | None,
    dropout_p: float,
    needs: Any,
    last: tuple[bool, Any, torch.dtype],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of a norm without their values; `last` says of the last whether there is one, its
    shape and dtype."""
    separate = is_separate(x, grad_out.dtype, dropout_p)
    of_x = needs[0] or (needs[1] and not separate)
    of_weight = needs[2] and weight is not None
    there, shape, dtype = last
    return (
        grad_out.new_empty(x.shape if of_x else 0),
        x.new_empty(x.shape if needs[1] and separate else 0),
        x.new_empty(
            x.shape[-1] if of_weight else 0,
            dtype=grad_out.dtype if weight is None else weight.dtype,
        ),
        x.new_empty(shape if there and needs[3] else 0, dtype=dtype),
    )


def check_gradient(op: str, grad_out: Tensor, grad_sum: Tensor | None, x: Tensor) -> None:
    """Raises where the gradients that come in do not fit what was normalised."""
    for name, grad in (("grad_out", grad_out), ("grad_sum", grad_sum)):
        if grad is not None and grad.shape != x.shape:
            raise ValueError(
                f"thunderkittens::{op}_backward: {name} has shape {tuple(grad.shape)}; it must be "
                f"{tuple(x.shape)}"
            )


def residual_gradients(
    total: Tensor,
    grad_sum: Tensor | None,
    dtype: torch.dtype,
    sum_dtype: torch.dtype,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the residual, from that of what was normalised."""
    if grad_sum is not None:
        total = total + grad_sum.to(total.dtype)
    of_x = total
    if dropout_p > 0 and seed is not None:
        of_x = total * dropout_factors(total.shape, dropout_p, seed).to(total.dtype)
    return of_x.to(dtype), total.to(sum_dtype)


Functions = tuple[Callable[..., Any], Callable[..., Any]]


def register_norm(op: str, whole: Functions, single: Functions, backward: Functions) -> None:
    """Registers a norm's ops, each with what it does on tensors without data and on CPU tensors.

    Args:
        op: the norm's name.
        whole: of the op and its twin without autograd, which have the sum as a result, too.
        single: of the twin's overload without it.
        backward: of the op's gradient.
    """
    parts = (
        (f"{op}_forward", whole),
        (op, whole),
        (f"{op}_forward.single", single),
        (f"{op}_backward", backward),
    )
    for name, (fake, cpu) in parts:
        packet, _, overload = name.partition(".")
        function = getattr(getattr(torch.ops.thunderkittens, packet), overload or "default")
        register(name, fake=fake, cpu=cpu, vmap=one_by_one(function))
    torch.library.register_autograd(f"thunderkittens::{op}_backward", refuse_double_backward(op))
