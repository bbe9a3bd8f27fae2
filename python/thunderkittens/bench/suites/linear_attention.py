"""Linear attention with decay beside fla, where it is installed, and causal attention.

The attention has the same operands: it is another problem, whose time grows with the square of the
length. fla reads the same tensors in its own layout.
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
from ..host import Differentiable
from .ssd import chunked, forward_or_gradient

CHUNK = 64

# Batch, heads, length, K, V.
SHAPES: dict[str, list[tuple[int, int, int, int, int]]] = {
    "default": [
        (16, 16, 1024, 64, 64),
        (16, 16, 1024, 128, 128),
        (16, 16, 16384, 128, 128),
        (1, 64, 4096, 128, 128),
        (1, 64, 32768, 128, 128),
    ],
    "rated": [(16, 16, 1024, 64, 64), (16, 16, 16384, 128, 128)],
    "backward": [
        (16, 16, 1024, 64, 64),
        (16, 16, 1024, 128, 128),
        (16, 16, 8192, 128, 128),
        (1, 64, 32768, 128, 128),
    ],
    "tiny": [(1, 2, 130, 64, 64)],
    "tiny_backward": [(1, 2, 130, 64, 64)],
}
SAVED = ("default", "backward")

DRAWN_CLASSES = (ANY,)
DRAWN_PEERS: tuple[str, ...] = ()  # work per time, over the best of the run
OF_MODEL = models.linear_attention


CHOICES = (Flag("gated", "a decay per token"),)


def formula(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, g: Tensor | None) -> Tensor:
    """The definition at the op's precision."""
    ones = torch.ones_like(v[..., 0], dtype=torch.float32)
    logs = decay[:, None] * ones
    out = chunked(q, k, v, ones, logs if g is None else logs + g)
    scale: float = q.shape[3] ** -0.5
    return (out * scale).to(q.dtype)


def oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    g: Tensor | None,
    grad_out: Tensor | None = None,
) -> Iterator[Expected]:
    """The first and the last head of a batch; of a gradient those of q, k and v."""
    from ...reference import linear_attention
    from ...reference._recurrent_backward import linear_attention_backward

    for b, h in ((0, 0), (v.shape[0] - 1, v.shape[1] - 1)):
        one_q, one_k, one_v = (x[b : b + 1, h : h + 1] for x in (q, k, v))
        gate = None if g is None else g[b : b + 1, h : h + 1]
        rate = decay[h : h + 1]
        if grad_out is not None:
            one_grad = grad_out[b : b + 1, h : h + 1]
            wide = (x.float() for x in (one_q, one_k, one_v))
            expected = linear_attention_backward(one_grad.float(), None, *wide, decay=rate, g=gate)
            with torch.enable_grad():
                leaves = [x.detach().requires_grad_() for x in (one_q, one_k, one_v)]
                result = formula(leaves[0], leaves[1], leaves[2], rate, gate)
            found = torch.autograd.grad(result, leaves, one_grad)
            for i, x in enumerate(found):
                yield Expected(i, (b, h), expected[i][0, 0], x[0, 0])
            continue
        exact = linear_attention(one_q.float(), one_k.float(), one_v.float(), decay=rate, g=gate)
        plain = formula(one_q, one_k, one_v, rate, gate)
        yield Expected(0, (b, h), exact[0, 0], plain[0, 0])


