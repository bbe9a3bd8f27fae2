"""Operands of the recurrent ops, and their formula with operands rounded to the op's precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import thunderkittens as tk
from thunderkittens.reference._recurrent import LEAST_LOG_DECAY, sequences
from thunderkittens.reference.ssd import step_sizes

from .numerics import assert_accurate

CHUNK = 64

#: Heads of keys, columns of values and of keys; at the lowest intensity each of them once.
GROUPS_AND_SHAPES = [
    pytest.param(groups, dims, marks=pytest.mark.intensity(1 if i == j else 2))
    for i, groups in enumerate((1, 2, 4))
    for j, dims in enumerate(((8, 8), (72, 40), (256, 120)))
]


def normal(shape: Any, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.randn(shape, device=device).to(dtype)


def wide(x: Any) -> Any:
    """In float64, where it is a tensor of floating-point numbers."""
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def ssd_call(
    shape: tuple[int, int, int],
    dims: tuple[int, int],
    *,
    groups: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
    cu_seqlens: list[int] | None = None,
    gate: bool = True,
    skip: str = "head",
    state: bool = True,
) -> tuple[list[Tensor], dict[str, Any]]:
    """Operands and options of `tk.ssd`, with decays as Mamba-2's models have them."""
    (batch, heads, length), (columns, keys) = shape, dims
    x, z = (normal((batch, heads, length, columns), dtype, device) for _ in "xz")
    B, C = (normal((batch, groups, length, keys), dtype, device) for _ in "BC")
    dt = torch.rand(batch, heads, length, device=device) * 2 - 2
    A = -16 * torch.rand(heads, device=device)
    options: dict[str, Any] = {
        "dt_bias": normal(heads, device=device) / 4 - 2,
        "dt_softplus": True,
        "dt_limit": (0.001, 0.5),
    }
    if gate:
        options["z"] = z
    if skip:
        options["D"] = normal((heads, columns) if skip == "column" else heads, device=device)
    count = batch
    if cu_seqlens is not None:
        options["cu_seqlens"] = torch.tensor(cu_seqlens, dtype=torch.int32, device=device)
        count = len(cu_seqlens) - 1
    if state:
        options["initial_state"] = normal((count, heads, columns, keys), device=device)
    return [x, dt, A, B, C], options


def plain(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor, g: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """`decayed_attention` of values times weights, in chunks, with operands of products in q's
    dtype and sums in float32. States are (B, H, K, V)."""
    dtype, heads = q.dtype, v.shape[1] // q.shape[1]
    q, k = (x.repeat_interleave(heads, 1).float() for x in (q, k))

    def rounded(x: Tensor) -> Tensor:
        return x.to(dtype).float()

    outs, g = [v[:, :, :0].float()], g.clamp(min=LEAST_LOG_DECAY)
    for begin in range(0, v.shape[2], CHUNK):
        part = slice(begin, begin + CHUNK)
        queries, keys, values, c, w = (x[:, :, part] for x in (q, k, v.float(), g, weight))
        c = c.cumsum(2)
        later = torch.ones(c.shape[2], c.shape[2], dtype=torch.bool, device=c.device).triu(1)
        factors = (c.unsqueeze(3) - c.unsqueeze(2)).masked_fill(later, -torch.inf).exp()
        scores = (queries @ keys.mT) * factors * w.unsqueeze(2)
        before = (queries @ rounded(state)) * c.exp().unsqueeze(3)
        outs.append(rounded(scores) @ values + before)
        rest = (w * (c[:, :, -1:] - c).exp()).unsqueeze(3)
        state = state * c[:, :, -1].exp()[..., None, None] + keys.mT @ rounded(values * rest)
    return torch.cat(outs, 2), state


def plain_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    g: Tensor,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    if state is None:
        count = v.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
        state = torch.zeros(count, v.shape[1], k.shape[3], v.shape[3], device=v.device)
    if cu_seqlens is None:
        return plain(q, k, v, weight, g, state)
    out, states = torch.zeros_like(v, dtype=torch.float32), []
    for i, (begin, end) in enumerate(sequences(v.shape[2], cu_seqlens)):
        parts = [x[:, :, begin:end] for x in (q, k, v, weight, g)]
        out[:, :, begin:end], after = plain(*parts, state[i : i + 1])
        states.append(after)
    return out, torch.cat([state[:0], *states])


def assert_ssd(found: tuple[Tensor, Tensor], operands: list[Tensor], options: dict) -> None:
    """The output and the final state of `tk.ssd`, by the project's rule."""
    expected = tk.reference.ssd(
        *map(wide, operands), **{name: wide(x) for name, x in options.items()}, return_state=True
    )
    x, dt, A, B, C = operands
    steps = step_sizes(
        dt, options.get("dt_bias"), options["dt_softplus"], options["dt_limit"], torch.float32
    )
    initial, cu_seqlens = options.get("initial_state"), options.get("cu_seqlens")
    initial = None if initial is None else initial.mT
    out, state = plain_packed(C, B, x, steps, steps * A.float()[:, None], initial, cu_seqlens)
    if "D" in options:
        D = options["D"].float()
        skipped = (D[:, None, None] if D.dim() == 1 else D[:, None, :]) * x.float()
        if cu_seqlens is not None:
            skipped[:, :, : cu_seqlens[0]] = skipped[:, :, cu_seqlens[-1] :] = 0
        out = out + skipped
    if "z" in options:
        out = out * torch.nn.functional.silu(options["z"].float())
    assert_state_and_out(found, expected, (out.to(x.dtype), state.mT))


def assert_state_and_out(
    found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], close: tuple[Tensor, Tensor]
) -> None:
    """By the project's rule. A sum of few tokens may be exact by luck where they are rounded."""
    slack = torch.finfo(close[0].dtype).eps / 4
    for actual, exact, rounded in zip(found, expected, close, strict=True):
        size = exact.abs().mean() if exact.numel() > 0 else 0.0
        assert_accurate(actual, exact, rounded, slack=slack * size)


def assert_linear(found: tuple[Tensor, Tensor], operands: list[Tensor], options: dict) -> None:
    """The output and the final state of `tk.linear_attention`, by the project's rule."""
    expected = tk.reference.linear_attention(
        *map(wide, operands), **{name: wide(x) for name, x in options.items()}, return_state=True
    )
    q, k, v = operands
    g = torch.zeros(v.shape[:3], device=v.device)
    if options.get("decay") is not None:
        g = g + options["decay"].float()[:, None]
    if options.get("g") is not None:
        g = g + options["g"].float()
    initial, v_first = options.get("initial_state"), options.get("state_v_first", False)
    if initial is not None and v_first:
        initial = initial.mT
    out, state = plain_packed(q, k, v, torch.ones_like(g), g, initial, options.get("cu_seqlens"))
    scale = options.get("scale") or q.shape[3] ** -0.5
    close = ((scale * out).to(v.dtype), state.mT if v_first else state)
    assert_state_and_out(found, expected, close)
