"""Attention of packed sequences beside PyTorch's varlen_attn, and the cost of packing.

Cases are 16k tokens of width 2048. "equal" packs sequences of one length; its baseline is
`tk.attention` on the same as a batch. "mixed" lengths are uniform from 1 to the longest.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .. import models
from ..attention_work import formula
from ..cases import Case, Expected, Implementation, Inputs, NotApplicableError, Prepared
from ..cases import random_normal as draw
from ..choices import parameters_of, sizes_of
from ..drawn import ANY, Draw, within
from ..host import Differentiable

TOKENS, WIDTH = 16384, 2048
Point = tuple[tuple[int, ...], int, bool, bool]  # lengths, D, causal, backward


def mixed(longest: int, tokens: int = TOKENS) -> tuple[int, ...]:
    """Lengths from 1 to `longest`, evenly spread and shuffled, that fill the tokens."""
    generator = torch.Generator().manual_seed(longest)
    lengths: list[int] = []
    while sum(lengths) < tokens:
        length = int(torch.randint(1, longest + 1, (), generator=generator))
        lengths.append(min(length, tokens - sum(lengths)))
    return tuple(lengths)


def points(dims: tuple[int, ...]) -> list[Point]:
    return [
        (lengths, dim, causal, backward)
        for backward in (False, True)
        for dim in dims
        for causal in (False, True)
        for lengths in ((2048,) * 8, (4096,) * 4, mixed(4096))
    ]


SHAPES: dict[str, list[Point]] = {
    "default": points((64, 128)),
    "tiny": [((5, 5), 64, True, False), ((9, 1, 20), 64, False, False), ((7, 7), 64, True, True)],
}


DRAWN_FORMS = ("forward", "backward")
DRAWN_CLASSES = (ANY,)
DRAWN_PEERS = ("torch varlen",)
OF_MODEL = models.packed


def parts(inputs: Inputs) -> Iterator[tuple[slice, list[Tensor]]]:
    """Each sequence's tokens, and its q, k and v as (1, H, S, D)."""
    start = 0
    for length in inputs["lengths"]:
        tokens = slice(start, start + length)
        yield tokens, [inputs[x][tokens].transpose(0, 1).unsqueeze(0) for x in "qkv"]
        start += length


def oracle(**inputs: Any) -> Iterator[Expected]:
    """Sequence by sequence, in fp32 and at the inputs' precision."""
    causal, grad_out = inputs["causal"], inputs["grad_out"]
    for tokens, operands in parts(inputs):
        results = []
        for dtype in (torch.float32, operands[0].dtype):
            with torch.enable_grad():
                leaves = [x.to(dtype).detach().requires_grad_() for x in operands]
                out = formula(leaves, causal, {})
            if grad_out is None:
                results.append([out.detach()])
            else:
                grad = grad_out[tokens].transpose(0, 1).unsqueeze(0).to(dtype)
                results.append(list(torch.autograd.grad(out, leaves, grad)))
        for place, (exact, plain) in enumerate(zip(*results, strict=True)):
            yield Expected(place, tokens, exact[0].transpose(0, 1), plain[0].transpose(0, 1))


