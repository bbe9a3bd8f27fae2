"""LoLCATS beside causal attention and a compiled formula in linear time.

The attention is on the same queries, keys and values: what LoLCATS is put in place of. It is
another problem, whose time grows with the square of the length.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..cases import Case, Expected, Implementation, Inputs, Prepared, random_normal
from ..choices import dtype_name, sizes_of

WINDOW = 64

# Batch, heads, heads of keys, length, head dimension, features of one sign.
SHAPES: dict[str, list[tuple[int, int, int, int, int, int]]] = {
    "default": [
        (16, 16, 16, 1024, 128, 64),
        (16, 16, 16, 4096, 128, 64),
        (16, 16, 16, 16384, 128, 64),
        (1, 32, 32, 8192, 128, 64),
        (1, 32, 8, 8192, 128, 64),
        (16, 16, 16, 4096, 64, 32),
    ],
    "rated": [(16, 16, 16, length, 128, 64) for length in (1024, 4096, 16384)]
    + [(1, 32, 32, 8192, 128, 64)],
    "tiny": [(1, 2, 1, 130, 64, 32)],
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def options(args: argparse.Namespace) -> dict[str, Any]:
    return {}


def chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_map: Tensor,
    k_map: Tensor,
    alpha: Tensor,
    beta: Tensor,
) -> Tensor:
    """The formula at the op's precision in linear time, by blocks of 64 tokens."""
    length, dim, dtype = q.shape[2], q.shape[3], q.dtype
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))

    def features(x: Tensor, weight: Tensor) -> Tensor:
        z = (x @ weight[:, None]).float()
        return torch.cat([z.softmax(-1), (-z).softmax(-1)], -1).to(dtype)

    q, k, v = (F.pad(x, (0, 0, 0, -length % WINDOW)).unflatten(2, (-1, WINDOW)) for x in (q, k, v))
    phi_q, phi_k = features(q, q_map), features(k, k_map)

    def two_before(x: Tensor) -> Tensor:
        sums = x.cumsum(2)
        return F.pad(sums, (0, 0) * (x.dim() - 3) + (2, 0))[:, :, :-2]

    a, b = alpha[:, None, None, None], beta[:, None, None, None]
    state = (a * two_before((phi_k.mT @ v).float())).to(dtype)
    total = two_before(phi_k.float().sum(3))
    before_k, before_v = (F.pad(x, (0, 0, 0, 0, 1, 0))[:, :, :-1] for x in (k, v))
    scores = torch.cat([q @ before_k.mT, q @ k.mT], -1).float() / math.sqrt(dim)
    mask = torch.ones(WINDOW, 2 * WINDOW, dtype=torch.bool, device=q.device).tril(WINDOW)
    mask = mask.repeat(scores.shape[2], 1, 1)
    mask[0, :, :WINDOW] = False
    scores = scores.masked_fill(~mask, -math.inf)
    weights = b * (scores - scores.amax(-1, keepdim=True)).exp()
    out = (weights.to(dtype) @ torch.cat([before_v, v], 3)).float() + (phi_q @ state).float()
    denominator = weights.sum(-1) + a[..., 0] * (phi_q.float() * total.unsqueeze(3)).sum(-1)
    return (out / denominator.unsqueeze(-1)).to(dtype).flatten(2, 3)[:, :, :length]


def oracle(**operands: Tensor) -> Iterator[Expected]:
    """The first and the last heads: the whole matrix of weights fits no memory."""
    from ...reference import lolcats

    q, k = operands["q"], operands["k"]
    for b, h in ((0, 0), (q.shape[0] - 1, q.shape[1] - 1)):
        one = {name: operands[name][b, h][None, None] for name in ("q",)}
        kv = h * k.shape[1] // q.shape[1]
        one |= {name: operands[name][b, kv][None, None] for name in ("k", "v")}
        one |= {n: operands[n][h][None] for n in ("q_map", "k_map", "alpha", "beta")}
        operands_of_one: dict[str, Any] = {name: x.float() for name, x in one.items()}
        exact = lolcats(**operands_of_one)
        yield Expected(0, (b, h), exact[0, 0], chunked(**one)[0, 0])


def make_case(
    batch: int, heads: int, kv_heads: int, length: int, dim: int, features: int, dtype: torch.dtype
) -> Case:
    """LoLCATS on (batch, heads, length) tokens."""

    def make_inputs(device: torch.device, generator: torch.Generator) -> Inputs:
        def normal(*shape: int) -> Tensor:
            return random_normal(*shape, dtype=dtype, generator=generator)

        inputs = {"q": normal(batch, heads, length, dim)}
        inputs |= {name: normal(batch, kv_heads, length, dim) for name in ("k", "v")}
        inputs |= {n: normal(heads, dim, features) / math.sqrt(dim) for n in ("q_map", "k_map")}
        ones = torch.ones(heads, device=inputs["q"].device)
        return {**inputs, "alpha": 0.9 * ones, "beta": 0.1 * ones}

    tokens = batch * heads * length
    return Case(
        name=f"{batch} x {heads} x {length} x {dim}"
        + (f", {kv_heads} heads of keys" if kv_heads < heads else ""),
        make_inputs=make_inputs,
        flops=2.0 * tokens * dim * (2 * features + 4 * WINDOW + 4 * features),
        bytes=dtype.itemsize * batch * length * dim * (2.0 * heads + 2 * kv_heads),
        groups=("forward",),
        parameters={
            "label": f"{batch}x{heads}\nx{length}",
            "batch": batch,
            "heads": heads,
            "kv_heads": kv_heads,
            "length": length,
            "head_dim": dim,
            "features": features,
            "dtype": dtype_name(dtype),
        },
        oracle=oracle,
    )


def cases(shapes: str = "default", *, dtype: torch.dtype = torch.bfloat16) -> list[Case]:
    """The cases of a set of shapes. ValueError for a name there is not."""
    return [make_case(*shape, dtype) for shape in sizes_of(SHAPES, shapes)]


def prepare_attention(q: Tensor, k: Tensor, v: Tensor, **rest: Tensor) -> Callable[[], Tensor]:
    """Causal attention on the same operands."""
    import thunderkittens as tk

    return lambda: tk.attention(q, k, v, causal=True)


def implementations(device: torch.device) -> dict[str, Implementation]:
    """This package's op first, then its own attention, and on a GPU the compiled formula."""
    import thunderkittens as tk

    found: dict[str, Implementation] = {
        "thunderkittens": tk.lolcats,
        "attention": Prepared(prepare_attention, another_problem=True),
    }
    if device.type == "cuda":  # compiled at the first call
        found["torch.compile"] = torch.compile(chunked, dynamic=False)
    return found


def small_operands(device: torch.device, length: int) -> tuple[Tensor, ...]:
    """Of one head, bf16."""
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
    tokens = (torch.randn(1, 1, length, 128, **options) for _ in "qkv")
    maps = (torch.randn(1, 128, 64, **options) / 12 for _ in "qk")
    return (*tokens, *maps, torch.ones(1, device=device), torch.ones(1, device=device))


def host_calls(device: torch.device) -> dict[str, Callable[[], Any]]:
    """Calls on 128 tokens of one head, bf16."""
    import thunderkittens as tk

    operands = small_operands(device, 128)
    return {"thunderkittens.lolcats": lambda: tk.lolcats(*operands)}
