"""Gradients of the recurrent ops by their formula, with operands of products rounded to the op's
precision, and what is compared with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import thunderkittens as tk
from thunderkittens.reference._recurrent import LEAST_LOG_DECAY, sequences
from thunderkittens.reference.ssd import step_sizes

from .numerics import assert_accurate
from .recurrent import CHUNK, plain_packed, wide


def plain_gradients(
    grad_out: Tensor,
    grad_state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    g: Tensor,
    state: Tensor,
) -> list[Tensor]:
    """Gradients of q, k, v, weight, g and state of `recurrent.plain`, the scale in q."""
    dtype, shape, heads = v.dtype, q.shape, v.shape[1] // q.shape[1]

    def rounded(x: Tensor, large: bool = False) -> Tensor:
        # Half ends at 65504.
        unit = 2.0**8 if large and dtype == torch.float16 and float(x.abs().max()) > 3e4 else 1.0
        return (x / unit).to(dtype).float() * unit

    kept = g >= LEAST_LOG_DECAY
    g = g.clamp(min=LEAST_LOG_DECAY)
    q, k = (x.repeat_interleave(heads, 1).float() for x in (q, k))
    v, grad_out = v.float(), grad_out.float()
    begins, states = range(0, v.shape[2], CHUNK), []
    for begin in begins:
        states.append(state)
        keys, values, c, w = (x[:, :, begin : begin + CHUNK] for x in (k, v, g, weight))
        c = c.cumsum(2)
        rest = (w * (c[:, :, -1:] - c).exp()).unsqueeze(3)
        state = state * c[:, :, -1].exp()[..., None, None] + keys.mT @ rounded(values * rest)
    dq, dk, dv, dw, dg = (torch.zeros_like(x) for x in (q, k, v, weight, g))
    for begin, before in zip(reversed(begins), reversed(states), strict=True):
        here = (slice(None), slice(None), slice(begin, begin + CHUNK))
        queries, keys, values, w, do = q[here], k[here], v[here], weight[here], grad_out[here]
        c = g[here].cumsum(2)
        before, after = rounded(before, True), rounded(grad_state, True)
        later = torch.ones(c.shape[2], c.shape[2], dtype=torch.bool, device=c.device).triu(1)
        factors = (c.unsqueeze(3) - c.unsqueeze(2)).masked_fill(later, -torch.inf).exp()
        until, rest = c.exp().unsqueeze(3), (c[:, :, -1:] - c).exp().unsqueeze(3)
        scores = (queries @ keys.mT) * factors
        products = (do @ values.mT) * factors * w.unsqueeze(2)
        dq[here] = rounded(products) @ keys + rounded(do * until) @ before.mT
        weighted = rounded(values * rest * w.unsqueeze(3))
        dk[here] = rounded(products).mT @ queries + weighted @ after.mT
        behind = (keys @ after) * rest
        du = rounded(scores).mT @ do + behind
        dv[here], dw[here] = du * w.unsqueeze(3), (du * values).sum(3)
        pairs = (products * (scores / factors.clamp(min=1e-30))).tril(-1)
        between = pairs.sum(3) - pairs.sum(2) + ((queries @ before) * until * do).sum(3)
        carried = (behind * values).sum(3) * w
        total = c[:, :, -1].exp()
        constant = total * (before * after).sum((2, 3))
        dg[here] = between.flip(2).cumsum(2).flip(2) + carried.cumsum(2) - carried
        dg[here] += constant.unsqueeze(2)
        grad_state = total[..., None, None] * grad_state + queries.mT @ rounded(do * until)
    dq, dk = (x.unflatten(1, (shape[1], heads)).sum(2) for x in (dq, dk))
    return [dq, dk, dv, dw, dg.masked_fill(~kept, 0), grad_state]


def plain_packed_gradients(
    grad_out: Tensor,
    grad_state: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    g: Tensor,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> list[Tensor]:
    count = v.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    zeros = torch.zeros(count, v.shape[1], k.shape[3], v.shape[3], device=v.device)
    state = zeros if state is None else state
    grad_state = zeros if grad_state is None else grad_state
    if cu_seqlens is None:
        return plain_gradients(grad_out, grad_state, q, k, v, weight, g, state)
    results = [torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v, weight, g, state)]
    for i, (begin, end) in enumerate(sequences(v.shape[2], cu_seqlens)):
        do, *parts = (x[:, :, begin:end] for x in (grad_out, q, k, v, weight, g))
        found = plain_gradients(do, grad_state[i : i + 1], *parts, state[i : i + 1])
        for result, part in zip(results[:5], found[:5], strict=True):
            result[:, :, begin:end] = part
        results[5][i : i + 1] = found[5]
    return results


def gradients(
    function: Callable[..., Any],
    operands: list[Tensor],
    options: dict[str, Any],
    outside: Any,
    wanted: Any = None,
) -> dict[str, Tensor]:
    """By name, of the operands (by number) and of the options that are tensors of numbers; outside
    are the gradients of the results, or functions of these that give them."""
    leaves: dict[Any, Tensor] = dict(enumerate(operands))
    leaves.update(
        (name, x) for name, x in options.items() if isinstance(x, Tensor) and x.is_floating_point()
    )
    wanted = set(leaves) if wanted is None else set(wanted)
    leaves = {name: x.detach().requires_grad_(name in wanted) for name, x in leaves.items()}
    rest = {name: leaves.get(name, x) for name, x in options.items()}
    results = function(*(leaves[i] for i in range(len(operands))), **rest, return_state=True)
    given = [x.to(y.dtype) for x, y in zip(outside, results, strict=True)]
    names = [name for name in leaves if name in wanted]
    found = torch.autograd.grad(results, [leaves[name] for name in names], given)
    return dict(zip(names, found, strict=True))


def outside_of(operands: list[Tensor], options: dict[str, Any], values: int, v_first: bool = True):
    """Gradients of the output, which are 0 for tokens of no sequence, and of the final state."""
    v, k = operands[values], operands[3 if values == 0 else 1]
    grad_out = torch.randn_like(v)
    count, cu_seqlens = v.shape[0], options.get("cu_seqlens")
    if cu_seqlens is not None:
        count = cu_seqlens.numel() - 1
        grad_out[:, :, : cu_seqlens[0]] = grad_out[:, :, cu_seqlens[-1] :] = 0
    last = (v.shape[3], k.shape[3]) if v_first else (k.shape[3], v.shape[3])
    return grad_out, torch.randn(count, v.shape[1], *last, device=v.device)


def _check(found: Tensor, expected: Tensor, close: Tensor, terms: Tensor | None = None) -> None:
    """By the project's rule. What a sum of few roundings has may be exact by luck: `terms` are what
    a sum is over, in its last dimensions."""
    eps = torch.finfo(torch.bfloat16 if found.dtype == torch.float32 else found.dtype).eps
    slack: Any = eps / 4 * expected.abs().mean() if expected.numel() > 0 else 0.0
    if terms is not None:
        slack = 2 * eps * terms.double().square().sum(-1).sqrt().reshape(expected.shape)
    assert_accurate(found, expected, close.to(found.dtype), slack=slack)


def assert_ssd_gradients(
    found: dict[Any, Tensor], operands: list[Tensor], options: dict[str, Any], outside: Any
) -> None:
    """Of all inputs of `tk.ssd`, by the project's rule."""
    options_wide = {name: wide(x) for name, x in options.items()}
    operands_wide = [x.double() for x in operands]
    expected = gradients(tk.reference.ssd, operands_wide, options_wide, map(wide, outside))
    x, dt, A, B, C = operands
    bias, z, D = (options.get(name) for name in ("dt_bias", "z", "D"))
    softplus, limit = options["dt_softplus"], options["dt_limit"]
    steps = step_sizes(dt, bias, softplus, limit, torch.float32)
    logs, cu_seqlens = steps * A.float()[:, None], options.get("cu_seqlens")
    initial = options.get("initial_state")
    initial = None if initial is None else initial.mT
    grad_out, close = outside[0].float(), {}
    skip = torch.zeros_like(x, dtype=torch.float32)
    if D is not None:
        skip = skip + (D.float()[:, None, None] if D.dim() == 1 else D.float()[:, None, :])
    if z is not None:
        out = plain_packed(C, B, x, steps, logs, initial, cu_seqlens)[0] + skip * x.float()
        out, gate = out.to(x.dtype).float(), z.float()
        sigmoid = gate.sigmoid()
        close["z"] = grad_out * out * sigmoid * (1 + gate * (1 - sigmoid))
        grad_out = (grad_out * functional.silu(gate)).to(x.dtype).float()
    dC, dB, dv, dw, dg, state = plain_packed_gradients(
        grad_out, outside[1].mT, C, B, x, steps, logs, initial, cu_seqlens
    )
    given = dt.float() + (0.0 if bias is None else bias.float()[:, None])
    raw = functional.softplus(given) if softplus else given
    passed = ((raw >= limit[0]) & (raw <= limit[1])).float()
    passed = passed * given.sigmoid() if softplus else passed
    dd = (dw + dg * A.float()[:, None]) * passed
    sums: dict[Any, Tensor] = {2: dg * steps, "dt_bias": dd}
    if D is not None:
        product = (grad_out * x.float()).transpose(0, 1)
        sums["D"] = product.flatten(1) if D.dim() == 1 else product.flatten(1, 2).mT
    close |= {0: dv + skip * grad_out, 1: dd, 3: dB, 4: dC, "initial_state": state.mT}
    for name, terms in sums.items():
        if name != "D":
            terms = terms.transpose(0, 1).flatten(1)
            # Their parts cancel in each token already.
            parts = (dw.abs() + (dg * A.float()[:, None]).abs()) * passed
            if name == "dt_bias":
                sums[name] = parts.transpose(0, 1).flatten(1)
            else:
                sums[name] = terms
        close[name] = terms.sum(-1)
    for name, x in found.items():
        _check(x, expected[name], close[name], sums.get(name))


