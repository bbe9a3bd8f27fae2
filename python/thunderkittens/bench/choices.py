"""What suites have in common: sets of shapes by name, kinds of a case, products of weights."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Names:
    """An option --kinds, or what it is called: a part of the known names, with commas. Names of
    capital letters may be given in small ones."""

    known: Sequence[str]
    default: Sequence[str] | None = None
    name: str = "kinds"

    def add(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            f"--{self.name}",
            default=",".join(self.default or self.known),
            help=f"a comma-separated part of {','.join(self.known)} "
            f"(default: {','.join(self.default) if self.default else 'all'})",
        )

    def given(self, args: argparse.Namespace) -> tuple[str, ...]:
        text: str = getattr(args, self.name)
        return tuple((text.upper() if self.known[0].isupper() else text).split(","))

    def values(self, chosen: Sequence[str] | None) -> Sequence[str]:
        """The chosen names, of those that there are; None: the usual ones."""
        check_part(self.name.removesuffix("s"), chosen or (), self.known)
        return (self.default or self.known) if chosen is None else chosen


@dataclass(frozen=True)
class Flag:
    """An option that is on or off."""

    name: str
    help: str

    def add(self, parser: argparse.ArgumentParser) -> None:
        option = self.name.replace("_", "-")
        parser.add_argument(f"--{option}", action="store_true", help=self.help)

    def given(self, args: argparse.Namespace) -> bool:
        return bool(getattr(args, self.name))

    def values(self, chosen: bool | None) -> tuple[bool]:
        return (bool(chosen),)


def cases_of(
    sets: Mapping[str, Sequence[Any]],
    make: Callable[..., Case],
    *options: Names | Flag | tuple[Any, ...],
    backward: bool = False,
) -> Callable[..., list[Case]]:
    """The function `cases` of a suite: `make(*size, *options, dtype)` of each value of the options,
    for each size of a set of shapes by its name, or of those given.

    Options that are given are keywords of that function; a tuple is an option that always takes
    each of its values. With `backward`, `make` is also told whether the set is that of gradients.
    """

    def cases(
        shapes: str | list[Any] = "default", *, dtype: torch.dtype = torch.bfloat16, **chosen: Any
    ) -> list[Case]:
        """The cases of a set of shapes. ValueError for a name there is not."""
        values = [
            option if isinstance(option, tuple) else option.values(chosen.pop(option.name, None))
            for option in options
        ]
        if chosen:
            raise TypeError(f"cases() has no option {', '.join(chosen)}")
        told = ("backward" in shapes,) if backward else ()
        return [
            make(*size, *value, dtype, *told)
            for value in itertools.product(*values)
            for size in sizes_of(sets, shapes)
        ]

    return cases


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def parameters_of(label: str, dtype: torch.dtype, **given: Any) -> dict[str, Any]:
    """The parameters of a case: its label in charts, what is given, and the dtype's name."""
    return {"label": label, **given, "dtype": dtype_name(dtype)}


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
    parameters = parameters_of(
        f"{lead}{m} x {n}".replace(" ", "") + f"\nx{k}", dtype, **({"groups": groups} if groups else
        {}), m=m, n=n, k=k, kind=kind,
    )  # fmt: skip
    return Case(
        name=f"{kind} {lead}{m} x {n} x {k}",
        make_inputs=make_inputs,
        flops=2.0 * m * n * k * max(groups, 1),
        bytes=bytes_moved,
        operands=operands,
        groups=(kind,),
        parameters=parameters,
        oracle=oracle,
    )