def make_case(point: Point, dtype: torch.dtype, heads: int = 0, kv_heads: int = 0) -> Case:
    """Self-attention of sequences of the given lengths."""
    lengths, dim, causal, backward = point
    heads = heads or (WIDTH // dim if sum(lengths) == TOKENS else 2)
    kv_heads = kv_heads or heads
    kind, mask = "backward" if backward else "forward", "causal" if causal else "full"
    equal = len(set(lengths)) == 1
    text = f"{len(lengths)} x {lengths[0]}" if equal else f"{len(lengths)} mixed"

    def make_inputs(device: torch.device, generator: torch.Generator) -> Inputs:
        q, k, v, grad = (
            draw(sum(lengths), count, dim, dtype=dtype, generator=generator)
            for count in (heads, kv_heads, kv_heads, heads)
        )
        edges = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
        return {
            "q": q,
            "k": k,
            "v": v,
            "edges": edges.to(device),
            "lengths": lengths,
            "causal": causal,
            "grad_out": grad if backward else None,
        }

    text += f", {heads} heads on {kv_heads}" if kv_heads < heads else ""
    pairs = float(sum(n * n for n in lengths)) / (2 if causal else 1)
    parameters = parameters_of(
        text, dtype, direction=kind, lengths=list(lengths), heads=heads, head_dim=dim,
        causal=causal,
    )  # fmt: skip
    return Case(
        name=f"{kind} D={dim} {mask} {text}",
        make_inputs=make_inputs,
        flops=(10.0 if backward else 4.0) * heads * dim * pairs,
        bytes=(4.0 if backward else 2.0) * dtype.itemsize * sum(lengths) * (heads + kv_heads) * dim,
        groups=(f"{kind} D={dim}", f"{kind}, {'equal' if equal else 'mixed'} lengths"),
        parameters=parameters,
        oracle=oracle,
        exponentials=heads * pairs,
    )


def cases(
    shapes: str | list[Any] = "default", *, dtype: torch.dtype = torch.bfloat16
) -> list[Case]:
    """The cases of a set of shapes, or of given points, behind which numbers of heads may stand.
    ValueError for a name there is not."""
    return [make_case(size[:4], dtype, *size[4:]) for size in sizes_of(SHAPES, shapes)]


def drawn(draw: Draw) -> Case:
    """Sequences of lengths that are log-uniform each, to 32k tokens in all."""

    def sizes() -> tuple[list[int], int, int]:
        lengths: list[int] = []
        for _ in range(draw.size(1, 64)):
            length = min(draw.size(1, 8192), 32768 - sum(lengths))
            lengths += [length] if length > 0 else []
        return lengths, draw.size(1, 32), draw.choice((64, 96, 128, 192, 256))

    lengths, heads, dim = within(
        draw, sizes, lambda s: s[1] * s[2] * sum(n * n for n in s[0]) <= 1 << 36
    )
    causal = draw.chance(0.5)
    point: Point = (tuple(lengths), dim, causal, draw.form == "backward")
    case = make_case(point, draw.dtype, heads)
    text = f"{case.name}, {sum(lengths)} tokens, {heads} heads, {draw.code}"
    return draw.case(case, text)


def work(attend: Callable[..., Tensor], another_problem: bool = False) -> Prepared:
    """`attend(q, k, v, edges, lengths, causal)` as an implementation of both directions."""

    def prepare(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        edges: Tensor,
        lengths: tuple[int, ...],
        causal: bool,
        grad_out: Tensor | None,
    ) -> Callable[[], Any]:
        if grad_out is None:
            return lambda: attend(q, k, v, edges, lengths, causal)
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = attend(*leaves, edges, lengths, causal)
        grad = grad_out.view(out.shape) if another_problem else grad_out
        return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)

    return Prepared(prepare, another_problem)


def varlen_attn() -> Callable[..., Tensor] | None:
    """PyTorch's own attention of packed sequences, where there is one."""
    try:
        function: Callable[..., Tensor] = importlib.import_module(
            "torch.nn.attention.varlen"
        ).varlen_attn
    except (ImportError, AttributeError):
        return None
    return function


def torch_varlen() -> Prepared | None:
    """That function as an implementation of both directions."""
    function = varlen_attn()
    if function is None:
        return None

    def attend(
        q: Tensor, k: Tensor, v: Tensor, edges: Tensor, lengths: tuple[int, ...], causal: bool
    ) -> Tensor:
        window = (-1, 0) if causal else (-1, -1)
        longest = max(lengths)
        return function(q, k, v, edges, edges, longest, longest, window_size=window)

    return work(attend)


def implementations(device: torch.device) -> dict[str, Implementation]:
    """This package's op first, then `tk.attention` on a batch of equal lengths, then the peers."""
    import thunderkittens as tk

    def ours(
        q: Tensor, k: Tensor, v: Tensor, edges: Tensor, lengths: tuple[int, ...], causal: bool
    ) -> Tensor:
        longest = max(lengths)
        return tk.attention_varlen(q, k, v, edges, edges, longest, longest, causal=causal)

    def dense(
        q: Tensor, k: Tensor, v: Tensor, edges: Tensor, lengths: tuple[int, ...], causal: bool
    ) -> Tensor:
        if len(set(lengths)) != 1:
            raise NotApplicableError("lengths differ")
        batch = [x.unflatten(0, (len(lengths), lengths[0])).transpose(1, 2) for x in (q, k, v)]
        return tk.attention(batch[0], batch[1], batch[2], causal=causal).transpose(1, 2)

    peers = {"torch varlen": torch_varlen()} if device.type == "cuda" else {}
    return {
        "thunderkittens": work(ours),
        "baseline": work(dense, another_problem=True),
        **{name: peer for name, peer in peers.items() if peer is not None},
    }


def host_calls(device: torch.device) -> dict[str, Differentiable]:
    """Calls on one head, 128 tokens in two sequences, D = 128, bf16."""
    import thunderkittens as tk

    qkv = tuple(torch.randn(128, 1, 128, dtype=torch.bfloat16, device=device) for _ in range(3))
    edges = torch.tensor([0, 100, 128], dtype=torch.int32, device=device)
    functions: dict[str, Callable[..., Tensor]] = {
        "thunderkittens.attention_varlen": lambda *x: tk.attention_varlen(*x)
    }
    theirs = varlen_attn()
    if device.type == "cuda" and theirs is not None:
        functions["torch.nn.attention.varlen.varlen_attn"] = theirs

    def packed(function: Callable[..., Tensor]) -> Differentiable:
        return Differentiable(lambda q, k, v: function(q, k, v, edges, edges, 100, 100), qkv)

    return {name: packed(function) for name, function in functions.items()}
