"""A step of Based beside a copy of the state's bytes and a compiled formula.

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

FEATURES = 153

SHAPES: dict[str, list[tuple[int, int, int]]] = {
    "default": [(64, 32, 64), (64, 32, 112), (64, 32, 128), (1, 32, 64), (8, 16, 64)],
    "rated": [(64, 32, 64)],
    "tiny": [(1, 2, 64)],
}


DRAWN_CLASSES = (ANY,)
DRAWN_PEERS = ("copy",)
OF_MODEL = models.based_decode


CHOICES = (Flag("normalize", "with the denominator"),)


def formula(
    q: Tensor, k: Tensor, v: Tensor, numerator: Tensor, denominator: Tensor, normalize: bool
) -> Tensor:
    """The definition, state in float32, the rest at the op's precision."""
    from ...reference import based_features

    keys, queries = based_features(k), based_features(q)
    numerator += keys.mT.float() * v.float()
    denominator += keys.squeeze(2).float()
    out = queries @ numerator.to(q.dtype)
    if normalize:
        out = out / (queries @ denominator.to(q.dtype).unsqueeze(3))
    return out


def oracle(
    q: Tensor, k: Tensor, v: Tensor, numerator: Tensor, denominator: Tensor, normalize: bool
) -> Iterator[Expected]:
    """The output; the state is what the timed calls make of it, here as it is given."""
    from ...reference import based_decode

    exact = based_decode(
        q.float(), k.float(), v.float(), (numerator.clone(), denominator.clone()),
        normalize=normalize,
    )  # fmt: skip
    plain = formula(q, k, v, numerator.clone(), denominator.clone(), normalize)
    yield Expected(0, ..., exact, plain)


def make_case(batch: int, heads: int, columns: int, normalize: bool, dtype: torch.dtype) -> Case:
    """A step of (batch, heads) states with values of so many columns."""

    def make_inputs(device: torch.device, generator: torch.Generator) -> Inputs:
        def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return random_normal(batch, heads, *shape, dtype=dtype, generator=generator)

        return {
            "q": normal(1, 16),
            "k": normal(1, 16),
            "v": normal(1, columns),
            "numerator": normal(FEATURES, columns, dtype=torch.float32),
            "denominator": normal(FEATURES, dtype=torch.float32).abs() + 10,
            "normalize": normalize,
        }

    lines = batch * heads
    parameters = parameters_of(
        f"{batch}x{heads}\nx{columns}", dtype, batch=batch, heads=heads, value_dim=columns,
        normalize=normalize,
    )  # fmt: skip
    return Case(
        name=f"{batch} x {heads} x {columns}{', normalized' if normalize else ''}",
        make_inputs=make_inputs,
        flops=4.0 * lines * FEATURES * columns,
        bytes=lines * (8.0 * FEATURES * (columns + 1) + dtype.itemsize * (32 + 2 * columns)),
        groups=("normalized" if normalize else "numerator",),
        parameters=parameters,
        oracle=oracle,
    )


cases = cases_of(SHAPES, make_case, *CHOICES)


def drawn(draw: Draw) -> Case:
    """States of any number, values of any width."""
    batch, heads, columns = within(
        draw,
        lambda: (draw.size(1, 256), draw.size(1, 64), draw.size(8, 256, 8)),
        lambda s: s[0] * s[1] * s[2] <= 1 << 20,
    )
    normalize = draw.chance(0.5)
    case = make_case(batch, heads, columns, normalize, draw.dtype)
    problem = draw.problem(batch=batch, heads=heads, value_dim=columns, normalize=normalize)
    return draw.case(
        case,
        problem=problem,
        peer_bytes=8.0 * batch * heads * FEATURES * (columns + 1),
    )


def prepare_step(
    q: Tensor, k: Tensor, v: Tensor, numerator: Tensor, denominator: Tensor, normalize: bool
) -> Callable[[], Tensor]:
    """One step after the other from a copy of the state; the first is the one that is checked."""
    import thunderkittens as tk

    state = tk.BasedState(numerator.clone(), denominator.clone())
    return lambda: tk.based_decode(q, k, v, state, normalize=normalize)


def prepare_formula(
    q: Tensor, k: Tensor, v: Tensor, numerator: Tensor, denominator: Tensor, normalize: bool
) -> Callable[[], Tensor]:
    """The same by the compiled formula."""
    step = torch.compile(formula, dynamic=False)
    state = (numerator.clone(), denominator.clone())
    return lambda: step(q, k, v, *state, normalize)


def prepare_copy(numerator: Tensor, denominator: Tensor, **inputs: Any) -> Callable[[], Any]:
    """Reads and writes as many bytes as the state has."""
    to = torch.empty_like(numerator), torch.empty_like(denominator)

    def copy() -> Tensor:
        to[1].copy_(denominator)
        return to[0].copy_(numerator)

    return copy


def implementations(device: torch.device) -> dict[str, Implementation]:
    """This package's op first, then the copy, and on a GPU the compiled formula."""
    found: dict[str, Implementation] = {
        "thunderkittens": Prepared(prepare_step),
        "copy": Prepared(prepare_copy, another_problem=True),
    }
    if device.type == "cuda":  # compiled at the first call
        found["torch.compile"] = Prepared(prepare_formula)
    return found


def host_calls(device: torch.device) -> dict[str, Callable[[], Any]]:
    """Calls on one head, bf16."""
    import thunderkittens as tk

    q, k, v = (torch.randn(1, 1, 1, d, dtype=torch.bfloat16, device=device) for d in (16, 16, 64))
    state = tk.BasedState(
        torch.zeros(1, 1, FEATURES, 64, device=device), torch.zeros(1, 1, FEATURES, device=device)
    )
    return {"thunderkittens.based_decode": lambda: tk.based_decode(q, k, v, state)}
