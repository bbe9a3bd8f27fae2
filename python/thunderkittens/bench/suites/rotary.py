"""The rotary embedding beside a copy of as many bytes, and beside the formula in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .. import models
from ..cases import Case, Expected, Implementation, Inputs, Prepared, random_normal
from ..choices import Names, cases_of, parameters_of
from ..drawn import Draw, within
from ..host import Differentiable

KINDS = ("halves", "interleaved")
SHAPES: dict[str, list[tuple[int, int, int, int, int]]] = {
    "default": [
        *((4, 40, 4096, 128, 128), (1, 40, 32768, 128, 128), (4, 40, 4096, 64, 64)),
        *((4, 40, 4096, 128, 32), (64, 40, 1, 128, 128)),
    ],
    "rated": [(4, 40, 4096, 128, 128), (1, 40, 32768, 128, 128)],
    "tiny": [(2, 3, 9, 32, 16)],
}

DRAWN_FORMS = KINDS
DRAWN_PEERS = ("copy",)
OF_MODEL = models.rotary


CHOICES = (Names(KINDS),)


def oracle(x: Tensor, cos: Tensor, sin: Tensor, kind: str) -> Iterator[Expected]:
    """The first sequence, in float64 and at the op's precision."""
    from ...reference import rotary

    interleaved = kind == "interleaved"
    exact = rotary(x[:1].double(), cos.double(), sin.double(), interleaved=interleaved)
    yield Expected(0, slice(1), exact, rotary(x[:1], cos, sin, interleaved=interleaved))


def make_case(
    batch: int, heads: int, length: int, dim: int, rotated: int, kind: str, dtype: torch.dtype
) -> Case:
    """Heads (batch, length, heads, dim) in memory, of which so many elements are rotated."""

    def make_inputs(device: torch.device, generator: torch.Generator) -> Inputs:
        x = random_normal(batch, length, heads, dim, dtype=dtype, generator=generator)
        angle = random_normal(length, rotated // 2, dtype=torch.float32, generator=generator)
        return {"x": x.transpose(1, 2), "cos": angle.cos(), "sin": angle.sin(), "kind": kind}

    rows = batch * heads * length
    parameters = parameters_of(
        f"{batch}x{heads}\nx{length}", dtype, batch=batch, heads=heads, length=length, dim=dim,
        rotated=rotated, kind=kind,
    )  # fmt: skip
    return Case(
        name=f"{kind} {batch} x {heads} x {length} x {dim}"
        + (f", {rotated} rotated" if rotated < dim else ""),
        make_inputs=make_inputs,
        flops=0.0,
        bytes=2.0 * rows * dim * dtype.itemsize + 4.0 * length * rotated,
        groups=(kind,),
        parameters=parameters,
        oracle=oracle,
    )


cases = cases_of(SHAPES, make_case, *CHOICES)


def drawn(draw: Draw) -> Case:
    """Heads of any number and length."""
    batch, heads, length = within(
        draw,
        lambda: (draw.size(1, 32), draw.size(1, 64), draw.size(1, 32768)),
        lambda s: 1 << 12 <= s[0] * s[1] * s[2] <= 1 << 21,
    )
    dim = draw.size(32, 256, 16 if draw.aligned else 2)
    case = make_case(batch, heads, length, dim, dim, draw.form, draw.dtype)
    return draw.case(case, peer_bytes=case.bytes)


def ours(x: Tensor, cos: Tensor, sin: Tensor, kind: str) -> Tensor:
    import thunderkittens as tk

    return tk.rotary(x, cos, sin, interleaved=kind == "interleaved")


def pytorch(x: Tensor, cos: Tensor, sin: Tensor, kind: str) -> Tensor:
    from ...reference import rotary

    return rotary(x, cos, sin, interleaved=kind == "interleaved")


def prepare_copy(x: Tensor, cos: Tensor, sin: Tensor, kind: str) -> Callable[[], Any]:
    source = torch.randn(x.numel(), device=x.device).to(x.dtype)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def implementations(device: torch.device) -> dict[str, Implementation]:
    """This package's op first, then the peers."""
    return {
        "thunderkittens": ours,
        "copy": Prepared(prepare_copy, another_problem=True),
        "PyTorch": pytorch,
    }


def host_calls(device: torch.device) -> dict[str, Differentiable]:
    """Calls on a token of 32 heads."""
    import thunderkittens as tk

    x = torch.randn(1, 32, 1, 128, dtype=torch.bfloat16, device=device)
    cos, sin = torch.randn(2, 1, 64, device=device)
    return {"thunderkittens.rotary": Differentiable(lambda x: tk.rotary(x, cos, sin), (x,))}
