"""A step of the gated delta rule beside a copy of the states' bytes and a compiled formula.

The states are nearly all that a step has to move: they are read and written once. So does the copy,
which is another problem; its time is the yardstick.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .. import models
from ..cases import Case, Expected, Implementation, Inputs, Prepared, random_normal
from ..choices import cases_of, parameters_of
from ..drawn import ANY, Draw, within

# Batch, heads, value heads, tokens, K, V, bytes of a state's element.
SHAPES: dict[str, list[tuple[int, int, int, int, int, int, int]]] = {
    "default": [
        (64, 16, 32, 1, 128, 128, 4),
        (256, 16, 32, 1, 128, 128, 4),
        (64, 16, 32, 1, 128, 128, 2),
        (64, 16, 32, 4, 128, 128, 4),
        (1, 16, 32, 1, 128, 128, 4),
    ],
    "rated": [
        (batch, heads // 2, heads, 1, 128, 128, 4)
        for batch in (1, 8, 32, 64, 128, 256)
        for heads in (8, 32, 64, 128)
    ],
    "tiny": [(1, 1, 2, 2, 64, 64, 4)],
}


DRAWN_CLASSES = (ANY,)
DRAWN_PEERS = ("copy",)
OF_MODEL = models.gated_delta_rule_decode


def formula(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """The recurrence, state in float32 or as it is given, outputs at the op's precision."""
    from ...reference import delta_rule_operands, delta_rule_tokens

    out, after = delta_rule_tokens(
        delta_rule_operands(q, k, v, g, beta, qk_l2norm=True), state.float()
    )
    state.copy_(after)
    return out.to(q.dtype)


def oracle(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> Iterator[Expected]:
    """The output; the state is what the timed calls make of it, here as it is given."""
    from ...reference import gated_delta_rule_decode

    exact = gated_delta_rule_decode(
        q.double(), k.double(), v.double(), g.double(), beta.double(), state.double(),
        qk_l2norm=True,
    )  # fmt: skip
    yield Expected(0, ..., exact, formula(q, k, v, g, beta, state.clone()))


def make_case(
    batch: int,
    heads: int,
    value_heads: int,
    length: int,
    keys: int,
    columns: int,
    state_bytes: int,
    dtype: torch.dtype,
) -> Case:
    """A step of so many tokens for each sequence."""

    def make_inputs(device: torch.device, generator: torch.Generator) -> Inputs:
        def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return random_normal(batch, *shape, dtype=dtype, generator=generator)

        state_dtype = torch.float32 if state_bytes == 4 else torch.bfloat16
        return {
            "q": normal(heads, length, keys),
            "k": normal(heads, length, keys),
            "v": normal(value_heads, length, columns),
            "g": -normal(value_heads, length, dtype=torch.float32).abs(),
            "beta": normal(value_heads, length, dtype=torch.float32).sigmoid(),
            "state": normal(value_heads, keys, columns, dtype=state_dtype),
        }

    lines = batch * value_heads
    tokens = 2 * batch * heads * length * keys + 2 * lines * length * columns
    parameters = parameters_of(
        f"{batch}x{heads}/{value_heads}\nx{length}", dtype, batch=batch, heads=heads,
        value_heads=value_heads, length=length, key_dim=keys, value_dim=columns,
        state_bytes=state_bytes,
    )  # fmt: skip
    return Case(
        name=f"{batch} x {heads}/{value_heads} x {length} x {keys}x{columns}, {state_bytes} bytes",
        make_inputs=make_inputs,
        flops=7.0 * lines * length * keys * columns,
        bytes=2.0 * state_bytes * lines * keys * columns + dtype.itemsize * tokens,
        groups=("fp32" if state_bytes == 4 else "bf16",),
        parameters=parameters,
        oracle=oracle,
    )


cases = cases_of(SHAPES, make_case)


def drawn(draw: Draw) -> Case:
    """States of any number and width."""
    batch, heads, ratio, keys, columns = within(
        draw,
        lambda: (
            draw.size(1, 256),
            draw.size(1, 32),
            draw.size(1, 8),
            draw.size(8, 128, 8),
            draw.size(8, 256, 8),
        ),
        lambda s: s[0] * s[1] * s[2] * s[3] * s[4] <= 1 << 27,
    )
    length, state_bytes = draw.size(1, 8), 4 if draw.chance(0.5) else 2
    value_heads = heads * ratio
    case = make_case(batch, heads, value_heads, length, keys, columns, state_bytes, draw.dtype)
    problem = draw.problem(
        batch=batch, heads=heads, value_heads=value_heads, length=length, key_dim=keys,
        value_dim=columns, wide_state=state_bytes == 4,
    )  # fmt: skip
    return draw.case(
        case,
        problem=problem,
        peer_bytes=2.0 * state_bytes * batch * value_heads * keys * columns,
    )


def prepare_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> Callable[[], Tensor]:
    """One step after the other from a copy of the state; the first is the one that is checked."""
    import thunderkittens as tk

    state = state.clone()
    return lambda: tk.gated_delta_rule_decode(q, k, v, g, beta, state, qk_l2norm=True)


def prepare_formula(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> Callable[[], Tensor]:
    """The same by the compiled formula."""
    step = torch.compile(formula, dynamic=False)
    state = state.clone()
    return lambda: step(q, k, v, g, beta, state)


def prepare_copy(state: Tensor, **inputs: Any) -> Callable[[], Any]:
    """Reads and writes as many bytes as the states have."""
    to = torch.empty_like(state)
    return lambda: to.copy_(state)


def implementations(device: torch.device) -> dict[str, Implementation]:
    """This package's op first, then the copy, and on a GPU the compiled formula."""
    found: dict[str, Implementation] = {
        "thunderkittens": Prepared(prepare_step),
        "copy": Prepared(prepare_copy, another_problem=True),
    }
    if device.type == "cuda":
        found["torch.compile"] = Prepared(prepare_formula)
    return found


def host_calls(device: torch.device) -> dict[str, Callable[[], Any]]:
    """A step of one sequence with one head, bf16."""
    import thunderkittens as tk

    q, k, v = torch.randn(3, 1, 1, 1, 128, dtype=torch.bfloat16, device=device)
    g, beta = -torch.rand(1, 1, 1, device=device), torch.rand(1, 1, 1, device=device)
    state = torch.zeros(1, 1, 128, 128, device=device)
    return {
        "thunderkittens.gated_delta_rule_decode": lambda: tk.gated_delta_rule_decode(
            q, k, v, g, beta, state
        )
    }
