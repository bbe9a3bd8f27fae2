"""The gradient of `tk.gated_delta_rule`: operands, what is expected, and plain PyTorch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import thunderkittens as tk
from thunderkittens.reference.gated_delta_rule import DeltaRuleOperands, delta_rule_operands

BF16, FP16 = torch.bfloat16, torch.float16
NAMES = ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias")
OPTIONS = ("scale", "qk_l2norm", "beta_sigmoid", "allow_neg_eigval", "state_v_first")

Operands = dict[str, Any]


def operands(
    length: int,
    *,
    batch: int = 1,
    heads: int = 1,
    ratio: int = 1,
    dims: tuple[int, int] = (128, 128),
    dtype: torch.dtype = BF16,
    device: str = "cpu",
    edges: list[int] | None = None,
    raw: bool = False,
    state: bool = True,
    keys: str = "random",
    decay: float = 0.3,
    beta: float | None = None,
    **options: Any,
) -> Operands:
    """Arguments of the op, with the gradients that flow in as grad_out and grad_state. `keys` are
    random, equal, or correlated by 0.9; `decay` is the largest, `beta` that of all tokens."""
    keys_dim, columns = dims
    value_heads = heads * ratio
    random = torch.Generator().manual_seed(length + 7 * ratio)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    k = normal(batch, heads, length, keys_dim)
    if keys != "random":
        one = normal(batch, heads, 1, keys_dim)
        k = one.expand_as(k) if keys == "equal" else 0.9**0.5 * one + 0.1**0.5 * k
    q = normal(batch, heads, length, keys_dim)
    if not options.get("qk_l2norm"):
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    per_token = (batch, value_heads, length)
    g = normal(*per_token) if raw else -decay * torch.rand(*per_token, generator=random)
    if options.get("beta_sigmoid"):
        b = normal(*per_token)
    elif beta is not None:
        b = torch.full(per_token, beta)
    else:
        b = torch.rand(*per_token, generator=random)
        b[..., ::9] = 0.0
    sequences = batch if edges is None else len(edges) - 1
    inner = (columns, keys_dim) if options.get("state_v_first") else (keys_dim, columns)
    tokens = (batch, value_heads, length, columns)
    found: Operands = {
        "q": q.to(dtype),
        "k": k.to(dtype),
        "v": normal(*tokens).to(dtype),
        "g": g,
        "beta": b,
        "initial_state": 0.3 * normal(sequences, value_heads, *inner) if state else None,
        "A_log": normal(value_heads) if raw else None,
        "dt_bias": normal(value_heads) if raw else None,
        "cu_seqlens": None if edges is None else torch.tensor(edges, dtype=torch.int32),
        "grad_out": normal(*tokens).to(dtype),
        "grad_state": normal(sequences, value_heads, *inner) if state else None,
    }
    found = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in found.items()}
    return {**found, **options}


def split(x: Operands) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors that have a gradient, and the rest without the gradients that flow in."""
    leaves = {n: x[n] for n in NAMES if x[n] is not None}
    rest = {n: y for n, y in x.items() if n in (*OPTIONS, "cu_seqlens")}
    return leaves, rest


def gradients(x: Operands, needs: list[bool] | None = None) -> dict[str, Tensor]:
    """By the op."""
    op = torch.ops.thunderkittens.gated_delta_rule_backward
    options = [x.get(n, None if n == "scale" else False) for n in OPTIONS]
    results = op(
        x["grad_out"],
        x["grad_state"],
        *(x[n] for n in NAMES),
        x["cu_seqlens"],
        *options,
        [True] * 8 if needs is None else needs,
    )
    wanted = [True] * 8 if needs is None else needs
    found = {}
    for name, result, want in zip(NAMES, results, wanted, strict=True):
        if x[name] is None or not want:
            assert result.numel() == 0, name
        else:
            found[name] = result
    return found


def expected(x: Operands) -> dict[str, Tensor]:
    """By autograd of the reference, token by token in float64."""
    tensors, rest = split(x)
    leaves = {n: y.detach().double().requires_grad_() for n, y in tensors.items()}
    roots = tk.reference.gated_delta_rule(**leaves, **rest, return_state=True)  # type: ignore
    pairs = [(roots[0], x["grad_out"].double())]
    if x["grad_state"] is not None:
        pairs.append((roots[1], x["grad_state"].double()))
    grads = torch.autograd.grad(
        [r for r, _ in pairs], list(leaves.values()), [y for _, y in pairs], allow_unused=True
    )
    return {
        n: torch.zeros_like(y) if grad is None else grad
        for (n, y), grad in zip(leaves.items(), grads, strict=True)
    }


def slack(
    x: Operands, wanted: dict[str, Tensor], rounded: dict[str, Tensor]
) -> dict[str, Tensor | float]:
    """Where plain PyTorch may be exact by luck, because few elements or few terms count: what the
    rounding of the terms of a sum may cost."""
    eps = torch.finfo(x["q"].dtype).eps
    result: dict[str, Tensor | float] = {
        name: eps * y.square().mean().sqrt() + 1e-6 for name, y in wanted.items()
    }
    result["beta"] = result["beta"] + eps * rounded["terms of beta"].double()
    before, behind = x["initial_state"], x["grad_state"]
    if before is not None and before.numel() > 0:
        # <S, dS> is a part of the gradient of g, and all of it where a sequence has one token.
        products = before.double() * behind.double()
        result["g"] = result["g"] + eps * products.square().sum((2, 3)).sqrt().max()
    if x["A_log"] is not None:
        # The tokens of a chunk share that part.
        argument = x["g"].double() + x["dt_bias"].double().unsqueeze(1)
        terms = eps * wanted["g"].abs() + result["g"]
        result["dt_bias"] = terms.sum((0, 2))
        result["A_log"] = (terms * F.softplus(argument) / argument.sigmoid()).sum((0, 2))
    return result