def make_case(
    batch: int,
    heads: int,
    length: int,
    keys: int,
    columns: int,
    gated: bool,
    dtype: torch.dtype,
    backward: bool = False,
) -> Case:
    """Linear attention on (batch, heads, length) tokens, with the decays of retention, or its
    gradient."""

    def make_inputs(device: torch.device, generator: torch.Generator) -> Inputs:
        operands = {
            name: random_normal(batch, heads, length, dim, dtype=dtype, generator=generator)
            for name, dim in (("q", keys), ("k", keys), ("v", columns), ("grad_out", columns))
            if backward or name != "grad_out"
        }
        numbers = torch.arange(heads, device=generator.device) % 16
        g = None
        if gated:
            g = -torch.rand(batch, heads, length, device=generator.device, generator=generator) / 8
        decay = torch.log1p(-(2.0 ** (-5.0 - numbers)))
        grad_out = {"grad_out": operands.pop("grad_out")} if backward else {}
        return {**operands, "decay": decay, "g": g, **grad_out}

    tokens = batch * heads * length
    parameters = parameters_of(
        f"{batch}x{heads}\nx{length}", dtype, batch=batch, heads=heads, length=length, key_dim=keys,
        value_dim=columns, gated=gated,
    )  # fmt: skip
    return Case(
        name="backward " * backward
        + f"{batch} x {heads} x {length} x {keys} x {columns}{', gated' * gated}",
        make_inputs=make_inputs,
        flops=2.0 * tokens * (CHUNK * (3 * keys + 2 * columns) + 5 * keys * columns)
        if backward
        else 2.0 * tokens * (CHUNK * (keys + columns) + 2 * keys * columns),
        bytes=dtype.itemsize * tokens * (4.0 * keys + 3.0 * columns) + 8.0 * tokens * gated
        if backward
        else dtype.itemsize * tokens * 2.0 * (keys + columns) + 4.0 * tokens * gated,
        groups=("backward" if backward else "gated" if gated else "constant decay",),
        parameters=parameters,
        oracle=oracle,
    )


cases = cases_of(SHAPES, make_case, *CHOICES, backward=True)


def drawn(draw: Draw) -> Case:
    """Tokens of any number, keys and values of any width."""
    batch, heads, length = within(
        draw,
        lambda: (draw.size(1, 32), draw.size(1, 64), draw.size(16, 32768)),
        lambda s: 1 << 14 <= s[0] * s[1] * s[2] <= 1 << 22,
    )
    keys, columns = draw.size(8, 128, 8), draw.size(8, 256, 8)
    case = make_case(batch, heads, length, keys, columns, draw.chance(0.5), draw.dtype)
    problem = draw.problem(
        batch=batch, heads=heads, groups=heads, length=length, key_dim=keys, value_dim=columns
    )
    return draw.case(case, problem=problem)


def prepare_fla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    g: Tensor | None,
    grad_out: Tensor | None = None,
) -> Callable[[], Any]:
    """fla's chunk_simple_gla, in the layout of its models."""
    module = importlib.import_module("fla.ops.simple_gla")
    operands = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    gates: dict[str, Any] = {"g_gamma": decay}
    if g is not None:
        gates = {"g": (g + decay[:, None]).transpose(1, 2).contiguous()}

    def call() -> Tensor:
        result: Tensor = module.chunk_simple_gla(*operands, **gates)[0]
        return result.transpose(1, 2)

    if grad_out is None:
        return call
    for x in operands:
        x.requires_grad_()
    with torch.enable_grad():
        out = call()

    def gradient() -> tuple[Tensor, ...]:
        found = torch.autograd.grad(out, operands, grad_out, retain_graph=True)
        return tuple(x.transpose(1, 2) for x in found)

    return gradient


def prepare_attention(
    q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor | None = None, **rest: Any
) -> Callable[[], Any]:
    """Causal attention of the same operands."""
    import thunderkittens as tk

    if grad_out is None:
        return lambda: tk.attention(q, k, v, causal=True)
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = tk.attention(*leaves, causal=True)
    return lambda: torch.autograd.grad(out, leaves, grad_out, retain_graph=True)


def implementations(device: torch.device) -> dict[str, Implementation]:
    """This package's op first, then fla where it is installed, and attention."""
    import thunderkittens as tk

    found: dict[str, Implementation] = {
        "thunderkittens": forward_or_gradient(
            lambda q, k, v, decay, g: tk.linear_attention(q, k, v, decay=decay, g=g)
        )
    }
    if device.type == "cuda":
        try:
            importlib.import_module("fla.ops.simple_gla")
            found["fla"] = Prepared(prepare_fla)
        except ImportError:
            pass
    found["attention"] = Prepared(prepare_attention, another_problem=True, apart=True)
    return found


def host_calls(device: torch.device) -> dict[str, Differentiable]:
    """Calls on 128 tokens of one head, bf16."""
    import thunderkittens as tk

    qkv = tuple(torch.randn(1, 1, 128, 64, dtype=torch.bfloat16, device=device) for _ in "qkv")
    decay = -torch.rand(1, device=device)
    call = Differentiable(lambda q, k, v: tk.linear_attention(q, k, v, decay=decay), qkv)
    return {"thunderkittens.linear_attention": call}
