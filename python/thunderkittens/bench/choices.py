"""What suites have in common: sets of shapes by name, kinds of a case, products of weights."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from .cases import Case, Expected, Inputs

T = TypeVar("T")

# (N, K) of weights of published models.
WEIGHTS = (
    (2112, 7168),
    (24576, 1536),
    (7168, 16384),
    (4096, 7168),
    (7168, 2048),
    (8192, 8192),
    (28672, 8192),
    (8192, 28672),
)

# Rows of a step of decoding.
FEW_ROWS = (1, 8, 16, 32, 64)

# (M, N, K) of the suites of quantised products.
PRODUCTS: dict[str, list[tuple[int, int, int]]] = {
    "default": [(4096, n, k) for n, k in WEIGHTS],
    "rated": [(4096, n, k) for n, k in WEIGHTS],
    "skinny": [(m, n, k) for n, k in WEIGHTS for m in FEW_ROWS],
    "tiny": [(64, 64, 64), (80, 48, 272)],
}


def sizes_of(sets: Mapping[str, T], shapes: Any) -> T:
    """The sizes of a set of shapes by its name, or those given. ValueError for a name there is
    not."""
    if not isinstance(shapes, str):
        given: T = shapes
        return given
    if shapes not in sets:
        raise ValueError(f"shapes {shapes!r} is unknown; expected one of {', '.join(sets)}")
    return sets[shapes]


def check_part(what: str, chosen: Sequence[str], known: Sequence[str]) -> None:
    """ValueError for a chosen name that is not among the known ones."""
    for name in chosen:
        if name not in known:
            expected = ",".join(known)
            raise ValueError(f"{what} {name!r} is unknown; expected a part of {expected}")


def add_kinds(
    parser: argparse.ArgumentParser,
    known: Sequence[str],
    default: Sequence[str] | None = None,
    what: str = "kinds",
) -> None:
    """An option --kinds, or what it is called, whose value is names with commas."""
    parser.add_argument(
        f"--{what}",
        default=",".join(default or known),
        help=f"a comma-separated part of {','.join(known)} "
        f"(default: {','.join(default) if default else 'all'})",
    )


def kinds_option(args: argparse.Namespace, what: str = "kinds") -> dict[str, Any]:
    """That option as a keyword of `cases`."""
    return {what: tuple(getattr(args, what).split(","))}


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def product_case(
    m: int,
    n: int,
    k: int,
    kind: str,
    dtype: torch.dtype,
    *,
    groups: int = 0,
    bytes_moved: float,
    operands: str = "bf16",
    make_inputs: Callable[[torch.device, torch.Generator], Inputs],
    oracle: Callable[..., Iterator[Expected]],
) -> Case:
    """The product of (m, k) and the transpose of (n, k), of a kind; or so many of them."""
    lead = f"{groups} x " if groups else ""
    return Case(
        name=f"{kind} {lead}{m} x {n} x {k}",
        make_inputs=make_inputs,
        flops=2.0 * m * n * k * max(groups, 1),
        bytes=bytes_moved,
        operands=operands,
        groups=(kind,),
        parameters={
            "label": f"{lead}{m} x {n}".replace(" ", "") + f"\nx{k}",
            **({"groups": groups} if groups else {}),
            "m": m,
            "n": n,
            "k": k,
            "kind": kind,
            "dtype": dtype_name(dtype),
        },
        oracle=oracle,
    )
