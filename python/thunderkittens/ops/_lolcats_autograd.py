"""The gradient of `tk.lolcats`: the op `lolcats_backward`, and what autograd calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import emulation
from ..reference.lolcats import LolcatsState
from ..reference.lolcats import lolcats as reference_lolcats
from ._eager_autograd import differentiable
from ._gradient_call import gradient_call, one_by_one, refuse_double_backward
from ._lolcats import NAMES, fold_rule, lolcats_shape, with_defaults
from ._registration import filled, register

OPERANDS = (*NAMES, "alpha", "beta")
RESULTS = ("dq", "dk", "dv", "dq_map", "dk_map", "grad_alpha", "grad_beta")
_gradient = torch.ops.thunderkittens.lolcats_backward.default
_differentiable = torch.ops.thunderkittens.lolcats.default
_DEFAULTS: tuple[Any, ...] = (None, None, None, None, None, (True,) * 7)


def _arguments(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*args, *_DEFAULTS[len(args) - 11 :])


def _empty_gradients(args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    grad_out, *operands = args[:8]
    out, maxima, denominators, *state, needs = args[8:]
    lolcats_shape(*operands, *state)
    shape = tuple(operands[0].shape)
    expected = (
        ("grad_out", grad_out, shape),
        ("out", out, shape),
        ("maxima", maxima, shape[:3]),
        ("denominators", denominators, shape[:3]),
    )
    for name, x, required in expected:
        if tuple(x.shape) != required:
            raise ValueError(
                f"thunderkittens::lolcats_backward: {name} has shape {tuple(x.shape)}; it must be "
                f"{required}"
            )
    return tuple(x.new_empty(x.shape if n else 0) for x, n in zip(operands, needs, strict=True))


def _fake(*args: Any) -> tuple[Tensor, ...]:
    return _empty_gradients(_arguments(args))


def _autograd_allowed() -> Any:
    """In an op's implementation, which runs below autograd: autograd works again."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for name in ("AutogradFunctionality", "ADInplaceOrView"):
        key: Any = torch._C._parse_dispatch_key(name)
        excluded = excluded.remove(key)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


def _cpu(*args: Any) -> tuple[Tensor, ...]:
    args = _arguments(args)
    results = _empty_gradients(args)
    grad_out, *operands = args[:8]
    out, maxima, denominators, *state, needs = args[8:]
    values: Any
    if emulation.active() and out.numel() > 0:
        arrays = {"grad_out": grad_out, **dict(zip(OPERANDS, operands, strict=True))}
        arrays |= {"out": out, "maxima": maxima, "denominators": denominators}
        arrays |= dict(zip(LolcatsState._fields, state, strict=True))
        wanted = {f"needs_{n}": bool(x) for n, x in zip(OPERANDS, needs, strict=True)}
        found = emulation.run("lolcats_backward", arrays, **wanted)
        values = [found.get(n) for n in RESULTS]
    else:
        initial = None if state[0] is None else LolcatsState(*state)
        with torch.enable_grad(), _autograd_allowed():
            leaves = [x.detach().float().requires_grad_() for x in operands]
            # In float32 throughout, as the kernels keep their sums.
            if initial is not None:
                initial = initial._replace(keys=initial.keys.float(), values=initial.values.float())
            again = reference_lolcats(*leaves, initial_state=initial)
            values = torch.autograd.grad(again, leaves, grad_out.float(), allow_unused=True)
    return filled(results, values)


def _flops(*args: Any, **kwargs: Any) -> int:
    """Scores and dO V^T twice each, dQ, dK and dV; of the linear part two sums and their three
    products with tokens, four feature maps, their gradients and those of the maps."""
    q_shape, _, _, map_shape = args[1:5]
    dim, features = q_shape[3], map_shape[2]
    tokens = q_shape[0] * q_shape[1] * q_shape[2]
    operations: int = 2 * tokens * dim * (7 * 128 + 10 * features + 8 * features)
    return operations


def _vmap_rule(call: Any) -> Any:
    """The rule for `torch.func.vmap`: merges the mapped dimension into the batch, over which the
    gradients of the maps and factors are sums: where these are wanted, one call after the other."""
    fold_tokens, call_each = fold_rule(call, range(4, 8)), one_by_one(call)

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        shared = any(_arguments(args)[-1][3:])
        found: tuple[Any, Any] = (call_each if shared else fold_tokens)(info, in_dims, *args)
        return found

    return rule


_any_gradient = gradient_call("lolcats", _gradient, _vmap_rule)


def _save_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *operands, ctx.return_state = with_defaults(inputs)
    ctx.mark_non_differentiable(output[5])
    ctx.save_for_backward(*operands, output[0], output[6], output[7])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_out: Tensor | None, *others: Tensor | None) -> tuple[Any, ...]:
    if ctx.return_state and any(x is not None for x in others[:4]):
        raise RuntimeError("tk.lolcats: there is no gradient through a returned state; detach it")
    needs = (*ctx.needs_input_grad, *(False,) * 7)[:7]
    nothing = (None,) * len(ctx.needs_input_grad)
    if grad_out is None or not any(needs):
        return nothing
    *operands, out, maxima, denominators = ctx.saved_tensors
    grads = _any_gradient(
        grad_out.to(out.dtype), *operands[:7], out, maxima, denominators, *operands[7:], needs
    )
    return (*(g if n else None for g, n in zip(grads, needs, strict=True)), *nothing[7:])


register("lolcats_backward", fake=_fake, cpu=_cpu, flops=_flops, vmap=_vmap_rule(_gradient))
torch.library.register_autograd(
    "thunderkittens::lolcats_backward", refuse_double_backward("lolcats")
)
recorded = differentiable(
    "lolcats",
    _differentiable,
    _save_context,
    _backward,
    lambda call: fold_rule(call, range(3, 7)),
)
