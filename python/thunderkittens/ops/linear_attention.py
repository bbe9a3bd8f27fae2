"""Causal linear attention with a scalar decay per head and token: lightning attention, retention,
simple GLA.

`linear_attention` checks the operands and calls `linear_attention_forward`, or the differentiable
op `linear_attention` when a gradient is wanted, whose gradient is the op
`linear_attention_backward`.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor

from .. import emulation
from .._signatures import as_linear_attention
from ..reference.linear_attention import linear_attention as reference_linear_attention
from ._eager_autograd import differentiable
from ._linear_attention_autograd import backward, save_context
from ._recurrent import (
    MAX_KEY_DIM,
    MAX_VALUE_DIM,
    require_dim,
    require_flag,
    require_heads,
    require_like,
    require_scale,
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

_forward = torch.ops.thunderkittens.linear_attention_forward.default
_differentiable = torch.ops.thunderkittens.linear_attention.default


@as_linear_attention
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    decay: Tensor | None = None,
    g: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal linear attention whose state decays: `S_t = e^(l_t) S_(t-1) + k_t v_t^T` and
    `o_t = scale S_t^T q_t`, with the log decay `l_t = decay + g_t` of a head's token.

    Constant decays per head are those of lightning attention (`decay = -slopes`) and retention
    (`decay = log(1 - 2^(-5 - h))`); g is the gate of simple GLA and Mamba-2. Without either it is
    plain linear attention. Feature maps are the caller's. Time and memory are linear in T. Sums and
    decays are in float32; operands of products, among them a copy of the state per 64 tokens, are
    rounded to q's dtype. Every stride is accepted, so that a model's (B, T, H, D) is given as a
    view, `q.transpose(1, 2)`; operands are read where they are as long as the last stride is 1 and
    the base and the other strides are multiples of 16 bytes, and are copied otherwise. Reruns have
    the same bits. It cannot be differentiated again. Under autocast, q, k and v are converted to
    the autocast dtype. On CPU tensors it runs `tk.reference.linear_attention`.

    Args:
        q: (B, Hk, T, K), bfloat16 or float16; K a multiple of 8 from 8 to 128. T may be 0.
        k: (B, Hk, T, K), dtype and device of q.
        v: (B, H, T, V), dtype and device of q; H is a multiple of Hk, and head h goes with head
            h // (H / Hk) of q and k; V a multiple of 8 from 8 to 256.
        decay: (H,), at most 0, float32 or the dtype of q: the log decay of every token, per head;
            None is 0, no decay.
        g: (B, H, T), at most 0, float32 or the dtype of q: the log decay of a token, added to
            decay; None is 0. A sum below -128 counts as -128, whose exponential is 0.
        scale: factor of the scores; None is K^-0.5.
        initial_state: (B, H, K, V), float32, any strides: the state before the first token, of each
            of the sequences with cu_seqlens. None is 0.
        return_state: also return the state after the last token: what the next call, or
            `tk.linear_attention_decode`, continues from.
        state_v_first: both states are (B, H, V, K) instead.
        cu_seqlens: (sequences + 1,), int32, contiguous: the first token of each of the sequences
            that are packed one after the other along T, and the one behind the last. They ascend;
            B is 1. They are read on the GPU. Outputs of tokens of no sequence are 0.

    Returns:
        out (B, H, T, V) of q's dtype, contiguous; with return_state (out, state), the state (B, H,
        K, V), or (sequences, H, K, V), in float32.

    Raises:
        TypeError: an operand is no dense tensor, has an unsupported dtype or one that differs from
            q's, or is on another device; an option of another type.
        ValueError: a shape or a scale that does not fit the above.

    The formula is `tk.reference.linear_attention`; Sun et al., "Retentive network",
    arXiv:2307.08621; Qin et al., "Lightning attention-2", arXiv:2401.04658; Yang et al., "Gated
    linear attention transformers with hardware-efficient training", arXiv:2312.06635.
    """
    if scale is not None:
        require_scale("linear_attention", scale)
        scale = float(scale)
    if return_state is False and not torch.compiler.is_compiling():
        plain = _plain(q, k, v, decay, g, initial_state, cu_seqlens, scale, state_v_first)
        if plain is not NotImplemented:
            return cast(Tensor, plain)
    if autocast_active():
        q, k, v = autocast_operands(q, k, v)
    require_flag("linear_attention", "return_state", return_state)
    require_flag("linear_attention", "state_v_first", state_v_first)
    tensors = (q, k, v, decay, g, initial_state)
    args = (*tensors, cu_seqlens, scale, state_v_first)
    if forward_mode_active():
        _check(args)
        refuse_forward_mode("linear_attention", *tensors)
    if return_state or wants_gradient(tensors) or transform_active():
        out, state = call_checked(_recorded, (*args, return_state), _check)
        return (out, state) if return_state else out
    result: Tensor = call_checked(_forward, args, _check)
    return result


