"""One step of LoLCATS for a batch of sequences of different lengths, whose state it updates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import emulation
from ..reference.lolcats import LolcatsState, Window
from ..reference.lolcats_decode import lolcats_decode as reference_decode
from ._lolcats import NAMES, State, lolcats_flops, lolcats_shape, require_window, state_parts
from ._memory import require_apart
from ._registration import (
    autocast_active,
    autocast_operands,
    forward_mode_active,
    refuse_forward_mode,
    register,
    transform_active,
)

_op = torch.ops.thunderkittens.lolcats_decode.default
_STATE = tuple(f"the state's {name}" for name in LolcatsState._fields)
_NAMES = (*_STATE, *NAMES, "alpha", "beta")


def lolcats_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_map: Tensor,
    k_map: Tensor,
    alpha: Tensor,
    beta: Tensor,
    state: State,
    *,
    window: Window = "terrace",
) -> Tensor:
    """`tk.lolcats` of one token behind those of a state, which is updated in place.

    The same weights as in `lolcats`: the window is the token's block of 64 and the one before, so
    that decoding token by token gives what one call on all tokens gives. The state's sums are read
    in every step, and written when a block is complete. Not differentiable.

    window="published" is what the authors' PyTorch code computes when it generates: the window is
    the last 64 tokens, the new one among them, and all before them have linear weights. The sums
    are written in every step. It continues states of `lolcats(..., window="published")`, of
    `tk.reference.empty_state`, and its own.

    Args:
        q: (B, H, 1, D), bfloat16 or float16, D 64 or 128.
        k: (B, Hkv, 1, D), dtype and device of q.
        v: (B, Hkv, 1, D), dtype and device of q.
        q_map: (H, D, F), the features' weights for q, as `lolcats` takes them.
        k_map: (H, D, F), those for k.
        alpha: (H,), float32, factor of the weights before the window.
        beta: (H,), float32, factor of the weights in it.
        state: a `LolcatsState`, of `lolcats(..., return_state=True)` or of
            `tk.reference.empty_state`; contiguous. The sequences may have different lengths. Its
            tensors are written in place, and overlap neither an operand nor each other: code that
            `torch.compile` made does not check this.
        window: "terrace" or "published", as the call that made the state.

    Returns:
        out (B, H, 1, D) of q's dtype.

    Raises:
        TypeError: as `lolcats`.
        ValueError: a shape that does not fit the above, another window, or a state that is not
            contiguous, or overlaps an operand or itself.
        RuntimeError: a gradient is wanted, or a transform of `torch.func` is active.
    """
    if autocast_active():
        q, k, v, q_map, k_map = autocast_operands(q, k, v, q_map, k_map)
    parts = state_parts("lolcats_decode", state)
    args = (q, k, v, q_map, k_map, alpha, beta, *parts)
    decode_shape(*args)
    require_window("lolcats_decode", window)
    if forward_mode_active():
        refuse_forward_mode("lolcats_decode", *args)
    if transform_active():
        raise RuntimeError(
            "tk.lolcats_decode changes the state in place and cannot be called under the "
            "transforms of torch.func; tk.lolcats can, on one token"
        )
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in args):
        raise RuntimeError(
            "tk.lolcats_decode: there is no gradient; use torch.no_grad(), or tk.lolcats to train"
        )
    if not torch.compiler.is_compiling():
        tensors: tuple[Any, ...] = (*parts, *args[:7])
        require_apart("lolcats_decode", _NAMES, tensors, written=5)
    result: Tensor = _op(*args, window == "published")
    return result


def decode_shape(*args: Any) -> Any:
    """The sizes of a call of operands and state; raises what `lolcats_decode` documents."""
    if args[7] is None:
        raise TypeError("tk.lolcats_decode: state must be a LolcatsState, got None")
    sizes = lolcats_shape(*args, op="lolcats_decode")
    if sizes.length != 1:
        raise ValueError(f"tk.lolcats_decode: q has {sizes.length} tokens; it must have one")
    for name, x in zip(LolcatsState._fields, args[7:], strict=True):
        if not x.is_contiguous():
            raise ValueError(
                f"tk.lolcats_decode: the state's {name} has strides {x.stride()}; it is written in "
                "place and must be contiguous"
            )
    return sizes


def _fake(*args: Any) -> Tensor:
    decode_shape(*args[:12])
    q: Tensor = args[0]
    return q.new_empty(q.shape)


def _cpu(*args: Any) -> Tensor:
    result = _fake(*args)
    # The dispatcher drops a trailing argument that has its default value.
    q, k, v, q_map, k_map, alpha, beta, *parts = args[:12]
    state, sliding = LolcatsState(*parts), any(args[12:])
    if emulation.active() and result.numel() > 0:
        names = (*NAMES, "alpha", "beta", *LolcatsState._fields)
        arrays = dict(zip(names, args[:12], strict=True))
        found = emulation.run("lolcats_decode", arrays, sliding=sliding)
        for name, x in zip(LolcatsState._fields, state, strict=True):
            x.copy_(torch.as_tensor(found[name]))
        result.copy_(found["out"])
    else:
        window: Window = "published" if sliding else "terrace"
        result.copy_(reference_decode(q, k, v, q_map, k_map, alpha, beta, state, window=window))
    return result


def _refuse_vmap(*args: Any) -> Any:
    raise RuntimeError(
        "tk.lolcats_decode: torch.func.vmap is not supported, because the state is updated in "
        "place; it takes batches"
    )


def _flops(*args: Any, **kwargs: Any) -> int:
    return lolcats_flops(*args)


register(
    "lolcats_decode",
    fake=_fake,
    cpu=_cpu,
    flops=_flops,
    vmap=_refuse_vmap,
    autocast=5,
    differentiable=False,
)
