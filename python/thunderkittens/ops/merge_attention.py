"""Attention over parts of the keys, merged into attention over all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import emulation
from ..reference.merge_attention import merge_attention as reference_merge
from ._registration import call_checked, one_by_one, register, require_device, require_operands

_op = torch.ops.thunderkittens.merge_attention.default
_MOST = 16


def merge_attention(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over all keys from attention over parts of them, as a prefix that sequences share
    and their own keys, or the parts of several GPUs.

    A part counts by exp of its LSE. A row that has seen no key in a part, whose LSE is infinite of
    either sign, does not count. Strides are free; there is no gradient. On CPU tensors it runs
    `tk.reference.merge_attention`.

    Args:
        outs: 1 to 16 tensors of one shape, (B, s, H, D) or packed (T, H, D), bfloat16 or float16.
        lses: as many, (B, H, s), or (H, T) of packed ones, float32, natural logarithms.

    Returns:
        (out, lse), contiguous, of the shapes of the first ones.

    Raises:
        TypeError: what is no dense tensor, a dtype that is not supported, several devices.
        ValueError: numbers or shapes that do not fit.

    The formula is `tk.reference.merge_attention`.
    """
    args = (list(outs), list(lses))
    out, lse = call_checked(_op, args, lambda args: merge_shape(*args))
    return out, lse


def merge_shape(outs: Sequence[Any], lses: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
    """Shapes of the results; raises what `merge_attention` documents."""
    if not 1 <= len(outs) <= _MOST or len(lses) != len(outs):
        raise ValueError(
            f"tk.merge_attention: got {len(outs)} outs and {len(lses)} lses; they must be as many, "
            f"1 to {_MOST}"
        )
    require_operands("merge_attention", tuple(f"outs[{i}]" for i in range(len(outs))), *outs)
    first = outs[0]
    if first.dim() not in (3, 4) or first.shape[-1] % 8:
        raise ValueError(
            f"tk.merge_attention: outs[0] has shape {tuple(first.shape)}; it must be (B, s, H, D) "
            "or (T, H, D), with D a multiple of 8"
        )
    lse_shape = (*first.shape[:-3], first.shape[-2], first.shape[-3])
    for i, (x, lse) in enumerate(zip(outs, lses, strict=True)):
        if not isinstance(lse, Tensor) or lse.dtype is not torch.float32:
            what = lse.dtype if isinstance(lse, Tensor) else type(lse).__name__
            raise TypeError(f"tk.merge_attention: lses[{i}] is {what}; it must be torch.float32")
        require_device("merge_attention", f"lses[{i}]", lse, "outs[0]", first)
        if x.shape != first.shape or tuple(lse.shape) != lse_shape:
            raise ValueError(
                f"tk.merge_attention: outs[{i}] has shape {tuple(x.shape)} and lses[{i}] has "
                f"{tuple(lse.shape)}; they must be {tuple(first.shape)} and {lse_shape}"
            )
    return tuple(first.shape), lse_shape


def _fake(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    shape, lse_shape = merge_shape(outs, lses)
    return outs[0].new_empty(shape), outs[0].new_empty(lse_shape, dtype=torch.float32)


def _cpu(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    merge_shape(outs, lses)
    if emulation.active() and outs[0].numel() > 0:
        arrays = {f"out{i}": x for i, x in enumerate(outs)}
        arrays |= {f"lse{i}": x for i, x in enumerate(lses)}
        result = emulation.run("merge_attention", arrays)
        return result["out"], result["lse"]
    out, lse = reference_merge(outs, lses)
    return out.contiguous(), lse.contiguous()


def _flops(out_shapes: Any, lse_shapes: Any, *args: Any, **kwargs: Any) -> int:
    """A multiplication and an addition for each element of a part."""
    operations: int = 2 * sum(math.prod(shape) for shape in out_shapes)
    return operations


register(
    "merge_attention",
    fake=_fake,
    cpu=_cpu,
    flops=_flops,
    vmap=one_by_one(_op),
    differentiable=False,
)