def linear_attention_shape(
    q: Any, k: Any, v: Any, decay: Any = None, g: Any = None, initial_state: Any = None,
    cu_seqlens: Any = None, scale: Any = None, state_v_first: bool = False,
    op: str = "linear_attention",
) -> tuple[Any, ...]:  # fmt: skip
    """Shape of a state; raises what `linear_attention` documents."""
    require_operands(op, ("q", "k", "v"), q, k, v)
    for name, operand, form in (("q", q, "(B, Hk, T, K)"), ("v", v, "(B, H, T, V)")):
        if operand.dim() != 4:
            raise ValueError(
                f"tk.{op}: {name} has shape {tuple(operand.shape)}; it must have 4 dimensions, "
                f"{form}"
            )
    if k.shape != q.shape:
        raise ValueError(f"tk.{op}: k has shape {tuple(k.shape)}; it must be {tuple(q.shape)}")
    batch, heads, length, columns = v.shape
    if q.shape[0] != batch or q.shape[2] != length:
        raise ValueError(
            f"tk.{op}: v has shape {tuple(v.shape)}, q has {tuple(q.shape)}; batch and length must "
            "be equal"
        )
    groups, keys = q.shape[1], q.shape[3]
    require_heads(op, heads, groups, "v", "q")
    require_dim(op, "q", "columns", keys, MAX_KEY_DIM)
    require_dim(op, "v", "columns", columns, MAX_VALUE_DIM)
    require_scale(op, scale)
    if decay is not None:
        require_like(op, "decay", decay, ((heads,),), "v", v)
    if g is not None:
        require_like(op, "g", g, ((batch, heads, length),), "v", v)
    states = batch if cu_seqlens is None else require_sequences(op, cu_seqlens, "q", q)
    shape = (states, heads, *((columns, keys) if state_v_first else (keys, columns)))
    if initial_state is not None:
        require_state(op, "initial_state", initial_state, shape, "q", q)
    return shape


def _check(args: tuple[Any, ...]) -> None:
    linear_attention_shape(*args[:9])


_plain = plain_call(_forward, _check)


# What the ops do beside the CUDA implementation.

# The dispatcher drops trailing arguments that have their default value.
_DEFAULTS: tuple[Any, ...] = (None, None, None, None, None, False, False)


def _filled(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*args, *_DEFAULTS[len(args) - 3 :])


def _empty(args: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    v = args[2]
    states, *shape = linear_attention_shape(*args[:9])
    final = v.new_empty((states if args[9] else 0, *shape), dtype=torch.float32)
    return v.new_empty(v.shape), final


def _fake(*args: Any) -> tuple[Tensor, Tensor]:
    return _empty(_filled(args))


def _cpu(*args: Any) -> tuple[Tensor, Tensor]:
    args = _filled(args)
    results = _empty(args)
    q, k, v, decay, g, initial_state, cu_seqlens, scale, state_v_first, final = args
    values: tuple[Tensor, ...]
    if emulation.active() and results[0].numel() > 0:
        arrays = {
            "q": q,
            "k": k,
            "v": v,
            "decay": decay,
            "g": g,
            "initial_state": initial_state,
            "cu_seqlens": cu_seqlens,
        }
        found = emulation.run(
            "linear_attention",
            arrays,
            scale=q.shape[3] ** -0.5 if scale is None else scale,
            state_v_first=state_v_first,
            return_state=final,
        )
        values = (found["out"], found.get("final_state", results[1]))
    else:
        values = reference_linear_attention(
            q, k, v, decay=decay, g=g, scale=scale, initial_state=initial_state,
            return_state=True, state_v_first=state_v_first, cu_seqlens=cu_seqlens,
        )  # fmt: skip
    return filled(results, values)


def _flops(q_shape: Any, k_shape: Any, v_shape: Any, *args: Any, **kwargs: Any) -> int:
    """Products within chunks of 64 tokens, and with the state and into it, as a multiplication and
    an addition each."""
    tokens, columns, keys = math.prod(v_shape[:3]), v_shape[3], q_shape[3]
    operations: int = 2 * tokens * (64 * (keys + columns) + 2 * keys * columns)
    return operations


_recorded = differentiable("linear_attention", _differentiable, save_context, backward, one_by_one)

register_both("linear_attention", fake=_fake, cpu=_cpu, flops=_flops, vmap=one_by_one, autocast=3)
