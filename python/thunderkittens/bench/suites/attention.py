"""Attention beside PyTorch's cuDNN and FlashAttention back ends, and flash-attn where installed.

The default points are those usual in the field: 16k tokens in all, so B = 16384 / N, and a model
width of 2048, so H = 2048 / D; layout (B, H, N, D). FLOPs are 4 B H N N D, half of it for a causal
mask, and of the backward pass 2.5 times as many. The other sets are the backward pass, its
deterministic order, what options cost, small batches, and decoding.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .. import models
from ..attention_work import Point, implementations, oracle, sdpa, work
from ..cases import Case
from ..choices import sizes_of
from ..drawn import Draw, within
from ..host import Differentiable

__all__ = ["SHAPES", "cases", "host_calls", "implementations", "oracle", "sdpa", "work"]

TOKENS, WIDTH = 16384, 2048
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
HEAD_DIMS = (64, 128, 256)
RATED_LENGTH = 2048  # lengths from here on make the op's headline


def point(
    batch: int, heads: int, length: int, dim: int, causal: bool, backward: bool = False
) -> Point:
    """Self-attention with q, k, v of (batch, heads, length, dim)."""
    prefix = "backward " if backward else ""
    mask = "causal" if causal else "full"
    groups = [f"{prefix}D={dim} {mask}"]
    if length >= RATED_LENGTH:
        groups.append(f"{prefix}D={dim}, N >= {RATED_LENGTH}")
    name = f"{prefix}D={dim} {mask} N={length}"
    return Point(batch, heads, length, dim, causal, backward, name=name, groups=tuple(groups))


def grid(
    head_dims: tuple[int, ...], lengths: tuple[int, ...] = LENGTHS, backward: bool = False
) -> list[Point]:
    return [
        point(TOKENS // n, WIDTH // d, n, d, causal, backward)
        for d in head_dims
        for causal in (False, True)
        for n in lengths
    ]


def deterministic(base: Point) -> Point:
    return base.against(
        options={"deterministic": True},
        name=f"deterministic {base.name}",
        groups=(f"deterministic backward D={base.dim}",),
    )


def features() -> list[Point]:
    """What options cost, at D = 128; each beside the same call without."""
    points = []
    for backward in (False, True):
        kind = "backward" if backward else "forward"
        causal = point(4, 16, 4096, 128, True, backward)
        long = point(1, 16, 16384, 128, True, backward)

        def add(name: str, base: Point, kind: str = kind, **changes: Any) -> None:
            changes |= {"name": f"{kind} {name}", "groups": (f"{kind} options",)}
            points.append(base.against(**changes))

        add("window 1024, N=16384", long, options={"window_size": (1024, 0)})
        add("softcap", causal, options={"softcap": 20.0})
        add("ALiBi", causal, options={"alibi": True})
        add("sink", causal, options={"sink": True})
        add("softcap, ALiBi, sink", causal, options={"softcap": 20.0, "alibi": True, "sink": True})
        add("32 heads on 8", point(2, 32, 4096, 128, True, backward), kv_heads=8)
        add("32 heads on 1", point(2, 32, 4096, 128, True, backward), kv_heads=1)
    for needs in ("q", "kv", "v"):
        points.append(
            point(4, 16, 4096, 128, True, True).against(
                needs=needs, name=f"backward of {needs} alone", groups=("backward in part",)
            )
        )
    return points


def wide() -> list[Point]:
    """Head dimension 192 with values of 128, 128 heads, causal; and with values of 192."""
    kinds = (("forward", False), ("backward", True))
    narrow_values = [
        Point(
            1, 128, n, 192, True, backward, value_dim=128,
            name=f"{kind} 192/128 N={n}", groups=(f"{kind} 192/128",),
        )
        for kind, backward in kinds
        for n in (2048, 4096, 8192)
    ]  # fmt: skip
    lengths = (1024, 4096, 16384)
    return narrow_values + [
        replace(p, groups=(f"{kind} D=192",))
        for kind, backward in kinds
        for p in grid((192,), lengths, backward)
    ]


def small() -> list[Point]:
    """One sequence, few heads."""
    return [
        Point(
            1, heads, n, 128, causal, backward,
            name=f"{kind} B=1 H={heads} {'causal' if causal else 'full'} N={n}",
            groups=(f"{kind} B=1",),
        )
        for kind, backward in (("forward", False), ("backward", True))
        for heads in (8, 16, 32)
        for causal in (False, True)
        for n in (512, 1024, 2048, 4096)
    ]  # fmt: skip


def decode() -> list[Point]:
    """Few query rows against 32k keys, 32 heads on 8."""
    return [
        Point(
            batch, 32, 32768, 128, True, rows=rows, kv_heads=8,
            name=f"decode B={batch}, {rows} row{'s' * (rows > 1)}", groups=(f"decode, {rows} row",),
        )
        for rows in (1, 16)
        for batch in (1, 4, 16)
    ]  # fmt: skip


SHAPES: dict[str, list[Point]] = {
    "default": grid(HEAD_DIMS),
    "backward": grid(HEAD_DIMS, backward=True),
    "deterministic": [deterministic(p) for p in grid(HEAD_DIMS, (2048, 8192), backward=True)],
    "features": features(),
    "wide": wide(),
    "small": small(),
    "decode": decode(),
    "d64": grid((64,)),
    "d128": grid((128,)),
    "d256": grid((256,)),
    "rated": grid(HEAD_DIMS, tuple(n for n in LENGTHS if n >= RATED_LENGTH)),
    "tiny": [
        point(1, 2, 64, 64, False),
        point(2, 1, 33, 64, True),
        point(1, 2, 40, 64, True, True),
        deterministic(point(1, 2, 40, 64, False, True)),
        point(1, 2, 40, 64, True).against(
            kv_heads=1,
            options={"window_size": (7, 0), "softcap": 9.0, "alibi": True, "sink": True},
            name="options",
        ),
    ],
}
# The sets that `--save` keeps a file of.
SAVED = ("default", "backward", "deterministic", "features", "wide", "small", "decode")


DRAWN_FORMS = ("forward", "backward", "decode")
DRAWN_DEFAULT = ("forward",)
DRAWN_PEERS = (
    "cuDNN",
    "torch flash",
    "FlashAttention-2",
    "flash-attn",
    "flash-attn-3",
    "flash-attn-4",
    "PyTorch",
)
OF_MODEL = models.attention


def make_case(
    batch: int, heads: int, length: int, dim: int, causal: bool, dtype: torch.dtype
) -> Case:
    """Self-attention with q, k, v of (batch, heads, length, dim)."""
    return point(batch, heads, length, dim, causal).case(dtype)


def cases(
    shapes: str | list[Any] = "default", *, dtype: torch.dtype = torch.bfloat16
) -> list[Case]:
    """The cases of a set of shapes. ValueError for a name there is not."""
    return [p.case(dtype) for p in sizes_of(SHAPES, shapes)]


def drawn(draw: Draw) -> Case:
    """Any batch, heads, lengths and head dimension; half of them causal, some with a window.

    In memory heads or tokens follow each other. In class `aligned` rows are at multiples of 16
    bytes. A decoding step has a few queries behind long keys.
    """
    decoding = draw.form == "decode"

    def sizes() -> tuple[int, int, int, int, int, int, bool]:
        kv_heads, group = draw.size(1, 32), draw.choice((1, 1, 1, 2, 4, 8))
        dim = draw.choice((64, 96, 128, 192, 256)) if draw.chance(0.5) else draw.size(8, 256, 8)
        causal = draw.chance(0.5)
        rows = draw.size(1, 32) if decoding else draw.size(16, 16384)
        keys = draw.size(256, 65536) if decoding else draw.size(16, 16384)
        if causal and not decoding:
            keys = rows if draw.chance(0.7) else max(rows, keys)
        return draw.size(1, 32), kv_heads, group, rows, keys, dim, causal

    def fits(s: tuple[int, int, int, int, int, int, bool]) -> bool:
        batch, kv_heads, group, rows, keys, dim, _ = s
        scores = batch * kv_heads * group * rows * keys
        elements = batch * kv_heads * dim * 2 * (group * rows + keys)
        return scores <= 1 << 31 and scores * dim <= 1 << 37 and elements <= 1 << 29

    batch, kv_heads, group, rows, keys, dim, causal = within(draw, sizes, fits)
    window = draw.size(16, 4096) if causal and draw.chance(0.3) else -1
    tokens_first, backward = draw.chance(0.5), draw.form == "backward"
    heads = kv_heads * group
    mask = "causal" if causal else "full"
    text = (
        f"{draw.form} B={batch} H={heads}/{kv_heads} {rows} x {keys} D={dim} {mask}"
        + (f" window {window}" if window >= 0 else "")
        + (" BSHD" if tokens_first else " BHSD")
    )
    p = Point(
        batch,
        heads,
        keys,
        dim,
        causal,
        backward,
        rows=rows,
        kv_heads=kv_heads,
        options={"window_size": (window, 0)} if window >= 0 else {},
        tokens_first=tokens_first,
        padding=draw.padding(8),
    )
    problem = draw.problem(
        batch=batch, q_heads=heads, kv_heads=kv_heads, q_length=rows, k_length=keys, head_dim=dim,
        value_dim=dim, causal=int(causal), window_left=window,
    )  # fmt: skip
    known = {} if backward else {"problem": problem}
    return draw.case(p.case(draw.dtype), f"{text}, {draw.code}", f"D {range_of(dim)}", **known)


def range_of(dim: int) -> str:
    """Head dimensions that one kernel is for."""
    return next(f"to {limit}" for limit in (64, 128, 256) if dim <= limit)


def host_calls(device: torch.device) -> dict[str, Differentiable]:
    """Calls on one head, 128 tokens, D = 128, bf16. PyTorch chooses its back end itself, except
    where one is named; `sdpa` is its function while `tk.sdpa` takes its calls."""
    import thunderkittens as tk

    shape = (1, 1, 128, 128)
    qkv = tuple(torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(3))
    sink = torch.zeros(1, device=device)

    def window_and_sink(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
        return tk.attention(q, k, v, causal=True, window_size=(64, 0), sink=sink)

    calls = {
        "thunderkittens.attention": Differentiable(lambda q, k, v: tk.attention(q, k, v), qkv),
        "thunderkittens.attention, window and sink": Differentiable(window_and_sink, (*qkv, sink)),
        "thunderkittens.sdpa": Differentiable(F.scaled_dot_product_attention, qkv, tk.sdpa),
        "scaled_dot_product_attention": Differentiable(F.scaled_dot_product_attention, qkv),
    }
    backends = {"FlashAttention": SDPBackend.FLASH_ATTENTION}
    if device.type == "cuda":
        backends["cuDNN"] = SDPBackend.CUDNN_ATTENTION
    for name, backend in backends.items():
        calls[f"scaled_dot_product_attention, {name}"] = Differentiable(
            F.scaled_dot_product_attention, qkv, partial(sdpa_kernel, backend)
        )
    return calls
