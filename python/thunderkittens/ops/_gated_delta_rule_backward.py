"""The gradient of the gated delta rule: the op `gated_delta_rule_backward`."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor

from .. import emulation
from ..reference.gated_delta_rule import gated_delta_rule_chunked
from ._gated_delta_rule import (
    OPERANDS,
    gated_delta_rule_shape,
    options_of,
    require_edges_in_order,
    state_shape,
    vmap_rule,
)
from ._gradient_call import gradient_call, refuse_double_backward
from ._registration import filled, register

_gradient = torch.ops.thunderkittens.gated_delta_rule_backward.default
# Of initial_state, A_log, dt_bias and cu_seqlens, of the options, and of needs.
_DEFAULTS: tuple[Any, ...] = (None,) * 4 + (None, False, False, False, False) + ((True,) * 8,)


def _empty(args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    grad_out, grad_state, q, k, v, g, beta, *rest = (*args, *_DEFAULTS[len(args) - 7 :])
    initial, A_log, dt_bias, edges, scale, _, sigmoid, double, v_first, needs = rest
    shape = gated_delta_rule_shape(
        q, k, v, g, beta, initial, A_log, dt_bias, edges, scale, sigmoid, double, v_first
    )
    expected: list[tuple[str, Tensor | None, tuple[int, ...]]] = [
        ("grad_out", grad_out, shape),
        ("grad_state", grad_state, state_shape(q, v, edges, v_first)),
    ]
    for name, x, of in expected:
        if x is not None and tuple(x.shape) != of:
            raise ValueError(
                f"thunderkittens::gated_delta_rule_backward: {name} has shape {tuple(x.shape)}; it "
                f"must be {of}"
            )
    return tuple(
        q.new_empty(0) if x is None or not need else x.new_empty(x.shape)
        for x, need in zip((q, k, v, g, beta, initial, A_log, dt_bias), needs, strict=True)
    )


def _fake(*args: Any) -> tuple[Tensor, ...]:
    return _empty(args)


def _cpu(*args: Any) -> tuple[Tensor, ...]:
    results = _empty(args)
    run = _emulated if emulation.active() and args[0].numel() > 0 else _reference
    return filled(results, run(args))


def _emulated(args: tuple[Any, ...]) -> list[Tensor | None]:
    """By the kernels, on the emulator."""
    grad_out, grad_state, *operands = (*args, *_DEFAULTS[len(args) - 7 :])
    *operands, needs = operands
    if operands[8] is not None:
        require_edges_in_order("gated_delta_rule", operands[8], operands[0].shape[2])
    arrays = dict(zip(OPERANDS, operands[:9], strict=True))
    found = emulation.run(
        "gated_delta_rule_backward",
        {"grad_out": grad_out, "grad_state": grad_state, **arrays},
        **options_of(operands[9:], operands[0]),
        **{f"needs_{x}": bool(need) for x, need in zip(OPERANDS[:8], needs, strict=True)},
    )
    names = ("dq", "dk", "dv", "dg", "dbeta", "dinitial", "dA_log", "ddt_bias")
    return [found.get(name) for name in names]


def _reference(args: tuple[Any, ...]) -> list[Tensor | None]:
    """By the autograd of the reference."""
    grad_out, grad_state, *operands = (*args, *_DEFAULTS[len(args) - 7 :])
    *operands, needs = operands
    tensors, edges, options = operands[:8], operands[8], operands[9:]
    # Autograd is off here, by mode and by the dispatcher's keys.
    keys = (
        torch._C._dispatch_tls_local_include_set(),
        torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU),
    )
    with torch._C._ForceDispatchKeyGuard(*keys), torch.enable_grad():
        leaves = [
            None if x is None else x.detach().requires_grad_(bool(need))
            for x, need in zip(tensors, needs, strict=True)
        ]
        q, k, v, g, beta, initial, A_log, dt_bias = cast(Any, leaves)
        out, state = gated_delta_rule_chunked(
            q,
            k,
            v,
            g,
            beta,
            initial_state=initial,
            A_log=A_log,
            dt_bias=dt_bias,
            cu_seqlens=edges,
            **options_of(options, operands[0]),
        )
        wanted = [x for x in leaves if x is not None and x.requires_grad]
        roots, grads = [out], [grad_out]
        if grad_state is not None:
            roots.append(state)
            grads.append(grad_state.to(state.dtype))
        kept = [(r, x) for r, x in zip(roots, grads, strict=True) if r.requires_grad]
        found = (
            torch.autograd.grad(
                [r for r, _ in kept], wanted, [x for _, x in kept], allow_unused=True
            )
            if kept and wanted
            else [None] * len(wanted)
        )
    by_leaf = iter(found)
    return [next(by_leaf) if x is not None and x.requires_grad else None for x in leaves]


def _flops(*args: Any, **kwargs: Any) -> int:
    """The products of the gradient, and those that make the states of the chunks again."""
    q_shape, v_shape = args[2], args[4]
    tokens, values = math.prod(q_shape[:3]), math.prod(v_shape[:3])
    keys, columns = q_shape[3], v_shape[3]
    within = 64 * (5 * columns + 4 * keys)
    operations: int = 2 * (tokens * 2 * 64 * keys + values * (within + 8 * keys * columns))
    return operations


call = gradient_call("gated_delta_rule", _gradient, vmap_rule)
register("gated_delta_rule_backward", fake=_fake, cpu=_cpu, flops=_flops, vmap=vmap_rule(_gradient))
torch.library.register_autograd(
    "thunderkittens::gated_delta_rule_backward", refuse_double_backward("gated_delta_rule")
)
