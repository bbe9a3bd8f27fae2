"""Based beside causal attention (of the same values) and the compiled formula of its definition."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..cases import Case, Expected, Implementation, Inputs, random_normal

SHAPES: dict[str, list[tuple[int, int, int, int]]] = {
    "default": [
        (16, 16, 1024, 64),
        (16, 16, 4096, 64),
        (16, 16, 16384, 64),
        (1, 32, 8192, 64),
        (16, 16, 4096, 112),
    ],
    "rated": [(16, 16, length, 64) for length in (1024, 4096, 16384)],
    "tiny": [(1, 2, 130, 64)],
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--normalize", action="store_true", help="with the denominator")


def options(args: argparse.Namespace) -> dict[str, Any]:
    return {"normalize": args.normalize}


def formula(q: Tensor, k: Tensor, v: Tensor, normalize: bool) -> Tensor:
    """The definition at the op's precision."""
    scores = (q @ k.mT).float() / 4
    weights = (1 + scores + scores * scores / 2).tril()
    out = (weights.to(q.dtype) @ v).float()
    return (out / weights.sum(-1, keepdim=True) if normalize else out).to(q.dtype)


def oracle_of(normalize: bool) -> Callable[..., Iterator[Expected]]:
    """The first and the last heads: the whole matrix of weights fits no memory."""

    def oracle(q: Tensor, k: Tensor, v: Tensor) -> Iterator[Expected]:
        from ...reference import based

        for at in ((0, 0), (q.shape[0] - 1, q.shape[1] - 1)):
            one = [x[at[0], at[1]][None, None] for x in (q, k, v)]
            wide = based(*(x.float() for x in one), normalize=normalize)
            yield Expected(0, at, wide[0, 0], formula(*one, normalize)[0, 0])

    return oracle


def make_case(
    batch: int, heads: int, length: int, columns: int, normalize: bool, dtype: torch.dtype
) -> Case:
    """Based on (batch, heads, length) tokens with values of so many columns."""

    def make_inputs(device: torch.device, generator: torch.Generator) -> Inputs:
        return {
            name: random_normal(batch, heads, length, dim, dtype=dtype, generator=generator)
            for name, dim in (("q", 16), ("k", 16), ("v", columns))
        }

    tokens = batch * heads * length
    return Case(
        name=f"{batch} x {heads} x {length} x {columns}{', normalized' if normalize else ''}",
        make_inputs=make_inputs,
        flops=2.0 * tokens * (64 * (16 + columns) + 2 * 153 * columns),
        bytes=dtype.itemsize * tokens * (32.0 + 2 * columns),
        groups=("normalized" if normalize else "numerator",),
        parameters={
            "label": f"{batch}x{heads}\nx{length}",
            "batch": batch,
            "heads": heads,
            "length": length,
            "value_dim": columns,
            "normalize": normalize,
            "dtype": str(dtype).removeprefix("torch."),
        },
        oracle=oracle_of(normalize),
    )


def cases(
    shapes: str = "default", *, dtype: torch.dtype = torch.bfloat16, normalize: bool = False
) -> list[Case]:
    """The cases of a set of shapes. ValueError for a name there is not."""
    if shapes not in SHAPES:
        raise ValueError(f"shapes {shapes!r} is unknown; expected one of {', '.join(SHAPES)}")
    return [make_case(*shape, normalize, dtype) for shape in SHAPES[shapes]]


def implementations(device: torch.device) -> dict[str, Implementation]:
    """This package's op first, then its own attention, which has other weights."""
    import thunderkittens as tk

    return {"thunderkittens": lambda q, k, v: tk.based(q, k, v)}


def host_calls(device: torch.device) -> dict[str, Callable[[], Any]]:
    """Calls on 128 tokens of one head, bf16."""
    import thunderkittens as tk

    q, k, v = (torch.randn(1, 1, 128, d, dtype=torch.bfloat16, device=device) for d in (16, 16, 64))
    return {"thunderkittens.based": lambda: tk.based(q, k, v)}
