"""A decoding step of LoLCATS beside a copy of as many bytes as its state has.

The sequences' lengths are such that none completes a block of 64 tokens within the measurement but
by turns: they differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .. import models
from ..cases import Case, Expected, Implementation, Inputs, Prepared, random_normal
from ..choices import cases_of, parameters_of
from ..drawn import ANY, Draw, within
from .lolcats import small_operands

# Batch, heads, heads of keys, head dimension, features of one sign.
SHAPES: dict[str, list[tuple[int, int, int, int, int]]] = {
    "default": [(64, 32, 32, 128, 64), (64, 32, 8, 128, 64), (1, 32, 8, 128, 64)],
    "rated": [(64, 32, 32, 128, 64)],
    "tiny": [(2, 2, 1, 64, 32)],
}
STATE = ("numerator", "denominator", "keys", "values", "lengths")


DRAWN_CLASSES = (ANY,)
DRAWN_PEERS = ("copy",)
OF_MODEL = models.lolcats_decode


def split(operands: dict[str, Tensor]) -> tuple[dict[str, Tensor], tuple[Tensor, ...]]:
    rest = {name: x for name, x in operands.items() if name not in STATE}
    return rest, tuple(operands[name] for name in STATE)


def oracle(**operands: Tensor) -> Iterator[Expected]:
    """The first sequence."""
    from ...reference import LolcatsState, lolcats

    rest, state = split(operands)
    one: dict[str, Any] = {n: x[:1] if x.dim() == 4 else x for n, x in rest.items()}
    first = LolcatsState(*(x[:1] for x in state))
    wide: dict[str, Any] = {n: x.float() for n, x in one.items()}
    exact = lolcats(**wide, initial_state=first)
    yield Expected(0, (0,), exact[0], lolcats(**one, initial_state=first)[0])


def make_case(
    batch: int, heads: int, kv_heads: int, dim: int, features: int, dtype: torch.dtype
) -> Case:
    def make_inputs(device: torch.device, generator: torch.Generator) -> Inputs:
        def normal(*shape: int) -> Tensor:
            return random_normal(*shape, dtype=dtype, generator=generator)

        inputs = {"q": normal(batch, heads, 1, dim)}
        inputs |= {name: normal(batch, kv_heads, 1, dim) for name in ("k", "v")}
        inputs |= {n: normal(heads, dim, features) / math.sqrt(dim) for n in ("q_map", "k_map")}
        ones = torch.ones(heads, device=inputs["q"].device)
        wide = normal(batch, heads, 2 * features, dim + 1).float()
        lengths = 1024 + 7 * torch.arange(batch, device=ones.device, dtype=torch.int32)
        return {
            **inputs,
            "alpha": 0.9 * ones,
            "beta": 0.1 * ones,
            "numerator": wide[..., :dim].contiguous(),
            "denominator": 1 + wide[..., dim].abs(),
            "keys": normal(batch, kv_heads, 128, dim),
            "values": normal(batch, kv_heads, 128, dim),
            "lengths": lengths,
        }

    sums = 4.0 * batch * heads * 2 * features * (dim + 1)
    caches = sum(64 + (1024 + 7 * i) % 64 for i in range(batch)) * 2 * dtype.itemsize * dim
    parameters = parameters_of(
        f"{batch}x{heads}", dtype, batch=batch, heads=heads, kv_heads=kv_heads, head_dim=dim,
        features=features,
    )  # fmt: skip
    return Case(
        name=f"{batch} x {heads} x {dim}"
        + (f", {kv_heads} heads of keys" if kv_heads < heads else ""),
        make_inputs=make_inputs,
        flops=2.0 * batch * heads * dim * (3 * features + 2 * 96),
        bytes=sums + kv_heads * caches,
        groups=("decode",),
        parameters=parameters,
        oracle=oracle,
        exponentials=batch * heads * (96 + 4.0 * features),
    )


cases = cases_of(SHAPES, make_case)


def drawn(draw: Draw) -> Case:
    """States of any number; both head dimensions and numbers of features that there are."""
    batch, kv_heads, group = within(
        draw,
        lambda: (draw.size(1, 256), draw.size(1, 32), draw.choice((1, 1, 2, 4, 8))),
        lambda s: s[0] * s[1] * s[2] <= 1 << 13,
    )
    dim, features, heads = draw.choice((64, 128)), draw.choice((32, 64)), kv_heads * group
    case = make_case(batch, heads, kv_heads, dim, features, draw.dtype)
    problem = draw.problem(
        batch=batch, heads=heads, kv_heads=kv_heads, head_dim=dim, features=features
    )
    return draw.case(case, f"{case.name}, {features} features, {draw.code}", problem=problem)


def prepare(**operands: Tensor) -> Callable[[], Tensor]:
    """Steps on a state of its own, which they move on."""
    import thunderkittens as tk

    rest, state = split(operands)
    own = tk.LolcatsState(*(x.clone() for x in state))
    step: Callable[..., Tensor] = tk.lolcats_decode
    return lambda: step(**rest, state=own)


def prepare_copy(**operands: Tensor) -> Callable[[], Tensor]:
    """A copy that moves as many bytes as the sums and the caches have: half of them read."""
    bytes_moved = sum(operands[n].numel() * operands[n].element_size() for n in STATE)
    source, target = torch.empty(
        2, max(bytes_moved // 2, 16), dtype=torch.uint8, device=operands["q"].device
    )
    return lambda: target.copy_(source)


def implementations(device: torch.device) -> dict[str, Implementation]:
    return {
        "thunderkittens": Prepared(prepare),
        "copy": Prepared(prepare_copy, another_problem=True),
    }


def host_calls(device: torch.device) -> dict[str, Callable[[], Any]]:
    """Steps of one head, bf16."""
    import thunderkittens as tk

    operands = small_operands(device, 1)
    state = tk.reference.empty_state(1, 1, 1, 128, 64, device=device)
    step: Callable[..., Tensor] = tk.lolcats_decode
    return {"thunderkittens.lolcats_decode": lambda: step(*operands, state)}
