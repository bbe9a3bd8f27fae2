"""The gated delta rule for a few more tokens per sequence, with the states changed in place."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor

from .. import emulation
from ..reference.gated_delta_rule_decode import (
    gated_delta_rule_decode as reference_gated_delta_rule_decode,
)
from ._gated_delta_rule import (
    operands_shape,
    options_of,
    require_gate,
    require_options,
    require_scale,
    require_state,
    state_shape,
)
from ._memory import require_apart
from ._registration import (
    autocast_active,
    autocast_operands,
    call_in_place,
    plain_call_in_place,
    refuse_in_place,
    register,
    require_device,
)

_op = torch.ops.thunderkittens.gated_delta_rule_decode.default
_NAME = "gated_delta_rule_decode"
_NAMES = ("state", "q", "k", "v", "g", "beta")
MAX_TOKENS = 8


def gated_delta_rule_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    *,
    state_indices: Tensor | None = None,
    scale: float | None = None,
    qk_l2norm: bool = False,
    beta_sigmoid: bool = False,
    allow_neg_eigval: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    state_v_first: bool = False,
) -> Tensor:
    """A step of `tk.gated_delta_rule` for a batch of sequences: brings the states up to date, in
    place, with 1 to 8 tokens each, and returns the tokens' outputs. The same values as
    `tk.gated_delta_rule` with `initial_state=state, return_state=True`, in one kernel that reads
    and writes the states once.

    All arithmetic is in float32. Every stride is accepted. There is no gradient: a call that would
    need one raises. Works under `torch.compile` and `torch.export` and in CUDA graphs; on CPU
    tensors it runs `tk.reference.gated_delta_rule_decode`.

    Args:
        q: (B, H, T, K), bfloat16 or float16; T from 1 to 8, K a multiple of 8 from 8 to 128.
        k: (B, H, T, K), dtype and device of q.
        v: (B, HV, T, V), dtype and device of q; HV a multiple of H, V a multiple of 8 from 8 to
            256.
        g: (B, HV, T), float32 or q's dtype, as for `tk.gated_delta_rule`.
        beta: (B, HV, T), float32 or q's dtype.
        state: (B, HV, K, V), float32 or bfloat16, of the tokens before; zeros for none. With
            state_indices (slots, HV, K, V), a pool. It is changed in place, and overlaps neither an
            operand nor, as expanded ones do, itself: code that `torch.compile` made does not check
            this.
        state_indices: (B,), int32: the slot of each sequence's state in the pool. A sequence with
            -1 is skipped: no state changes, and its outputs are 0. No two sequences have the same
            slot, which only CPU tensors are checked for.
        scale: of the output; None is K^-1/2.
        qk_l2norm: as for `tk.gated_delta_rule`.
        beta_sigmoid: as for `tk.gated_delta_rule`.
        allow_neg_eigval: as for `tk.gated_delta_rule`.
        A_log: (HV,), float32, as for `tk.gated_delta_rule`.
        dt_bias: (HV,), float32, as for `tk.gated_delta_rule`.
        state_v_first: states are (B, HV, V, K).

    Returns:
        out (B, HV, T, V) of q's dtype, contiguous.

    Raises:
        TypeError: an operand is no dense tensor, has an unsupported dtype or one that differs from
            q's, or is on another device; a wrong dtype of g, beta, the state, A_log, dt_bias or
            state_indices.
        ValueError: a shape that does not fit the above, more than 8 tokens or none, options that
            do not fit each other, or a state that overlaps an operand or itself; on a CPU, slots
            that the pool does not have or that occur twice.
        RuntimeError: a gradient is wanted, or a transform of `torch.func` is active.
    """
    if scale is not None:
        require_scale(_NAME, scale)
        scale = float(scale)
    if not torch.compiler.is_compiling():
        plain = _plain(
            *(q, k, v, g, beta, state, state_indices, A_log, dt_bias, scale, qk_l2norm),
            *(beta_sigmoid, allow_neg_eigval, state_v_first, True),
        )
        if plain is not NotImplemented:
            return cast(Tensor, plain)
    if autocast_active():
        q, k, v = autocast_operands(q, k, v)
    args = (
        q, k, v, g, beta, state, state_indices, A_log, dt_bias, scale, bool(qk_l2norm),
        bool(beta_sigmoid), bool(allow_neg_eigval), bool(state_v_first),
    )  # fmt: skip
    refuse_in_place(_NAME, args[:9], "tk.gated_delta_rule on the tokens")
    result: Tensor = call_in_place(_op, args, _check, _require_apart)
    return result


def _check(args: tuple[Any, ...]) -> None:
    gated_delta_rule_decode_shape(*args[:10], *args[11:14])


def _require_apart(args: tuple[Any, ...]) -> None:
    require_apart(_NAME, _NAMES, (args[5], *args[:5]), written=1)


_plain = plain_call_in_place(_op, _check, _require_apart)


def gated_delta_rule_decode_shape(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Any, state_indices: Any = None,
    A_log: Any = None, dt_bias: Any = None, scale: Any = None, beta_sigmoid: bool = False,
    allow_neg_eigval: bool = False, state_v_first: bool = False,
) -> tuple[int, int, int, int]:  # fmt: skip
    """Shape of the output; raises what `gated_delta_rule_decode` documents."""
    shape = operands_shape(_NAME, q, k, v, g, beta)
    batch, length = q.shape[0], q.shape[2]
    if length < 1 or length > MAX_TOKENS:
        raise ValueError(
            f"tk.{_NAME}: q has {length} tokens; a step has 1 to {MAX_TOKENS}, tk.gated_delta_rule "
            "takes more"
        )
    require_gate(_NAME, q, v, A_log, dt_bias)
    require_options(_NAME, scale, beta_sigmoid, allow_neg_eigval)
    expected = state_shape(q, v, None, state_v_first)
    if state_indices is not None:
        if not isinstance(state_indices, Tensor) or state_indices.dtype != torch.int32:
            kind = getattr(state_indices, "dtype", type(state_indices).__name__)
            raise TypeError(f"tk.{_NAME}: state_indices must be an int32 tensor, got {kind}")
        require_device(_NAME, "state_indices", state_indices, "q", q)
        if tuple(state_indices.shape) != (batch,):
            raise ValueError(
                f"tk.{_NAME}: state_indices has shape {tuple(state_indices.shape)}; it must be "
                f"{(batch,)}"
            )
        if isinstance(state, Tensor) and state.dim() == 4:
            expected = (state.shape[0], *expected[1:])
    require_state(_NAME, "state", state, q, expected)
    return shape


_DEFAULTS: tuple[Any, ...] = (None,) * 3 + (None, False, False, False, False) + (False,)


def _fake(*args: Any) -> Tensor:
    q, k, v, g, beta, state, *rest = (*args, *_DEFAULTS[len(args) - 6 :])
    indices, A_log, dt_bias, scale, _, sigmoid, double, v_first, _ = rest
    shape = gated_delta_rule_decode_shape(
        q, k, v, g, beta, state, indices, A_log, dt_bias, scale, sigmoid, double, v_first
    )
    out: Tensor = q.new_empty(shape)
    return out


def _cpu(*args: Any) -> Tensor:
    out: Tensor = _fake(*args)
    q, k, v, g, beta, state, *rest = (*args, *_DEFAULTS[len(args) - 6 :])
    indices, A_log, dt_bias, *options, apart = rest
    if apart:
        _require_apart(args)
    if indices is not None:
        _require_slots(indices.tolist(), state.shape[0])
    if emulation.active() and out.numel() > 0:
        names = ("q", "k", "v", "g", "beta", "state", "state_indices", "A_log", "dt_bias")
        arrays = dict(zip(names, (q, k, v, g, beta, state, *rest[:3]), strict=True))
        found: Tensor = emulation.run(_NAME, arrays, **options_of(options, q))["out"]
        return found
    if out.numel() > 0:
        out.copy_(
            reference_gated_delta_rule_decode(
                q,
                k,
                v,
                g,
                beta,
                state,
                state_indices=indices,
                A_log=A_log,
                dt_bias=dt_bias,
                **options_of(options, q),
            )
        )
    return out


def _require_slots(slots: list[int], count: int) -> None:
    used = [slot for slot in slots if slot != -1]
    if any(slot < -1 or slot >= count for slot in used) or len(set(used)) < len(used):
        raise ValueError(
            f"tk.{_NAME}: state_indices is {slots}; slots must be -1 or different numbers below "
            f"{count}"
        )


def _flops(q_shape: Any, k_shape: Any, v_shape: Any, *args: Any, **kwargs: Any) -> int:
    """The decay, the products with the key and the query and the state's change, per element."""
    operations: int = 7 * math.prod(v_shape) * q_shape[3]
    return operations


register(_NAME, fake=_fake, cpu=_cpu, flops=_flops, autocast=3, differentiable=False)
