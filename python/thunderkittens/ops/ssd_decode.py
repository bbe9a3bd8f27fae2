"""Mamba-2's SSD for one or a few more tokens per sequence, with the state changed in place."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor

from .. import emulation
from ..reference.ssd_decode import ssd_decode as reference_ssd_decode
from ._recurrent import require_decode, require_flag, require_state_apart
from ._registration import (
    autocast_active,
    autocast_operands,
    call_in_place,
    plain_call_in_place,
    refuse_in_place,
    register,
)
from .ssd import limits, ssd_shape

_op = torch.ops.thunderkittens.ssd_decode.default


def ssd_decode(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    state: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    state_indices: Tensor | None = None,
) -> Tensor:
    """A step of `tk.ssd` for a batch of sequences: adds their next tokens to the states, in place,
    and returns the tokens' outputs. One kernel reads and writes each state once.

    All arithmetic is in float32; a state of fewer bits is rounded when it is written, once per
    call. Every stride is accepted; a state is changed where it is if its last stride is 1 and the
    base and the other strides are multiples of 16 bytes, and copied there and back otherwise. There
    is no gradient: a call that would need one raises. Works under `torch.compile` and
    `torch.export` and in CUDA graphs; on CPU tensors it runs `tk.reference.ssd_decode`.

    Args:
        x: (B, H, T, P), bfloat16 or float16, T from 1 to 8.
        dt: (B, H, T), as in `tk.ssd`, as all but the states.
        A: (H,).
        B: (B, G, T, N).
        C: (B, G, T, N).
        state: (slots, H, P, N), float32 or the dtype of x: the states, changed in place. They
            overlap neither an operand nor, as expanded ones do, themselves: code that
            `torch.compile` made does not check this.
        D: (H,) or (H, P).
        z: (B, H, T, P).
        dt_bias: (H,).
        dt_softplus: whether softplus is taken of dt + dt_bias.
        dt_limit: bounds of the step size.
        state_indices: (B,), int32, contiguous: the slot of each sequence. They differ from each
            other; a negative one is of a sequence without state, whose output is 0. They are read
            on the GPU; one that is not below the number of slots counts as negative. None is slot i
            for sequence i, of as many slots as sequences.

    Returns:
        y (B, H, T, P) of x's dtype, contiguous.

    Raises:
        TypeError: as `tk.ssd`; a state of another dtype.
        ValueError: a shape or a limit that does not fit the above, or a state that overlaps an
            operand or itself.
        RuntimeError: a gradient is wanted, or a transform of `torch.func` is active.
    """
    low, high = limits("ssd_decode", dt_limit)
    if not torch.compiler.is_compiling():
        plain = _plain(
            *(x, dt, A, B, C, state, D, z, dt_bias, state_indices, dt_softplus, low, high, True)
        )
        if plain is not NotImplemented:
            return cast(Tensor, plain)
    if autocast_active():
        x, B, C = autocast_operands(x, B, C)
        if z is not None:
            (z,) = autocast_operands(z)
    require_flag("ssd_decode", "dt_softplus", dt_softplus)
    args = (x, dt, A, B, C, state, D, z, dt_bias, state_indices, dt_softplus, low, high)
    refuse_in_place("ssd_decode", args[:9], "tk.ssd")
    result: Tensor = call_in_place(_op, args, _check, _require_apart)
    return result


def _check(args: tuple[Any, ...]) -> None:
    ssd_decode_shape(*args[:10])


def _require_apart(args: tuple[Any, ...]) -> None:
    names = ("the state", "x", "dt", "A", "B", "C", "D", "z", "dt_bias", "state_indices")
    require_state_apart("ssd_decode", names, (args[5], *args[:5], *args[6:10]))


_plain = plain_call_in_place(_op, _check, _require_apart)


def ssd_decode_shape(
    x: Any, dt: Any, A: Any, B: Any, C: Any, state: Any, D: Any = None, z: Any = None,
    dt_bias: Any = None, state_indices: Any = None,
) -> None:  # fmt: skip
    """Raises what `ssd_decode` documents."""
    _, _, keys = ssd_shape(x, dt, A, B, C, D, z, dt_bias, op="ssd_decode")
    shape = (x.shape[1], x.shape[3], keys)
    require_decode("ssd_decode", state, shape, state_indices, "x", x)


# What the op does beside the CUDA implementation.

# The dispatcher drops trailing arguments that have their default value.
_DEFAULTS: tuple[Any, ...] = (None, None, None, None, False, 0.0, None, False)


def _filled(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*args, *_DEFAULTS[len(args) - 6 :])


def _fake(*args: Any) -> Tensor:
    args = _filled(args)
    ssd_decode_shape(*args[:10])
    result: Tensor = args[0].new_empty(args[0].shape)
    return result


def _cpu(*args: Any) -> Tensor:
    args = _filled(args)
    ssd_decode_shape(*args[:10])
    x, dt, A, B, C, state, D, z, dt_bias, state_indices, softplus, low, high, apart = args
    if apart:
        _require_apart(args)
    top = math.inf if high is None else high
    if emulation.active() and x.numel() > 0:
        arrays = {
            "x": x,
            "dt": dt,
            "A": A,
            "B": B,
            "C": C,
            "state": state,
            "D": D,
            "z": z,
            "dt_bias": dt_bias,
            "state_indices": state_indices,
        }
        found = emulation.run("ssd_decode", arrays, dt_softplus=softplus, dt_min=low, dt_max=top)
        return found["out"]
    return reference_ssd_decode(
        x, dt, A, B, C, state, D=D, z=z, dt_bias=dt_bias, dt_softplus=softplus,
        dt_limit=(low, top), state_indices=state_indices,
    ).contiguous()  # fmt: skip


def _flops(
    x_shape: Any, dt_shape: Any, A_shape: Any, B_shape: Any, *args: Any, **kwargs: Any
) -> int:
    """The state's change and its product with C, a multiplication and an addition per element
    each."""
    operations: int = 4 * math.prod(x_shape) * B_shape[3]
    return operations


register("ssd_decode", fake=_fake, cpu=_cpu, flops=_flops, differentiable=False)
