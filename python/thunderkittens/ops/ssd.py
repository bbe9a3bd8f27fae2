"""Mamba-2's state-space duality (SSD): linear attention with a decay per head and token.

`ssd` checks the operands and calls `ssd_forward`, or the differentiable op `ssd` when a gradient is
wanted, whose gradient is the op `ssd_backward`.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor

from .. import emulation
from .._signatures import as_ssd
from ..reference.ssd import ssd as reference_ssd
from ._eager_autograd import differentiable
from ._recurrent import (
    MAX_KEY_DIM,
    MAX_VALUE_DIM,
    require_dim,
    require_flag,
    require_heads,
    require_like,
    require_number,
    require_sequences,
    require_state,
)
from ._registration import (
    autocast_active,
    autocast_operands,
    call_checked,
    filled,
    forward_mode_active,
    one_by_one,
    plain_call,
    refuse_forward_mode,
    register_both,
    require_operands,
    transform_active,
    wants_gradient,
)
from ._ssd_autograd import backward, save_context

_forward = torch.ops.thunderkittens.ssd_forward.default
_differentiable = torch.ops.thunderkittens.ssd.default


@as_ssd
def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    initial_state: Tensor | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The state-space duality layer of Mamba-2: `S_t = e^(A d_t) S_(t-1) + d_t x_t B_t^T` and
    `y_t = (S_t C_t + D x_t) silu(z_t)`, with `d = clamp(softplus(dt + dt_bias), *dt_limit)`.

    Time and memory are linear in T. Sums and decays are in float32; operands of products, among
    them a copy of the state per 64 tokens, are rounded to x's dtype. Every stride is accepted, so
    that a model's (B, T, H, P) is given as a view, `x.transpose(1, 2)`, dt as
    `dt.transpose(1, 2)` and (B, T, G, N) likewise; operands are read where they are as long as the
    last stride is 1 and the base and the other strides are multiples of 16 bytes, and are copied
    otherwise. Reruns have the same bits. It cannot be differentiated again. Under autocast, x, B, C
    and z are converted to the autocast dtype. On CPU tensors it runs `tk.reference.ssd`.

    Args:
        x: (B, H, T, P), bfloat16 or float16; P a multiple of 8 from 8 to 256. T may be 0.
        dt: (B, H, T), float32 or the dtype of x.
        A: (H,), at most 0, float32 or the dtype of x. A log decay A d below -128 counts as -128,
            whose exponential is 0.
        B: (B, G, T, N), dtype and device of x; H is a multiple of G, and heads h of x with the same
            h // (H / G) share a group; N a multiple of 8 from 8 to 128.
        C: (B, G, T, N), dtype and device of x.
        D: (H,) or (H, P), float32 or the dtype of x: a skip connection; None is 0.
        z: (B, H, T, P), dtype and device of x: a gate; None is no gate.
        dt_bias: (H,), float32 or the dtype of x, added to dt; None is 0.
        dt_softplus: whether softplus is taken of dt + dt_bias.
        dt_limit: bounds of the step size d, `0 <= low <= high`; high may be infinity.
        initial_state: (B, H, P, N), float32, any strides: the state before the first token, of each
            of the sequences with cu_seqlens. None is 0.
        return_state: also return the state after the last token: what the next call, or
            `tk.ssd_decode`, continues from.
        cu_seqlens: (sequences + 1,), int32, contiguous: the first token of each of the sequences
            that are packed one after the other along T, and the one behind the last. They ascend;
            B is 1. They are read on the GPU. Outputs of tokens of no sequence are 0.

    Returns:
        y (B, H, T, P) of x's dtype, contiguous; with return_state (y, state), the state (B, H, P,
        N), or (sequences, H, P, N), in float32.

    Raises:
        TypeError: an operand is no dense tensor, has an unsupported dtype or one that differs from
            x's, or is on another device; an option of another type.
        ValueError: a shape or a limit that does not fit the above.

    The formula is `tk.reference.ssd`; Dao and Gu, "Transformers are SSMs", arXiv:2405.21060.
    """
    low, high = limits("ssd", dt_limit)
    if return_state is False and not torch.compiler.is_compiling():
        plain = _plain(
            x, dt, A, B, C, D, z, dt_bias, initial_state, cu_seqlens, dt_softplus, low, high
        )
        if plain is not NotImplemented:
            return cast(Tensor, plain)
    if autocast_active():
        x, B, C = autocast_operands(x, B, C)
        if z is not None:
            (z,) = autocast_operands(z)
    require_flag("ssd", "dt_softplus", dt_softplus)
    require_flag("ssd", "return_state", return_state)
    tensors = (x, dt, A, B, C, D, z, dt_bias, initial_state)
    args = (*tensors, cu_seqlens, dt_softplus, low, high)
    if forward_mode_active():
        _check(args)
        refuse_forward_mode("ssd", *tensors)
    if return_state or wants_gradient(tensors) or transform_active():
        out, state = call_checked(_recorded, (*args, return_state), _check)
        return (out, state) if return_state else out
    result: Tensor = call_checked(_forward, args, _check)
    return result