def plain(x: Operands) -> dict[str, Tensor]:
    """By the same formula in plain PyTorch at the op's precision: operands of products, and what
    they give but for the states, are rounded to q's dtype; so are Y and U', whose product beta's
    gradient is. Beside the gradients, the root of the sum of that product's squared terms."""
    dtype = x["q"].dtype
    tensors, rest = split(x)
    edges, v_first = rest.pop("cu_seqlens"), rest.pop("state_v_first", False)
    state = tensors.pop("initial_state", None)
    leaves = {n: y.detach().float().requires_grad_() for n, y in tensors.items()}
    with torch.enable_grad():
        made = delta_rule_operands(**leaves, **rest)
    values = DeltaRuleOperands(*(y.detach() for y in made))
    grads = [torch.zeros_like(y) for y in (*values, values.beta)]
    bounds = [0, values.q.shape[2]] if edges is None else edges.tolist()
    of_states = []
    for n in range(len(bounds) - 1):
        rows = slice(bounds[n], bounds[n + 1])
        which = slice(None) if edges is None else slice(n, n + 1)
        before, behind = (
            None if s is None else (s[which].mT if v_first else s[which]).float()
            for s in (state, x["grad_state"])
        )
        part = DeltaRuleOperands(*(y[:, :, rows] for y in values))
        found, of_state = _sequence(part, x["grad_out"][:, :, rows].float(), before, behind, dtype)
        for to, y in zip(grads, found, strict=True):
            to[:, :, rows] = y
        of_states.append(of_state.mT if v_first else of_state)
    *grads, terms = grads
    if x["q"].shape[2] > 0:
        (terms,) = torch.autograd.grad(made.beta, leaves["beta"], terms, retain_graph=True)
    through = torch.autograd.grad(list(made), list(leaves.values()), grads, allow_unused=True)
    results = {
        n: torch.zeros_like(y) if grad is None else grad
        for (n, y), grad in zip(leaves.items(), through, strict=True)
    }
    if state is not None:
        results["initial_state"] = torch.cat(of_states)
    results = {n: y.to(x[n].dtype) for n, y in results.items()}
    return {**results, "terms of beta": terms.abs()}


def _sequence(
    x: DeltaRuleOperands,
    grad_out: Tensor,
    before: Tensor | None,
    behind: Tensor | None,
    dtype: torch.dtype,
) -> tuple[list[Tensor], Tensor]:
    """Gradients of q, k, v, g and beta, the size of beta's terms, and the gradient of the state
    before, by the formulas of csrc/recurrent/gated_delta_rule_backward/backward.h; q has the scale.
    """

    def rounded(y: Tensor) -> Tensor:
        return y.to(dtype).float()

    def product(a: Tensor, b: Tensor) -> Tensor:
        return rounded(rounded(a) @ rounded(b))

    shape = (*x.q.shape[:2], x.k.shape[3], x.v.shape[3])
    state = x.q.new_zeros(shape) if before is None else before
    chunks = []
    for q, k, v, g, beta, do in zip(*(y.split(64, 2) for y in (*x, grad_out)), strict=True):
        if q.shape[2] == 0:
            continue
        c = g.clamp(min=-200.0).cumsum(2)
        decay = (c.unsqueeze(3) - c.unsqueeze(2)).tril().exp().tril()
        b, e, rest = (y.unsqueeze(3) for y in (beta, c.exp(), (c[..., -1:] - c).exp()))
        seen = (product(k, k.mT) * decay).tril(-1)
        eye = torch.eye(q.shape[2], device=q.device)
        solved = -torch.linalg.solve_triangular(eye + seen * beta.unsqueeze(2), seen, upper=False)
        left = v - e * product(k, state)
        u = left + product(solved, b * left)
        chunks.append((q, k, v, b, e, rest, decay, solved, do, u, state))
        state = e[:, :, -1:] * state + rounded(rest * b * u).mT.matmul(rounded(k)).mT
    grad = torch.zeros_like(state) if behind is None else behind
    found = []
    for q, k, _, b, e, rest, decay, solved, do, u, state in reversed(chunks):
        scores = product(q, k.mT) * decay
        du = product(scores.mT, do) + rest * product(k, grad)
        y = du + product(solved.mT, b * du)
        dv, last = b * y, e[:, :, -1:]
        dscores = product(do, (b * u).mT) * decay
        erased = -(product(dv, (b * u).mT) * decay).tril(-1)
        dq = product(e * do, state.mT) + product(dscores, k)
        into = product(rest * b * u, grad.mT)
        minus = product(dscores.mT, q) + product(erased.mT, k)
        plus = product(erased, k) - product(e * dv, state.mT)
        ends = (q * dq + k * (plus - minus)).sum(3)
        starts = (k * into).sum(3)
        dg = ends.flip(2).cumsum(2).flip(2) + starts.cumsum(2) - starts
        dg = dg + last.squeeze(3) * (rounded(state) * rounded(grad)).sum((2, 3)).unsqueeze(2)
        of_beta = rounded(y) * rounded(u)
        found.append((dq, minus + plus + into, dv, dg, of_beta.sum(3), of_beta.norm(dim=3)))
        grad = last * grad + rounded(q).mT @ rounded(e * do) - rounded(k).mT @ rounded(e * dv)
    found.reverse()
    return [torch.cat(parts, 2) for parts in zip(*found, strict=True)] or [
        torch.zeros_like(y) for y in (*x, x.beta)
    ], grad
