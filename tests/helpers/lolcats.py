"""Operands of LoLCATS for tests, and the formula at the op's precision."""

from __future__ import annotations

import math

import torch
from torch import Tensor

import thunderkittens as tk


def operands(
    batch: int,
    heads: int,
    kv_heads: int,
    length: int,
    dim: int,
    features: int,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
) -> list[Tensor]:
    """q, k, v, q_map, k_map, alpha, beta."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device)

    tokens = [normal(batch, n, length, dim).to(dtype) for n in (heads, kv_heads, kv_heads)]
    maps = [(normal(heads, dim, features) / math.sqrt(dim)).to(dtype) for _ in "qk"]
    factors = [torch.rand(heads, device=device) / 2 + x for x in (0.5, 0.1)]
    return [*tokens, *maps, *factors]


def part(inputs: list[Tensor], begin: int, end: int | None = None) -> list[Tensor]:
    """Tokens [begin, end) of operands."""
    return [x[:, :, begin:end] for x in inputs[:3]] + inputs[3:]


def error(found: Tensor, expected: Tensor) -> float:
    """Root mean square, relative; of what is 0 nothing may be left."""
    scale = expected.double().square().mean().sqrt()
    difference = (found.double() - expected.double()).square().mean().sqrt()
    return float(difference / scale) if scale > 0 else float(difference)


def plain(
    q: Tensor, k: Tensor, v: Tensor, *rest: Tensor, initial_state: tk.LolcatsState | None = None
) -> Tensor:
    """The formula with operands of products rounded to the op's precision. The sequences of a state
    have one length."""
    q_map, k_map, alpha, beta = rest
    dtype = q.dtype
    queries = torch.arange(q.shape[2], device=q.device)
    tokens = queries
    if initial_state is not None:
        cached = tk.reference.cached_positions(initial_state.lengths)[0]
        there = cached >= 0
        queries = queries + initial_state.lengths[0]
        tokens = torch.cat([cached[there], queries])
        k = torch.cat([initial_state.keys[:, :, there], k], 2)
        v = torch.cat([initial_state.values[:, :, there], v], 2)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    distance = queries[:, None] // 64 - tokens // 64
    seen = tokens <= queries[:, None]

    def features(x: Tensor, weight: Tensor) -> Tensor:
        return tk.reference.lolcats_features(x.float(), weight.float()).to(dtype)

    features_q = features(q, q_map)
    scores = (q @ k.mT).float() / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(~seen | (distance > 1), -math.inf)
    a, b = alpha[:, None, None], beta[:, None, None]
    weights = b * (scores - scores.amax(-1, keepdim=True)).exp()
    linear = a * (features_q @ features(k, k_map).mT).float() * (distance > 1)
    out = (weights.to(dtype) @ v).float() + (linear.to(dtype) @ v).float()
    total = (weights + linear).sum(-1, keepdim=True)
    if initial_state is not None:
        out = out + a * (features_q @ initial_state.numerator.to(dtype)).float()
        total = total + a * (features_q.float() @ initial_state.denominator[..., None])
    return (out / total).to(dtype)


def exact(inputs: list[Tensor]) -> tuple[Tensor, tk.LolcatsState]:
    """The reference in float64."""
    return tk.reference.lolcats(*(x.double() for x in inputs), return_state=True)


def assert_states_match(found: tk.LolcatsState, expected: tk.LolcatsState) -> None:
    assert torch.equal(found.lengths, expected.lengths)
    there = (tk.reference.cached_positions(expected.lengths) >= 0)[:, None, :, None]
    for cache, other in ((found.keys, expected.keys), (found.values, expected.values)):
        assert torch.equal((cache * there).double(), other.double() * there)
    limit = 4e-3 if found.keys.dtype == torch.bfloat16 else 1e-3
    assert error(found.numerator, expected.numerator) < limit
    assert error(found.denominator, expected.denominator) < limit


@torch.no_grad()
def rounding_of_factors(inputs, weights_of, **options):
    """What rounding the output costs the gradients of alpha and beta, which cancel: each row adds
    the difference of the gradient times one part's sum and of its product with the output, times at
    most 1 / alpha or 1 / beta. Roundings are independent: three times the root of their squares.

    `weights_of` gives the gradient of an output.
    """
    out = tk.reference.lolcats(*(x.double() for x in inputs), **options)
    roundings = torch.finfo(inputs[0].dtype).eps / 2 * out * weights_of(out).double()
    total = 3 * roundings.square().sum((0, 2, 3)).sqrt()
    return {name: total / inputs[at].double() for name, at in (("alpha", 5), ("beta", 6))}
