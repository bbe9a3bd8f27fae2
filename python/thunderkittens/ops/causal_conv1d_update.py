"""The next tokens of a causal convolution, with the state changed in place."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor

from .. import emulation
from ..reference.causal_conv1d_update import causal_conv1d_update as reference_update
from ._memory import require_apart
from ._registration import (
    autocast_active,
    autocast_operands,
    call_in_place,
    plain_call_in_place,
    refuse_in_place,
    register,
)
from .causal_conv1d import (
    ACTIVATIONS,
    NAMES,
    refuse_activation,
    require_dense,
    require_int32,
    require_state,
    require_taps,
)

_NAME = "causal_conv1d_update"
_op = torch.ops.thunderkittens.causal_conv1d_update.default


def causal_conv1d_update(
    x: Tensor,
    state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    slots: Tensor | None = None,
) -> Tensor:
    """The next token, or several, of `tk.causal_conv1d` for a batch of sequences, from the last
    inputs in `state`, which is moved on in place. The same values as `tk.causal_conv1d` with
    `initial_state` the last W - 1 places of the state, in one kernel.

    All arithmetic is in float32, rounded once. Every stride of x and of the state is accepted, and
    nothing is copied. There is no gradient: a call that would need one raises. Works under
    `torch.compile` and `torch.export` and in CUDA graphs; on CPU tensors it runs
    `tk.reference.causal_conv1d_update`.

    Args:
        x: (B, C), or (B, C, T) of T tokens; bfloat16, float16 or float32.
        state: (B, C, L) of x's dtype, the last L inputs of each sequence, the latest last; L is W -
            1 or more, as a serving cache has it. With slots (slots, C, L). It is changed in place,
            and overlaps neither an operand nor, as an expanded one does, itself: code that
            `torch.compile` made does not check this.
        weight: (C, W) with 2 to 4 taps, of x's dtype or float32.
        bias: (C,), of x's dtype or float32, or None.
        activation: None or "silu".
        slots: (B,), int32, on x's device: which place of the state a sequence has. One that is not
            there, as -1, is left out: no state changes, and the output is 0. Of two equal ones,
            which state results is undefined.

    Returns:
        out of x's shape, dtype and strides (as `torch.empty_like` has them).

    Raises:
        TypeError: what is no dense tensor, dtypes, devices.
        ValueError: shapes that do not fit the above, an unknown activation, or a state that
            overlaps an operand or itself.
        RuntimeError: a gradient is wanted, or a transform of `torch.func` is active.

    The formula is `tk.reference.causal_conv1d_update`.
    """
    code = ACTIVATIONS.get(activation, -1) if activation is None or activation == "silu" else -1
    if code < 0:
        refuse_activation(_NAME, activation)
    if not torch.compiler.is_compiling():
        plain = _plain(x, state, weight, bias, code, slots, True)
        if plain is not NotImplemented:
            return cast(Tensor, plain)
    if autocast_active():
        (x,) = autocast_operands(x)
    args = (x, state, weight, bias, code, slots)
    refuse_in_place(_NAME, args[:4], "tk.causal_conv1d")
    result: Tensor = call_in_place(_op, args, _check, _require_apart)
    return result


def _require_apart(args: tuple[Any, ...]) -> None:
    require_apart(_NAME, ("state", "x"), (args[1], args[0]), written=1)


def causal_conv1d_update_shape(
    x: Any, state: Any, weight: Any, bias: Any = None, activation: int = 0, slots: Any = None
) -> None:
    """Raises what `causal_conv1d_update` documents."""
    if activation not in NAMES:
        raise ValueError(f"tk.{_NAME}: activation is {activation}; it must be 0 (none) or 4 (silu)")
    require_dense(_NAME, "x", x)
    if x.dim() not in (2, 3):
        raise ValueError(
            f"tk.{_NAME}: x has shape {tuple(x.shape)}; it must be (B, C) or (B, C, T)"
        )
    require_taps(_NAME, x, weight, bias)
    require_state(_NAME, "state", state, x)
    before = weight.shape[1] - 1
    if state.dim() != 3 or state.shape[1] != x.shape[1] or state.shape[2] < before:
        raise ValueError(
            f"tk.{_NAME}: state has shape {tuple(state.shape)}; it must be (slots, "
            f"{x.shape[1]}, {before} or more)"
        )
    if slots is not None:
        require_int32(_NAME, "slots", slots, x)
        if tuple(slots.shape) != (x.shape[0],):
            raise ValueError(
                f"tk.{_NAME}: slots has shape {tuple(slots.shape)}; it must be {(x.shape[0],)}"
            )
    elif state.shape[0] != x.shape[0]:
        raise ValueError(
            f"tk.{_NAME}: state has {state.shape[0]} sequences, x has {x.shape[0]}; without slots "
            "they must be equal"
        )


def _check(args: tuple[Any, ...]) -> None:
    causal_conv1d_update_shape(*args)


_plain = plain_call_in_place(_op, _check, _require_apart)


# The dispatcher drops trailing arguments that have their default value.
_DEFAULTS: tuple[Any, ...] = (None, 0, None, False)


def _fake(x: Tensor, state: Tensor, weight: Tensor, *args: Any) -> Tensor:
    causal_conv1d_update_shape(x, state, weight, *args[:3])
    return torch.empty_like(x)


def _cpu(x: Tensor, state: Tensor, weight: Tensor, *args: Any) -> Tensor:
    out = _fake(x, state, weight, *args)
    bias, activation, slots, apart = (*args, *_DEFAULTS[len(args) :])
    if apart:
        _require_apart((x, state))
    if emulation.active() and x.numel() > 0:
        arrays = {"x": x, "state": state, "weight": weight, "bias": bias, "slots": slots}
        return out.copy_(emulation.run(_NAME, arrays, activation=activation)["out"])
    return out.copy_(
        reference_update(x, state, weight, bias, activation=NAMES[activation], slots=slots)
    )


def _flops(x_shape: Any, state_shape: Any, weight_shape: Any, *args: Any, **kwargs: Any) -> int:
    """A multiplication and an addition for each tap of each output."""
    operations: int = 2 * math.prod(x_shape) * weight_shape[1]
    return operations


register(_NAME, fake=_fake, cpu=_cpu, flops=_flops, autocast=1, differentiable=False)