def assert_linear_gradients(
    found: dict[Any, Tensor], operands: list[Tensor], options: dict[str, Any], outside: Any
) -> None:
    """Of all inputs of `tk.linear_attention`, by the project's rule."""
    options_wide = {name: wide(x) for name, x in options.items()}
    expected = gradients(
        tk.reference.linear_attention,
        [x.double() for x in operands],
        options_wide,
        map(wide, outside),
    )
    q, k, v = operands
    logs = torch.zeros(v.shape[:3], device=v.device)
    for name in ("decay", "g"):
        if options.get(name) is not None:
            x = options[name].float()
            logs = logs + (x[:, None] if name == "decay" else x)
    v_first, initial = options.get("state_v_first", False), options.get("initial_state")
    grad_state = outside[1]
    if v_first:
        grad_state, initial = grad_state.mT, None if initial is None else initial.mT
    scale = options.get("scale") or q.shape[3] ** -0.5
    dq, dk, dv, _, dg, state = plain_packed_gradients(
        outside[0].float(), grad_state, scale * q.float(), k, v, torch.ones_like(logs), logs,
        initial, options.get("cu_seqlens"),
    )  # fmt: skip
    close: dict[Any, Tensor] = {0: scale * dq, 1: dk, 2: dv, "g": dg}
    close["decay"] = dg.sum((0, 2))
    close["initial_state"] = state.mT if v_first else state
    sums = {"decay": dg.transpose(0, 1).flatten(1)}
    for name, x in found.items():
        _check(x, expected[name], close[name], sums.get(name))
