"""Operands of the gated delta rule, and its formula at the precision of the op."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import thunderkittens as tk

from .numerics import assert_accurate

BF16, FP16 = torch.bfloat16, torch.float16
CHUNK = 64

# Log decays: of almost none to of almost all, with resets, and those of Mamba's gates.
GATES = {
    "weak": lambda shape: -1e-3 * torch.rand(shape),
    "mamba": lambda shape: -16 * torch.rand(shape) * 10 ** (-3 + 2 * torch.rand(shape)),
    "strong": lambda shape: -5 * torch.rand(shape),
    "resets": lambda shape: torch.where(torch.rand(shape) < 0.05, -torch.inf, -0.02),
    "overflow": lambda shape: -90 * torch.rand(shape),
    "none": torch.zeros,
}
# Keys whose inverses a series would not find.
KEYS = ("random", "correlated", "identical")


def operands(
    shape: tuple[int, ...],
    dtype: torch.dtype = BF16,
    device: str = "cpu",
    *,
    gate: str = "mamba",
    keys: str = "random",
    most: float = 1.0,
) -> list[Tensor]:
    """q, k, v, g and beta of shape (B, H, HV, T, K, V): keys of length 1, beta up to `most`."""
    batch, heads, value_heads, length, key_dim, columns = shape
    q, k = torch.randn(2, batch, heads, length, key_dim)
    if keys != "random":
        same = torch.randn(batch, heads, 1, key_dim)
        k = same + (0.0 if keys == "identical" else 0.33) * k
    beta = torch.full((batch, value_heads, length), most)
    if keys != "identical":
        beta = beta * torch.rand(beta.shape)
    elif most > 1:
        # Roundings of equal numbers would not be independent.
        beta = beta * (0.9 + 0.1 * torch.rand(beta.shape))
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    v = torch.randn(batch, value_heads, length, columns)
    g = GATES[gate]((batch, value_heads, length))
    return [*(x.to(device, dtype) for x in (q, k, v)), g.to(device), beta.to(device)]


def some_state(
    shape: tuple[int, ...], device: str = "cpu", v_first: bool = False, dtype=torch.float32
) -> Tensor:
    """Of shape (N, HV, K, V)."""
    state = torch.randn(shape, device=device)
    return (state.mT.contiguous() if v_first else state).to(dtype)


def expected(
    *tensors: Tensor, initial_state: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """Output and final state in float64."""
    if initial_state is not None:
        initial_state = initial_state.double()
    for name in ("A_log", "dt_bias"):
        if options.get(name) is not None:
            options[name] = options[name].double()
    return tk.reference.gated_delta_rule(
        *(x.double() for x in tensors),
        **{**options, "initial_state": initial_state, "return_state": True},
    )


def plain(
    *tensors: Tensor,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state_v_first: bool = False,
    return_state: bool = True,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """The formula of chunks, its operands of products rounded to the op's precision."""
    dtype = tensors[0].dtype
    x = tk.reference.delta_rule_operands(*tensors, **options)
    if cu_seqlens is None:
        parts = [(slice(None), slice(0, x.v.shape[2]))]
        sequences = x.v.shape[0]
    else:
        edges = cu_seqlens.tolist()
        sequences = len(edges) - 1
        parts = [(slice(n, n + 1), slice(edges[n], edges[n + 1])) for n in range(sequences)]
    state = x.v.new_zeros(sequences, x.v.shape[1], x.k.shape[3], x.v.shape[3])
    if initial_state is not None:
        state = (initial_state.mT if state_v_first else initial_state).float().clone()
    out = torch.zeros(x.v.shape, dtype=dtype, device=x.v.device)
    for where, rows in parts:
        cut = tk.reference.DeltaRuleOperands(*(y[:, :, rows] for y in x))
        out[:, :, rows], state[where] = _plain_chunks(cut, state[where], dtype)
    if initial_state is not None:
        state = state.to(initial_state.dtype)
    return out, state.mT if state_v_first else state


def _plain_chunks(
    x: tk.reference.DeltaRuleOperands, state: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    def rounded(y: Tensor) -> Tensor:
        return y.to(dtype).float()

    outs = []
    for q, k, v, g, beta in zip(*(y.split(CHUNK, 2) for y in x), strict=True):
        if q.shape[2] == 0:
            continue
        within = g.clamp(min=-200.0).cumsum(2)
        decay = (within.unsqueeze(3) - within.unsqueeze(2)).tril().exp().tril()
        identity = torch.eye(q.shape[2], device=q.device)
        q, k = rounded(q), rounded(k)
        scores = beta.unsqueeze(3) * (k @ k.mT) * decay
        inverse = torch.linalg.inv((identity + scores.tril(-1)).double()).float()
        inverse = rounded(rounded(inverse) * beta.unsqueeze(2))
        before, operand = within.exp().unsqueeze(3), rounded(state)
        new = inverse @ rounded(v - before * (k @ operand))
        outs.append(before * (q @ operand) + rounded((q @ k.mT) * decay) @ rounded(new))
        last = within[:, :, -1:]
        after = (last - within).exp().unsqueeze(3)
        state = last.exp().unsqueeze(3) * state + k.mT @ rounded(after * new)
    return (torch.cat(outs, 2) if outs else torch.zeros_like(x.v)).to(dtype), state


def assert_delta_rule(results: tuple[Tensor, Tensor], *tensors: Tensor, **options: Any) -> None:
    """Output and final state are right, by the project's rule."""
    right, rounded = expected(*tensors, **options), plain(*tensors, **options)
    for result, wanted, near in zip(results, right, rounded, strict=True):
        slack = 2e-3 * wanted.abs().mean() if wanted.numel() else 0.0
        assert_accurate(result, wanted, near, slack=slack)
