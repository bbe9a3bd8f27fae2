"""Based beside causal attention and a compiled formula in linear time.

The attention has the same values, and queries and keys of 64 elements: what a layer would use in
place of Based. It is another problem, whose time grows with the square of the length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import models
from ..cases import Case, Expected, Implementation, Inputs, Prepared, random_normal
from ..choices import Flag, cases_of, parameters_of
from ..drawn import ANY, Draw, within
from ..host import Differentiable

CHUNK, ATTENTION_DIM = 64, 64

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


DRAWN_CLASSES = (ANY,)
DRAWN_PEERS: tuple[str, ...] = ()  # work per time, over the best of the run
OF_MODEL = models.based


CHOICES = (Flag("normalize", "with the denominator"),)


def formula(q: Tensor, k: Tensor, v: Tensor, normalize: bool) -> Tensor:
    """The definition at the op's precision."""
    scores = (q @ k.mT).float() / 4
    weights = (1 + scores + scores * scores / 2).tril()
    out = (weights.to(q.dtype) @ v).float()
    return (out / weights.sum(-1, keepdim=True) if normalize else out).to(q.dtype)


def chunked(q: Tensor, k: Tensor, v: Tensor, normalize: bool) -> Tensor:
    """The same in linear time: the formula within chunks, features and a state before them."""
    from ...reference import based_features

    length = q.shape[2]
    q, k, v = (F.pad(x, (0, 0, 0, -length % CHUNK)).unflatten(2, (-1, CHUNK)) for x in (q, k, v))
    features_q, features_k = based_features(q.float()), based_features(k.float())
    added = (features_k.to(q.dtype).mT @ v).float()
    before = (added.cumsum(2) - added).to(q.dtype)
    scores = (q @ k.mT).float() / 4
    weights = (1 + scores + scores * scores / 2).tril()
    out = (weights.to(q.dtype) @ v).float() + (features_q.to(q.dtype) @ before).float()
    if normalize:
        added = features_k.sum(3)
        before = (added.cumsum(2) - added).unsqueeze(3)
        out = out / (weights.sum(-1) + (features_q * before).sum(-1)).unsqueeze(-1)
    return out.to(q.dtype).flatten(2, 3)[:, :, :length]


def oracle(q: Tensor, k: Tensor, v: Tensor, normalize: bool) -> Iterator[Expected]:
    """The first and the last heads: the whole matrix of weights fits no memory."""
    from ...reference import based

    for at in ((0, 0), (q.shape[0] - 1, q.shape[1] - 1)):
        one_q, one_k, one_v = (x[at[0], at[1]][None, None] for x in (q, k, v))
        exact = based(one_q.float(), one_k.float(), one_v.float(), normalize=normalize)
        yield Expected(0, at, exact[0, 0], formula(one_q, one_k, one_v, normalize)[0, 0])


def make_case(
    batch: int, heads: int, length: int, columns: int, normalize: bool, dtype: torch.dtype
) -> Case:
    """Based on (batch, heads, length) tokens with values of so many columns."""

    def make_inputs(device: torch.device, generator: torch.Generator) -> Inputs:
        operands = {
            name: random_normal(batch, heads, length, dim, dtype=dtype, generator=generator)
            for name, dim in (("q", 16), ("k", 16), ("v", columns))
        }
        return {**operands, "normalize": normalize}

    tokens = batch * heads * length
    parameters = parameters_of(
        f"{batch}x{heads}\nx{length}", dtype, batch=batch, heads=heads, length=length,
        value_dim=columns, normalize=normalize,
    )  # fmt: skip
    return Case(
        name=f"{batch} x {heads} x {length} x {columns}{', normalized' if normalize else ''}",
        make_inputs=make_inputs,
        flops=2.0 * tokens * (64 * (16 + columns) + 2 * 153 * columns),
        bytes=dtype.itemsize * tokens * (32.0 + 2 * columns),
        groups=("normalized" if normalize else "numerator",),
        parameters=parameters,
        oracle=oracle,
    )


cases = cases_of(SHAPES, make_case, *CHOICES)


def drawn(draw: Draw) -> Case:
    """Tokens of any number, values of any width."""
    batch, heads, length = within(
        draw,
        lambda: (draw.size(1, 32), draw.size(1, 64), draw.size(16, 16384)),
        lambda s: 1 << 14 <= s[0] * s[1] * s[2] <= 1 << 22,
    )
    columns, normalize = draw.size(8, 256, 8), draw.chance(0.5)
    case = make_case(batch, heads, length, columns, normalize, draw.dtype)
    problem = draw.problem(
        batch=batch, heads=heads, length=length, value_dim=columns, normalize=normalize
    )
    return draw.case(case, problem=problem)


def prepare_attention(q: Tensor, k: Tensor, v: Tensor, normalize: bool) -> Callable[[], Tensor]:
    """Causal attention over v, with queries and keys of its own."""
    import thunderkittens as tk

    query, key = torch.randn(2, *q.shape[:3], ATTENTION_DIM, dtype=q.dtype, device=q.device)
    return lambda: tk.attention(query, key, v, causal=True)


def implementations(device: torch.device) -> dict[str, Implementation]:
    """This package's op first, then its own attention, and on a GPU the compiled formula."""
    import thunderkittens as tk

    found: dict[str, Implementation] = {
        "thunderkittens": lambda q, k, v, normalize: tk.based(q, k, v, normalize=normalize),
        "attention": Prepared(prepare_attention, another_problem=True, apart=True),
    }
    if device.type == "cuda":  # compiled at the first call
        found["torch.compile"] = torch.compile(chunked, dynamic=False)
    return found


def host_calls(device: torch.device) -> dict[str, Differentiable]:
    """Calls on 128 tokens of one head, bf16."""
    import thunderkittens as tk

    sizes = (16, 16, 64)
    qkv = tuple(torch.randn(1, 1, 128, d, dtype=torch.bfloat16, device=device) for d in sizes)
    return {"thunderkittens.based": Differentiable(lambda q, k, v: tk.based(q, k, v), qkv)}
