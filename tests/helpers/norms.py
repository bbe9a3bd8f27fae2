"""Calls of the norms beside their formula in float64, and in plain PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import thunderkittens as tk

from .numerics import assert_accurate

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = (BF16, FP16, FP32)


def normal(shape: tuple[int, ...], dtype: torch.dtype, device: str, mean: float = 0.0) -> Tensor:
    return (torch.randn(shape, device=device) + mean).to(dtype)


def as_tuple(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def wide(value: Any) -> Any:
    """Floats of any dtype as float64; the rest as it is."""
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def assert_norm(op: str, *args: Any, slack: float = 0.0, **options: Any) -> None:
    """The results of a call obey the rule of accuracy, against the formula in float64; `slack` is
    what comes on top of what a sum of a row in float32 costs."""
    function, reference = getattr(tk, op), getattr(tk.reference, op)
    actual = as_tuple(function(*args, **options))
    doubles = [wide(x) for x in args]
    named = {name: wide(x) for name, x in options.items()}
    expected = as_tuple(reference(*doubles, **named))
    plain = as_tuple(reference(*args, **options))
    # Plain PyTorch may be exact by luck.
    for x, y, z in zip(actual, expected, plain, strict=True):
        assert x.dtype == z.dtype
        assert x.is_contiguous()
        of_sum = 4e-7 * float(y.abs().max()) if y.numel() else 0.0
        assert_accurate(x, y, z, slack=of_sum + slack)


def assert_gradients(
    op: str, names: tuple[str, ...], tensors: list[Tensor], **options: Any
) -> None:
    """Gradients of all tensors, through all results."""

    def gradients(function: Any, values: list[Tensor], weights: list[Tensor] | None) -> Any:
        leaves = [x.detach().clone().requires_grad_() for x in values]
        positional = [x for name, x in zip(names, leaves, strict=True) if name in POSITIONAL]
        named = {n: x for n, x in zip(names, leaves, strict=True) if n not in POSITIONAL}
        results = as_tuple(function(*positional, **named, **options))
        if weights is None:
            weights = [torch.randn(x.shape, device=x.device).to(x.dtype) for x in results]
        incoming = [w.to(x.dtype) for w, x in zip(weights, results, strict=True)]
        return torch.autograd.grad(results, leaves, incoming), weights

    actual, weights = gradients(getattr(tk, op), tensors, None)
    reference = getattr(tk.reference, op)
    expected, _ = gradients(reference, [x.double() for x in tensors], weights)
    plain, _ = gradients(reference, tensors, weights)
    for name, x, y, z, tensor in zip(names, actual, expected, plain, tensors, strict=True):
        assert (x.shape, x.dtype) == (tensor.shape, tensor.dtype), name
        # A sum of rows, of terms as large as the largest result.
        assert_accurate(x, y, z, slack=1e-6 * float(y.abs().max()) if y.numel() else 0.0)


POSITIONAL = ("x", "weight", "bias")
