"""The gradient of `tk.linear_attention`: the op `linear_attention_backward`, and what the
differentiable op keeps for it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .. import emulation
from ..reference._recurrent_backward import linear_attention_backward
from ._gradient_call import gradient_call, refuse_double_backward
from ._registration import filled, one_by_one, register

_gradient = torch.ops.thunderkittens.linear_attention_backward.default
#: Of the arguments of `linear_attention`: q, k, v, decay, g, initial_state; behind them are
#: cu_seqlens, scale, state_v_first and return_state.
TENSORS = 6
_DEFAULTS: tuple[Any, ...] = (None, None, None, None, None, False, False)


def save_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    args = (*inputs, *_DEFAULTS[len(inputs) - 3 :])
    ctx.save_for_backward(*args[:7])
    ctx.options, ctx.return_state = args[7:9], args[9]
    ctx.set_materialize_grads(False)


def backward(
    ctx: Any, grad_out: Tensor | None, grad_final_state: Tensor | None
) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    needs = [bool(x) for x in (*ctx.needs_input_grad, *(False,) * TENSORS)[:TENSORS]]
    if not ctx.return_state:
        grad_final_state = None
    if grad_out is None:
        grad_out = torch.zeros_like(tensors[2])
    grads = _any_gradient(
        grad_out.to(tensors[0].dtype), grad_final_state, *tensors, *ctx.options, needs
    )
    wanted = (x if need else None for x, need in zip(grads, needs, strict=True))
    return (*wanted, None, None, None, None)


_BACKWARD_DEFAULTS: tuple[Any, ...] = (*_DEFAULTS[:6], (True,) * TENSORS)


def _filled(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """All arguments of the op: grad_out, grad_final_state, those of `linear_attention` without
    return_state, needs."""
    return (*args, *_BACKWARD_DEFAULTS[len(args) - 5 :])


def _empty_gradients(args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Results that are not wanted, or of arguments that are None, have one dimension, of 0."""
    x, needs = args[2], args[11]
    return tuple(
        (x if y is None else y).new_empty(y.shape if need and y is not None else 0)
        for y, need in zip(args[2:8], needs, strict=True)
    )


def _fake_backward(*args: Any) -> tuple[Tensor, ...]:
    return _empty_gradients(_filled(args))


_NAMES = ("q", "k", "v", "decay", "g", "initial_state", "cu_seqlens")


def _cpu_backward(*args: Any) -> tuple[Tensor, ...]:
    args = _filled(args)
    results = _empty_gradients(args)
    grad_out, grad_state, *operands = args[:9]
    scale, state_v_first, needs = args[9:]
    values: list[Tensor | None]
    if emulation.active() and grad_out.numel() > 0:
        arrays = {"grad_out": grad_out, "grad_state": grad_state}
        arrays.update(zip(_NAMES, operands, strict=True))
        flags = {f"needs_{i}": bool(need) for i, need in enumerate(needs)}
        found = emulation.run(
            "linear_attention_backward",
            arrays,
            scale=operands[0].shape[3] ** -0.5 if scale is None else scale,
            state_v_first=state_v_first,
            **flags,
        )
        values = [found.get(f"grad_{name}") for name in _NAMES[:TENSORS]]
    else:
        q, k, v, decay, g, initial_state, cu_seqlens = operands
        values = [
            *linear_attention_backward(
                grad_out,
                grad_state,
                q,
                k,
                v,
                decay=decay,
                g=g,
                initial_state=initial_state,
                cu_seqlens=cu_seqlens,
                scale=scale,
                state_v_first=state_v_first,
            )
        ]
    return filled(results, values)


def _flops_backward(*args: Any, **kwargs: Any) -> int:
    """Products within chunks of 64 tokens, with the states and into them, as a multiplication and
    an addition each; those of a head of q and k are counted for each head of v."""
    q_shape, v_shape = args[2], args[4]
    tokens, columns, keys = math.prod(v_shape[:3]), v_shape[3], q_shape[3]
    operations: int = 2 * tokens * (64 * (3 * keys + 2 * columns) + 5 * keys * columns)
    return operations


_any_gradient = gradient_call("linear_attention", _gradient, one_by_one)

register(
    "linear_attention_backward",
    fake=_fake_backward,
    cpu=_cpu_backward,
    flops=_flops_backward,
    vmap=one_by_one(_gradient),
)
torch.library.register_autograd(
    "thunderkittens::linear_attention_backward", refuse_double_backward("linear_attention")
)
