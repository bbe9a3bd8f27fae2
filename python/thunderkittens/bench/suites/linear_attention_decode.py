"""A step of linear attention with decay beside a copy of the state's bytes.

The state is all that a step has to move: it is read and written once. So does the copy, which is
another problem; its time is the yardstick.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .. import models
from ..cases import Case, Expected, Implementation, Inputs, Prepared, random_normal
from ..choices import Flag, cases_of, parameters_of
from ..drawn import ANY, Draw, within

# Batch, heads, tokens, K, V.
SHAPES: dict[str, list[tuple[int, int, int, int, int]]] = {
    "default": [
        (1, 64, 1, 128, 128),
        (64, 32, 1, 128, 128),
        (64, 32, 4, 128, 128),
        (64, 64, 1, 64, 64),
    ],
    "rated": [(64, 32, 1, 128, 128)],
    "tiny": [(1, 2, 1, 64, 64)],
}


DRAWN_CLASSES = (ANY,)
DRAWN_PEERS = ("copy",)
OF_MODEL = models.linear_attention_decode


CHOICES = (Flag("v_first", "states of (V, K), not (K, V)"),)


def oracle(state: Tensor, **inputs: Any) -> Iterator[Expected]:
    """The output; the state is what the timed calls make of it, here as it is given."""
    from ...reference import linear_attention_decode

    named: dict[str, Any] = {
        name: x.float() if isinstance(x, Tensor) else x for name, x in inputs.items()
    }
    exact = linear_attention_decode(**named, state=state.clone())
    yield Expected(0, ..., exact, linear_attention_decode(**inputs, state=state.clone()))


def make_case(
    batch: int, heads: int, tokens: int, keys: int, columns: int, v_first: bool, dtype: torch.dtype
) -> Case:
    """A step of (batch, heads) states of (keys, columns)."""

    def make_inputs(device: torch.device, generator: torch.Generator) -> Inputs:
        def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return random_normal(batch, heads, *shape, dtype=dtype, generator=generator)

        order = (columns, keys) if v_first else (keys, columns)
        return {
            "q": normal(tokens, keys),
            "k": normal(tokens, keys),
            "v": normal(tokens, columns),
            "state": normal(*order, dtype=torch.float32),
            "decay": -torch.rand(heads, device=generator.device, generator=generator),
            "state_v_first": v_first,
        }

    lines = batch * heads
    parameters = parameters_of(
        f"{batch}x{heads}\nx{tokens}", dtype, batch=batch, heads=heads, tokens=tokens, key_dim=keys,
        value_dim=columns, v_first=v_first,
    )  # fmt: skip
    return Case(
        name=f"{batch} x {heads} x {tokens} x {keys} x {columns}{', V first' * v_first}",
        make_inputs=make_inputs,
        flops=4.0 * lines * tokens * columns * keys,
        bytes=lines * (8.0 * columns * keys + 2.0 * dtype.itemsize * tokens * (keys + columns)),
        groups=("V first" if v_first else "K first",),
        parameters=parameters,
        oracle=oracle,
    )


cases = cases_of(SHAPES, make_case, *CHOICES)


def drawn(draw: Draw) -> Case:
    """States of any number and size."""
    batch, heads, keys, columns = within(
        draw,
        lambda: (draw.size(1, 256), draw.size(1, 64), draw.size(8, 128, 8), draw.size(8, 256, 8)),
        lambda s: s[0] * s[1] * s[2] * s[3] <= 1 << 27,
    )
    tokens, v_first = draw.choice((1, 1, 4)), draw.chance(0.5)
    case = make_case(batch, heads, tokens, keys, columns, v_first, draw.dtype)
    problem = draw.problem(
        state_dtype="fp32", batch=batch, heads=heads, groups=heads, tokens=tokens, key_dim=keys,
        value_dim=columns, keys_first=not v_first,
    )  # fmt: skip
    moved = 8.0 * batch * heads * columns * keys
    return draw.case(case, problem=problem, peer_bytes=moved)


def prepare_step(state: Tensor, **inputs: Any) -> Callable[[], Tensor]:
    """One step after the other from a copy of the state; the first is the one that is checked."""
    import thunderkittens as tk

    own = state.clone()
    return lambda: tk.linear_attention_decode(**inputs, state=own)


def prepare_copy(state: Tensor, **inputs: Any) -> Callable[[], Any]:
    """Reads and writes as many bytes as the state has."""
    to = torch.empty_like(state)
    return lambda: to.copy_(state)


def implementations(device: torch.device) -> dict[str, Implementation]:
    """This package's op first, then the copy."""
    return {
        "thunderkittens": Prepared(prepare_step),
        "copy": Prepared(prepare_copy, another_problem=True),
    }


def host_calls(device: torch.device) -> dict[str, Callable[[], Any]]:
    """Calls on one head, bf16."""
    import thunderkittens as tk

    q, k, v = (torch.randn(1, 1, 1, 128, dtype=torch.bfloat16, device=device) for _ in "qkv")
    state = torch.zeros(1, 1, 128, 128, device=device)
    call = tk.linear_attention_decode
    return {"thunderkittens.linear_attention_decode": lambda: call(q, k, v, state)}
