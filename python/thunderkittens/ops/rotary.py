"""Rotary embedding.

`rotary` calls `rotary_forward`, or the differentiable op `rotary` when a gradient is wanted, which
is the rotation back of the gradient that comes in.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from .. import emulation
from ..reference.rotary import rotary as reference_rotary
from . import _memory as memory
from ._eager_autograd import differentiable
from ._gradient_call import one_by_one
from ._registration import (
    call_checked,
    forward_mode_active,
    plain_call,
    refuse_forward_mode,
    register,
    transform_active,
)

_forward = torch.ops.thunderkittens.rotary_forward.default
_in_place = torch.ops.thunderkittens.rotary_forward.in_place
_differentiable = torch.ops.thunderkittens.rotary.default
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    positions: Tensor | None = None,
    offsets: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    interleaved: bool = False,
    inverse: bool = False,
    heads: int | None = None,
    in_place: bool = False,
) -> Tensor:
    """Rotates pairs (a, b) of the elements of a head by the angle of the token's position:
    `a' = a cos - b sin`, `b' = b cos + a sin`, in float32, rounded once.

    Pairs lie in the first R elements of a head, where cos and sin have R / 2 columns; the others
    stay as they are, and so do heads behind the first `heads`: queries and keys of a packed q|k|v
    are rotated by one call, which leaves the values. Every stride is accepted; a tensor whose last
    dimension is not adjacent is copied. Differentiable with respect to x, any number of times;
    reruns have the same bits. Autocast leaves its tensors as they are. Works under `torch.compile`,
    `torch.export`, `torch.func.vmap` and `torch.func.grad`; on CPU tensors it runs
    `tk.reference.rotary`.

    Args:
        x: (B, H, T, D), or packed sequences (tokens, H, D); bfloat16, float16 or float32.
        cos: (S, R / 2), a row for each position; or (B, T, R / 2), a row for each token, for a
            four-dimensional x. Of x's dtype or float32; R at most D.
        sin: shape and dtype of cos.
        positions: int32 or int64, (T,) or (B, T), the row of each token; packed (tokens,). None: 0,
            1, ... in each sequence.
        offsets: int32 or int64, (B,), added to all positions of a sequence, as the number of tokens
            in a cache.
        cu_seqlens: int32 (B + 1,), where the packed sequences begin and end, on the device of x,
            where alone it is read. Tokens behind the last stay as they are. None: packed tokens are
            one sequence.
        interleaved: whether a pair is the elements 2 i and 2 i + 1, instead of i and i + R / 2.
        inverse: rotates back.
        heads: how many heads are rotated, the first ones. None: all.
        in_place: x itself is changed and returned. It must not need a gradient.

    Returns:
        out, of x's shape and dtype, with the strides of `torch.empty_like(x)`, or contiguous where
        the elements of a head of x are not adjacent. Where a position has no row in the tables,
        pairs are NaN.

    Raises:
        TypeError: a tensor is no dense tensor, has an unsupported dtype or is on another device.
        ValueError: a shape does not fit the above; cos or sin requires a gradient, which is not
            computed; in place, x requires one, its elements are not adjacent, or share memory.

    The formula is `tk.reference.rotary`; Su et al., "RoFormer: enhanced transformer with rotary
    position embedding", arXiv:2104.09864.
    """
    count = -1 if heads is None else heads
    args = (x, cos, sin, positions, offsets, cu_seqlens, interleaved, inverse, count)
    if heads is not None and isinstance(heads, int) and heads < 0:
        raise ValueError(f"tk.rotary: heads is {heads}; it must be at least 0")
    if not torch.compiler.is_compiling():
        rotated = _plain_in_place(*args) if in_place else _plain(*args)
        if rotated is not NotImplemented:
            return x if in_place else cast(Tensor, rotated)
    if forward_mode_active():
        _check(args)
        refuse_forward_mode("rotary", x)
    wanted = transform_active()
    if torch.is_grad_enabled():
        for name, tensor in (("cos", cos), ("sin", sin)):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                raise ValueError(
                    f"tk.rotary: {name} requires a gradient, which is not computed; detach it"
                )
        wanted = wanted or (isinstance(x, Tensor) and x.requires_grad)
    if not in_place:
        out: Tensor = call_checked(_recorded if wanted else _forward, args, _check)
        return out
    if isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled():
        _check(args)
        raise ValueError("tk.rotary: in_place changes x, which requires a gradient")
    call_checked(_in_place, args, _check_in_place)
    return x


def _check_in_place(args: tuple[Any, ...]) -> None:
    _check(args)
    x = args[0]
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        raise ValueError(
            f"tk.rotary: in_place needs the elements of a head to be adjacent; x has strides "
            f"{x.stride()}"
        )
    if memory.has_addresses(x) and memory.repeats(x):
        raise ValueError(
            f"tk.rotary: in_place changes x, of shape {tuple(x.shape)} and strides {x.stride()}; "
            "each element must have memory of its own"
        )


def _check(args: tuple[Any, ...]) -> None:
    """Raises what `rotary` documents."""
    x, cos, sin, positions, offsets, cu_seqlens, _, _, heads = args
    name = "tk.rotary"
    _require(name, "x", x, _FLOATS, None)
    if x.dim() not in (3, 4):
        raise ValueError(
            f"{name}: x has shape {tuple(x.shape)}; it must have 4 dimensions, (B, H, T, D), or 3, "
            "(tokens, H, D)"
        )
    packed = x.dim() == 3
    batch, length = (1, x.shape[0]) if packed else (x.shape[0], x.shape[2])
    _require(name, "cos", cos, (x.dtype, torch.float32), x)
    _require(name, "sin", sin, (cos.dtype,), x)
    if sin.shape != cos.shape:
        raise ValueError(
            f"{name}: sin has shape {tuple(sin.shape)}, cos has {tuple(cos.shape)}; they must be "
            "equal"
        )
    if cos.dim() not in (2, 3) or (cos.dim() == 3 and (packed or cos.shape[:2] != (batch, length))):
        raise ValueError(
            f"{name}: cos has shape {tuple(cos.shape)}; it must be (positions, R / 2)"
            + ("" if packed else f", or ({batch}, {length}, R / 2), a row for each token")
        )
    if 2 * cos.shape[-1] > x.shape[-1]:
        raise ValueError(
            f"{name}: cos has {cos.shape[-1]} columns, for {2 * cos.shape[-1]} elements; a head of "
            f"x has {x.shape[-1]}"
        )
    if not isinstance(heads, int | torch.SymInt):
        raise TypeError(f"{name}: heads must be an int, got {type(heads).__name__}")
    if heads > x.shape[1]:
        raise ValueError(f"{name}: heads is {heads}; x has {x.shape[1]}")
    integers = (torch.int32, torch.int64)
    for what, tensor in (
        ("positions", positions),
        ("offsets", offsets),
        ("cu_seqlens", cu_seqlens),
    ):
        if tensor is None:
            continue
        if cos.dim() == 3:
            raise ValueError(
                f"{name}: {what} cannot be given with cos of 3 dimensions, which has a row for "
                "each token"
            )
        _require(name, what, tensor, integers if what != "cu_seqlens" else (torch.int32,), x)
    sequences = batch
    if cu_seqlens is not None:
        if not packed:
            raise ValueError(
                f"{name}: cu_seqlens is for packed sequences, (tokens, H, D); x has shape "
                f"{tuple(x.shape)}"
            )
        if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
            raise ValueError(
                f"{name}: cu_seqlens has shape {tuple(cu_seqlens.shape)}; it must be (sequences + "
                "1,)"
            )
        sequences = cu_seqlens.shape[0] - 1
    allowed = [(length,)] if packed else [(length,), (batch, length)]
    if positions is not None and tuple(positions.shape) not in allowed:
        raise ValueError(
            f"{name}: positions has shape {tuple(positions.shape)}; it must be "
            + " or ".join(map(str, allowed))
        )
    if offsets is not None and tuple(offsets.shape) != (sequences,):
        raise ValueError(
            f"{name}: offsets has shape {tuple(offsets.shape)}; it must be ({sequences},), one for "
            "each sequence"
        )


_plain = plain_call(_forward, _check)
_plain_in_place = plain_call(_in_place, _check_in_place)


def _require(name: str, what: str, tensor: Any, dtypes: tuple[Any, ...], x: Tensor | None) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: {what} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.layout is not torch.strided:
        raise TypeError(
            f"{name}: {what} must be a dense tensor (torch.strided), got {tensor.layout}"
        )
    if tensor.dtype not in dtypes:
        allowed = " or ".join(dict.fromkeys(map(str, dtypes)))
        raise TypeError(f"{name}: {what} is {tensor.dtype}; it must be {allowed}")
    if x is not None and tensor.device != x.device:
        raise TypeError(f"{name}: {what} is on {tensor.device}, x is on {x.device}")


# What the ops do beside the CUDA implementation.

# The dispatcher drops trailing arguments that have their default value.
_DEFAULTS: tuple[Any, ...] = (None, None, None, False, False, -1)


def _filled(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*args, *_DEFAULTS[len(args) - 3 :])


def _empty(x: Tensor) -> Tensor:
    """What the result is written to."""
    adjacent = x.shape[-1] <= 1 or x.stride(-1) == 1
    return torch.empty_like(x if adjacent else x.contiguous())


def _fake(*args: Any) -> Tensor:
    _check(_filled(args))
    return _empty(args[0])


def _fake_in_place(*args: Any) -> None:
    _check_in_place(_filled(args))


def _words(x: Tensor | None) -> Tensor | None:
    """Integers of 64 bits as the emulator has them."""
    if x is None or x.dtype != torch.int64:
        return x
    return x.contiguous().view(torch.int32)


def _run(args: tuple[Any, ...], in_place: bool) -> Tensor | None:
    args = _filled(args)
    (_check_in_place if in_place else _check)(args)
    x, cos, sin, positions, offsets, cu_seqlens, interleaved, inverse, heads = args
    if x.numel() == 0:
        return None if in_place else _empty(x)
    if emulation.active():
        found = emulation.run(
            "rotary",
            {
                "x": x,
                "cos": cos,
                "sin": sin,
                "positions": _words(positions),
                "offsets": _words(offsets),
                "cu_seqlens": cu_seqlens,
            },
            interleaved=interleaved,
            inverse=inverse,
            heads=heads,
            in_place=in_place,
        )
        return None if in_place else _empty(x).copy_(found["out"])
    with torch.no_grad():
        out = reference_rotary(
            x,
            cos,
            sin,
            positions=positions,
            offsets=offsets,
            cu_seqlens=cu_seqlens,
            interleaved=interleaved,
            inverse=inverse,
            heads=None if heads < 0 else heads,
        )
        if in_place:
            x.copy_(out)
            return None
        return _empty(x).copy_(out)


def _cpu(*args: Any) -> Tensor | None:
    return _run(args, False)


def _cpu_in_place(*args: Any) -> None:
    _run(args, True)


def _save_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *tables, ctx.interleaved, ctx.inverse, ctx.heads = _filled(inputs)
    ctx.save_for_backward(*tables)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    dx = None
    if ctx.needs_input_grad[0]:
        call = _recorded if torch.is_grad_enabled() or transform_active() else _forward
        dx = call(grad, *ctx.saved_tensors, ctx.interleaved, not ctx.inverse, ctx.heads)
    return dx, *(None,) * 8


_recorded = differentiable("rotary", _differentiable, _save_context, _backward, one_by_one)

for _name, _op in (("rotary_forward", _forward), ("rotary", _differentiable)):
    register(_name, fake=_fake, cpu=_cpu, vmap=one_by_one(_op))
register("rotary_forward.in_place", fake=_fake_in_place, cpu=_cpu_in_place)