def limits(op: str, dt_limit: Any) -> tuple[float, float | None]:
    """Bounds of the step size, as the schemas have them; raises what `ssd` documents."""
    # To look at types is faster than isinstance().
    pair = type(dt_limit) is tuple or isinstance(dt_limit, tuple | list)
    if not pair or len(dt_limit) != 2:
        raise TypeError(f"tk.{op}: dt_limit must be two numbers, got {dt_limit!r}")
    low, high = dt_limit
    if type(low) is not float or type(high) is not float:
        require_number(op, "dt_limit[0]", low)
        require_number(op, "dt_limit[1]", high)
    if not (0 <= low <= high and low < math.inf):
        raise ValueError(f"tk.{op}: dt_limit is {(low, high)}; it must be 0 <= low <= high")
    return float(low), None if high == math.inf else float(high)


def ssd_shape(
    x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any = None, z: Any = None, dt_bias: Any = None,
    initial_state: Any = None, cu_seqlens: Any = None, op: str = "ssd",
) -> tuple[int, int, int]:  # fmt: skip
    """The number of states, heads of B and N; raises what `ssd` documents."""
    names, operands = ("x", "B", "C", "z"), (x, B, C, z)
    count = 3 if z is None else 4
    require_operands(op, names[:count], *operands[:count])
    for name, operand, form in (("x", x, "(B, H, T, P)"), ("B", B, "(B, G, T, N)")):
        if operand.dim() != 4:
            raise ValueError(
                f"tk.{op}: {name} has shape {tuple(operand.shape)}; it must have 4 dimensions, "
                f"{form}"
            )
    batch, heads, length, columns = x.shape
    if B.shape[0] != batch or B.shape[2] != length:
        raise ValueError(
            f"tk.{op}: B has shape {tuple(B.shape)}, x has {tuple(x.shape)}; batch and length must "
            "be equal"
        )
    groups, keys = B.shape[1], B.shape[3]
    for name, operand, expected in (("C", C, B.shape), ("z", z, x.shape)):
        if operand is not None and operand.shape != expected:
            raise ValueError(
                f"tk.{op}: {name} has shape {tuple(operand.shape)}; it must be {tuple(expected)}"
            )
    require_heads(op, heads, groups, "x", "B")
    require_dim(op, "x", "columns", columns, MAX_VALUE_DIM)
    require_dim(op, "B", "columns", keys, MAX_KEY_DIM)
    require_like(op, "dt", dt, ((batch, heads, length),), "x", x)
    require_like(op, "A", A, ((heads,),), "x", x)
    if D is not None:
        require_like(op, "D", D, ((heads,), (heads, columns)), "x", x)
    if dt_bias is not None:
        require_like(op, "dt_bias", dt_bias, ((heads,),), "x", x)
    states = batch if cu_seqlens is None else require_sequences(op, cu_seqlens, "x", x)
    if initial_state is not None:
        shape = (states, heads, columns, keys)
        require_state(op, "initial_state", initial_state, shape, "x", x)
    return states, groups, keys


def _check(args: tuple[Any, ...]) -> None:
    ssd_shape(*args[:10])


_plain = plain_call(_forward, _check)


# What the ops do beside the CUDA implementation.

# The dispatcher drops trailing arguments that have their default value.
_DEFAULTS: tuple[Any, ...] = (None, None, None, None, None, False, 0.0, None, False)


def _filled(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*args, *_DEFAULTS[len(args) - 5 :])


def _empty(args: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    x = args[0]
    states, _, keys = ssd_shape(*args[:10])
    shape = (states if args[13] else 0, x.shape[1], x.shape[3], keys)
    return x.new_empty(x.shape), x.new_empty(shape, dtype=torch.float32)


def _fake(*args: Any) -> tuple[Tensor, Tensor]:
    return _empty(_filled(args))


def _cpu(*args: Any) -> tuple[Tensor, Tensor]:
    args = _filled(args)
    results = _empty(args)
    x, dt, A, B, C, D, z, dt_bias, initial_state, cu_seqlens, softplus, low, high, final = args
    values: tuple[Tensor, ...]
    if emulation.active() and results[0].numel() > 0:
        arrays = {
            "x": x,
            "dt": dt,
            "A": A,
            "B": B,
            "C": C,
            "D": D,
            "z": z,
            "dt_bias": dt_bias,
            "initial_state": initial_state,
            "cu_seqlens": cu_seqlens,
        }
        found = emulation.run(
            "ssd",
            arrays,
            dt_softplus=softplus,
            dt_min=low,
            dt_max=math.inf if high is None else high,
            return_state=final,
        )
        values = (found["out"], found.get("final_state", results[1]))
    else:
        values = reference_ssd(
            x, dt, A, B, C, D=D, z=z, dt_bias=dt_bias, dt_softplus=softplus,
            dt_limit=(low, math.inf if high is None else high), initial_state=initial_state,
            return_state=True, cu_seqlens=cu_seqlens,
        )  # fmt: skip
    return filled(results, values)


def _flops(
    x_shape: Any, dt_shape: Any, A_shape: Any, B_shape: Any, *args: Any, **kwargs: Any
) -> int:
    """Products within chunks of 64 tokens, and with the state and into it, as a multiplication and
    an addition each."""
    tokens, columns, keys = math.prod(x_shape[:3]), x_shape[3], B_shape[3]
    operations: int = 2 * tokens * (64 * (keys + columns) + 2 * keys * columns)
    return operations


_recorded = differentiable("ssd", _differentiable, save_context, backward, one_by_one)

register_both("ssd", fake=_fake, cpu=_cpu, flops=_flops, vmap=one_by_one)
