"""Schedules of attention over caches, beside a copy of the lengths: what a launch costs.

That the parts of the work are equal is checked. How a schedule lies in memory, and what an item
costs, is said in csrc/attention/decode/decode.h and schedule_sm90.cuh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .. import models
from ..cases import Case, Expected, Implementation, Inputs, Prepared
from ..choices import sizes_of
from ..drawn import ANY, Draw
from .attention_paged import mixed

HEADER, POSITION = 4, 4  # integers before the positions, and of each
BLOCK, ROWS = 64, 64  # keys of a block, query heads of an item
ITEM_COST = 3  # beside its blocks

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


def parts_of(seq_lens: Tensor, heads: int, kv_heads: int, dim: int) -> int:
    """How many parts a schedule has where the lengths are; none where no kernel makes it."""
    from ... import emulation
    from ...ops import _cache

    emulated = emulation.current()
    if not seq_lens.is_cuda and emulated is None:
        return 0
    problem = {"batch": len(seq_lens), "q_heads": heads, "kv_heads": kv_heads, "q_length": 1}
    problem |= {"head_dim": dim, "value_dim": dim}
    sms = 0 if emulated is None else emulated.sm_count
    return int(_cache.choice(problem, seq_lens.device, sms)["parts"])


def oracle(seq_lens: Tensor, sizes: tuple[int, int, int]) -> Iterator[Expected]:
    """The cost of the largest part: that of equal parts, and what up to a sixteenth fewer parts and
    a cut beside an item's blocks add. Where no kernel runs there are no parts, and all is zero."""
    (heads, kv_heads, _), parts = sizes, parts_of(seq_lens, *sizes)
    if parts == 0:
        header = torch.zeros(HEADER, dtype=torch.float64, device=seq_lens.device)
        yield Expected(0, slice(HEADER), header, header)
        return
    tiles = -(-heads // kv_heads // ROWS)  # of a key head of a sequence
    blocks = (seq_lens.cpu().long() + BLOCK - 1) // BLOCK
    cost = (blocks + ITEM_COST).repeat_interleave(tiles).repeat(kv_heads)
    begin = torch.cat((cost.new_zeros(1), cost.cumsum(0)))
    total = int(begin[-1])

    def largest(schedule: Tensor) -> Tensor:
        """NaN unless the parts are all of the work, in its order."""
        positions = schedule[HEADER : HEADER + POSITION * (parts + 1)].cpu().long()
        line, tile, block, _ = positions.view(-1, POSITION).unbind(1)
        index = line * tiles + tile
        exist = (tile >= 0) & (tile < tiles) & (index >= 0) & (index <= len(cost)) & (block >= 0)
        if not bool(exist.all()):
            return torch.full((1,), torch.nan, dtype=torch.float64)
        before = begin[index] + torch.where(block > 0, block + ITEM_COST, 0)
        each = before.diff()
        whole = int(before[0]) == 0 and int(before[-1]) == total and bool((each >= 0).all())
        most = each.max() if whole else torch.tensor(torch.nan)
        return most.double().reshape(1)

    equal = torch.full((1,), total / parts, dtype=torch.float64)
    slack = equal / 15 + ITEM_COST + 1
    yield Expected(0, largest, equal, equal + slack / 2)


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
        oracle=oracle,
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
