"""A step of Mamba-2's SSD beside a copy of the state's bytes, and mamba_ssm where it is installed.

The state is all that a step has to move: it is read and written once. So does the copy, which is
another problem; its time is the yardstick.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .. import models
from ..cases import Case, Expected, Implementation, Inputs, Prepared, random_normal
from ..choices import Flag, cases_of, parameters_of
from ..drawn import ANY, Draw, within

# Batch, heads, groups, tokens, P, N.
Shape = tuple[int, int, int, int, int, int]
SHAPES: dict[str, list[Shape]] = {
    "default": [
        (1, 128, 1, 1, 64, 128),
        (16, 80, 1, 1, 64, 128),
        (64, 128, 8, 1, 64, 128),
        (64, 128, 8, 4, 64, 128),
        (256, 128, 8, 1, 64, 128),
    ],
    "rated": [(64, 128, 8, 1, 64, 128)],
    "tiny": [(1, 2, 1, 1, 64, 128)],
}


DRAWN_CLASSES = (ANY,)
DRAWN_PEERS = ("copy",)
OF_MODEL = models.ssd_decode


CHOICES = (Flag("narrow", "states in the operands' dtype"),)


def oracle(state: Tensor, **inputs: Any) -> Iterator[Expected]:
    """The output; the state is what the timed calls make of it, here as it is given."""
    from ...reference import ssd_decode

    named = {name: x.float() for name, x in inputs.items()}
    exact = ssd_decode(**named, state=state.float().clone())
    yield Expected(0, ..., exact, ssd_decode(**inputs, state=state.clone()))


def make_case(
    batch: int,
    heads: int,
    groups: int,
    tokens: int,
    columns: int,
    keys: int,
    narrow: bool,
    dtype: torch.dtype,
) -> Case:
    """A step of (batch, heads) states of (columns, keys)."""

    def make_inputs(device: torch.device, generator: torch.Generator) -> Inputs:
        def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return random_normal(batch, *shape, dtype=dtype, generator=generator)

        def uniform(*shape: int) -> Tensor:
            return torch.rand(shape, device=generator.device, generator=generator)

        return {
            "x": normal(heads, tokens, columns),
            "dt": uniform(batch, heads, tokens) / 10,
            "A": -1 - 15 * uniform(heads),
            "B": normal(groups, tokens, keys),
            "C": normal(groups, tokens, keys),
            "state": normal(heads, columns, keys, dtype=dtype if narrow else torch.float32),
            "D": uniform(heads),
            "z": normal(heads, tokens, columns),
        }

    lines, size = batch * heads, dtype.itemsize
    of_state = size if narrow else 4
    parameters = parameters_of(
        f"{batch}x{heads}\nx{tokens}", dtype, batch=batch, heads=heads, groups=groups,
        tokens=tokens, value_dim=columns, key_dim=keys, narrow=narrow,
    )  # fmt: skip
    return Case(
        name=f"{batch} x {heads} x {tokens} x {columns} x {keys}{', narrow' * narrow}",
        make_inputs=make_inputs,
        flops=4.0 * lines * tokens * columns * keys,
        bytes=lines * (2.0 * of_state * columns * keys + size * tokens * 3 * columns)
        + batch * groups * tokens * 2.0 * size * keys,
        groups=("narrow" if narrow else "fp32",),
        parameters=parameters,
        oracle=oracle,
    )


cases = cases_of(SHAPES, make_case, *CHOICES)


def drawn(draw: Draw) -> Case:
    """States of any number and size."""
    groups = draw.choice((1, 2, 8))
    batch, heads, columns, keys = within(
        draw,
        lambda: (draw.size(1, 256), groups * draw.size(1, 16), draw.size(8, 256, 8),
                 draw.size(8, 128, 8)),
        lambda s: s[0] * s[1] * s[2] * s[3] <= 1 << 27,
    )  # fmt: skip
    tokens, narrow = draw.choice((1, 1, 4)), draw.chance(0.5)
    case = make_case(batch, heads, groups, tokens, columns, keys, narrow, draw.dtype)
    problem = draw.problem(
        state_dtype=draw.code if narrow else "fp32", batch=batch, heads=heads, groups=groups,
        tokens=tokens, key_dim=keys, value_dim=columns,
    )  # fmt: skip
    moved = 2.0 * (draw.dtype.itemsize if narrow else 4) * batch * heads * columns * keys
    return draw.case(case, problem=problem, peer_bytes=moved)


def prepare_step(state: Tensor, **inputs: Any) -> Callable[[], Tensor]:
    """One step after the other from a copy of the state; the first is the one that is checked."""
    import thunderkittens as tk

    own = state.clone()
    return lambda: tk.ssd_decode(**inputs, state=own)


def prepare_mamba(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor, D: Tensor, z: Tensor
) -> Callable[[], Tensor]:
    """mamba_ssm's step of one token in Triton, with the strides that its models give it."""
    module = importlib.import_module("mamba_ssm.ops.triton.selective_state_update")
    own, (columns, keys) = state.clone(), state.shape[2:]
    x, z = (y[:, :, 0].contiguous() for y in (x, z))
    B, C = (y[:, :, 0].contiguous() for y in (B, C))
    step = dt[:, :, 0].unsqueeze(2).expand(-1, -1, columns)
    rate, skip = A[:, None, None].expand(-1, columns, keys), D[:, None].expand(-1, columns)

    def call() -> Tensor:
        result: Tensor = module.selective_state_update(own, x, step, rate, B, C, skip, z=z)
        return result.unsqueeze(2)

    return call


def prepare_copy(state: Tensor, **inputs: Any) -> Callable[[], Any]:
    """Reads and writes as many bytes as the state has."""
    to = torch.empty_like(state)
    return lambda: to.copy_(state)


def implementations(device: torch.device) -> dict[str, Implementation]:
    """This package's op first, then the copy, and mamba_ssm where it is installed."""
    found: dict[str, Implementation] = {
        "thunderkittens": Prepared(prepare_step),
        "copy": Prepared(prepare_copy, another_problem=True),
    }
    if device.type == "cuda":
        try:
            importlib.import_module("mamba_ssm.ops.triton.selective_state_update")
            found["mamba_ssm"] = Prepared(prepare_mamba)
        except ImportError:
            pass
    return found


def host_calls(device: torch.device) -> dict[str, Callable[[], Any]]:
    """Calls on one head, bf16."""
    import thunderkittens as tk

    x, B, C = (torch.randn(1, 1, 1, n, dtype=torch.bfloat16, device=device) for n in (64, 128, 128))
    dt, A = torch.rand(1, 1, 1, device=device), -torch.rand(1, device=device)
    state = torch.zeros(1, 1, 64, 128, device=device)
    return {"thunderkittens.ssd_decode": lambda: tk.ssd_decode(x, dt, A, B, C, state)}
