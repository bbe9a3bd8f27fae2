"""Schedules of attention over caches, beside a copy of the lengths: what a launch costs."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import models
from ..cases import Case, Implementation, Inputs, Prepared
from ..choices import sizes_of
from ..drawn import ANY, Draw
from .attention_paged import mixed

SHAPES: dict[str, list[Any]] = {
    "default": [
        *(((4096,) * batch, 32, 8, 128) for batch in (1, 64, 1024)),
        (mixed(64, 16, 8192), 32, 8, 128),
        (mixed(4096, 1, 2048), 32, 8, 128),
    ],
    "tiny": [((40, 7), 4, 2, 64)],
}

DRAWN_CLASSES = (ANY,)
DRAWN_PEERS = ("copy",)
OF_MODEL = models.attention_schedule


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Schedules have no options of their own."""


def options(args: argparse.Namespace) -> dict[str, Any]:
    return {}


def make_case(lengths: tuple[int, ...], heads: int, kv_heads: int, dim: int) -> Case:
    """Of one query for each sequence."""

    def make_inputs(device: torch.device, generator: torch.Generator) -> Inputs:
        return {
            "seq_lens": torch.tensor(lengths, dtype=torch.int32, device=device),
            "sizes": (heads, kv_heads, dim),
        }

    name = f"{len(lengths)} of {min(lengths)} to {max(lengths)}"
    return Case(
        name=name,
        make_inputs=make_inputs,
        flops=0.0,
        bytes=4.0 * len(lengths),
        groups=("schedule",),
        parameters={"label": name, "lengths": len(lengths), "heads": heads},
    )


def cases(
    shapes: str | list[Any] = "default", *, dtype: torch.dtype = torch.bfloat16
) -> list[Case]:
    """The cases of a set of shapes. ValueError for a name there is not."""
    return [make_case(*shape) for shape in sizes_of(SHAPES, shapes)]


def drawn(draw: Draw) -> Case:
    """Lengths of any number and size."""
    lengths = tuple(draw.size(1, 65536) for _ in range(draw.size(1, 2048)))
    case = make_case(lengths, 32, draw.choice((1, 8, 32)), draw.choice((64, 128, 256)))
    return draw.case(case, case.name, peer_bytes=case.bytes)


def ours(seq_lens: Tensor, sizes: tuple[int, int, int]) -> Tensor:
    import thunderkittens as tk

    return tk.attention_schedule(seq_lens, *sizes)


def prepare_copy(seq_lens: Tensor, sizes: tuple[int, int, int]) -> Callable[[], Any]:
    """Of the lengths."""
    to = torch.empty_like(seq_lens)
    return lambda: to.copy_(seq_lens)


def implementations(device: torch.device) -> dict[str, Implementation]:
    """This package's op first, then the copy."""
    return {
        "thunderkittens": ours,
        "copy": Prepared(prepare_copy, another_problem=True),
    }


def host_calls(device: torch.device) -> dict[str, Callable[[], Any]]:
    """A call for two sequences."""
    import thunderkittens as tk

    lengths = torch.tensor([100, 128], dtype=torch.int32, device=device)
    return {
        "thunderkittens.attention_schedule": lambda: tk.attention_schedule(lengths, 8, 2, 128),
    }
