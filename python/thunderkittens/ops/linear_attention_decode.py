"""Decayed linear attention for one or a few more tokens per sequence, with the state changed in
place."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor

from .. import emulation
from ..reference.linear_attention_decode import (
    linear_attention_decode as reference_linear_attention_decode,
)
from ._recurrent import require_decode, require_flag, require_scale, require_state_apart
from ._registration import (
    autocast_active,
    autocast_operands,
    call_in_place,
    plain_call_in_place,
    refuse_in_place,
    register,
)
from .linear_attention import linear_attention_shape

_op = torch.ops.thunderkittens.linear_attention_decode.default


def linear_attention_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    *,
    decay: Tensor | None = None,
    g: Tensor | None = None,
    scale: float | None = None,
    state_v_first: bool = False,
    state_indices: Tensor | None = None,
) -> Tensor:
    """A step of `tk.linear_attention` for a batch of sequences: adds their next tokens to the
    states, in place, and returns the tokens' outputs. One kernel reads and writes each state once.

    All arithmetic is in float32; a state of fewer bits is rounded when it is written, once per
    call. Every stride is accepted; a state is changed where it is if its last stride is 1 and the
    base and the other strides are multiples of 16 bytes, and copied there and back otherwise. There
    is no gradient: a call that would need one raises. Works under `torch.compile` and
    `torch.export` and in CUDA graphs; on CPU tensors it runs
    `tk.reference.linear_attention_decode`.

    Args:
        q: (B, Hk, T, K), bfloat16 or float16, T from 1 to 8.
        k: (B, Hk, T, K), as in `tk.linear_attention`, as all but the states.
        v: (B, H, T, V).
        state: (slots, H, K, V), float32 or the dtype of q: the states, changed in place. They
            overlap neither an operand nor, as expanded ones do, themselves: code that
            `torch.compile` made does not check this.
        decay: (H,), log decay of every token.
        g: (B, H, T), log decay of a token.
        scale: factor of the scores; None is K^-0.5.
        state_v_first: the state is (slots, H, V, K) instead.
        state_indices: (B,), int32, contiguous: the slot of each sequence. They differ from each
            other; a negative one is of a sequence without state, whose output is 0. They are read
            on the GPU; one that is not below the number of slots counts as negative. None is slot i
            for sequence i, of as many slots as sequences.

    Returns:
        out (B, H, T, V) of q's dtype, contiguous.

    Raises:
        TypeError: as `tk.linear_attention`; a state of another dtype.
        ValueError: a shape or a scale that does not fit the above, or a state that overlaps an
            operand or itself.
        RuntimeError: a gradient is wanted, or a transform of `torch.func` is active.
    """
    if scale is not None:
        require_scale("linear_attention_decode", scale)
        scale = float(scale)
    if not torch.compiler.is_compiling():
        plain = _plain(q, k, v, state, decay, g, state_indices, scale, state_v_first, True)
        if plain is not NotImplemented:
            return cast(Tensor, plain)
    if autocast_active():
        q, k, v = autocast_operands(q, k, v)
    require_flag("linear_attention_decode", "state_v_first", state_v_first)
    args = (q, k, v, state, decay, g, state_indices, scale, state_v_first)
    refuse_in_place("linear_attention_decode", args[:6], "tk.linear_attention")
    result: Tensor = call_in_place(_op, args, _check, _require_apart)
    return result


def _check(args: tuple[Any, ...]) -> None:
    linear_attention_decode_shape(*args[:9])


def _require_apart(args: tuple[Any, ...]) -> None:
    names = ("the state", "q", "k", "v", "decay", "g", "state_indices")
    require_state_apart("linear_attention_decode", names, (args[3], *args[:3], *args[4:7]))


_plain = plain_call_in_place(_op, _check, _require_apart)


def linear_attention_decode_shape(
    q: Any, k: Any, v: Any, state: Any, decay: Any = None, g: Any = None, state_indices: Any = None,
    scale: Any = None, state_v_first: bool = False,
) -> None:  # fmt: skip
    """Raises what `linear_attention_decode` documents."""
    op = "linear_attention_decode"
    _, *shape = linear_attention_shape(
        q, k, v, decay, g, scale=scale, state_v_first=state_v_first, op=op
    )
    require_decode(op, state, tuple(shape), state_indices, "v", v)


# What the op does beside the CUDA implementation.

# The dispatcher drops trailing arguments that have their default value.
_DEFAULTS: tuple[Any, ...] = (None, None, None, None, False, False)


def _filled(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*args, *_DEFAULTS[len(args) - 4 :])


def _fake(*args: Any) -> Tensor:
    args = _filled(args)
    _check(args)
    result: Tensor = args[2].new_empty(args[2].shape)
    return result


def _cpu(*args: Any) -> Tensor:
    args = _filled(args)
    _check(args)
    q, k, v, state, decay, g, state_indices, scale, state_v_first, apart = args
    if apart:
        _require_apart(args)
    if emulation.active() and v.numel() > 0:
        arrays = {
            "q": q,
            "k": k,
            "v": v,
            "state": state,
            "decay": decay,
            "g": g,
            "state_indices": state_indices,
        }
        found = emulation.run(
            "linear_attention_decode",
            arrays,
            scale=q.shape[3] ** -0.5 if scale is None else scale,
            state_v_first=state_v_first,
        )
        return found["out"]
    return reference_linear_attention_decode(
        q, k, v, state, decay=decay, g=g, scale=scale, state_v_first=state_v_first,
        state_indices=state_indices,
    ).contiguous()  # fmt: skip


def _flops(q_shape: Any, k_shape: Any, v_shape: Any, *args: Any, **kwargs: Any) -> int:
    """The state's change and its product with q, a multiplication and an addition per element
    each."""
    operations: int = 4 * math.prod(v_shape) * q_shape[3]
    return operations


register(
    "linear_attention_decode", fake=_fake, cpu=_cpu, flops=_flops, autocast=3, differentiable=False
)
