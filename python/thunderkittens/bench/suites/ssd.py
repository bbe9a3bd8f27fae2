"""Mamba-2's SSD beside mamba_ssm, where it is installed, and causal attention.

The attention has as many heads of the same values, and keys of 64 elements: it is another problem,
whose time grows with the square of the length. mamba_ssm reads the same tensors in its own layout.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import models
from ..cases import Case, Expected, Implementation, Inputs, Prepared, random_normal
from ..choices import Flag, cases_of, parameters_of
from ..drawn import ANY, Draw, within
from ..host import Differentiable

CHUNK = 64

# Batch, heads, groups, length, P, N.
Shape = tuple[int, int, int, int, int, int]
SHAPES: dict[str, list[Shape]] = {
    "default": [
        (1, 80, 1, 2048, 64, 128),
        (1, 128, 1, 2048, 64, 128),
        (1, 128, 8, 8192, 64, 128),
        (1, 128, 1, 65536, 64, 128),
        (16, 80, 1, 4096, 64, 128),
    ],
    "rated": [(1, 128, 8, 8192, 64, 128), (16, 80, 1, 4096, 64, 128)],
    "backward": [
        (1, 80, 1, 2048, 64, 128),
        (1, 128, 8, 8192, 64, 128),
        (1, 128, 1, 16384, 64, 128),
        (16, 80, 1, 4096, 64, 128),
    ],
    "tiny": [(1, 4, 2, 130, 64, 128)],
    "tiny_backward": [(1, 4, 2, 130, 64, 128)],
}
SAVED = ("default", "backward")

DRAWN_CLASSES = (ANY,)
DRAWN_PEERS: tuple[str, ...] = ()  # work per time, over the best of the run
OF_MODEL = models.ssd


CHOICES = (Flag("gate", "with z"),)


def chunked(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, g: Tensor) -> Tensor:
    """Decayed linear attention of weighted values in linear time, chunk by chunk, with operands of
    products rounded to the op's precision; in float32."""
    dtype, heads, length = v.dtype, v.shape[1] // q.shape[1], v.shape[2]
    q, k = (y.repeat_interleave(heads, 1) for y in (q, k))
    pad = (0, 0, 0, -length % CHUNK)
    q, k, v = (F.pad(y, pad).unflatten(2, (-1, CHUNK)) for y in (q, k, v))
    weight, g = (F.pad(y, pad[2:]).unflatten(2, (-1, CHUNK)) for y in (weight, g))
    c = g.cumsum(3)
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=v.device).triu(1)
    factors = (c.unsqueeze(4) - c.unsqueeze(3)).masked_fill(later, -math.inf).exp()
    scores = (q @ k.mT).float() * factors * weight.unsqueeze(3)
    rest = (weight * (c[..., -1:] - c).exp()).unsqueeze(4)
    added = (k.mT @ (v.float() * rest).to(dtype)).float()
    state, before = torch.zeros_like(added[:, :, 0]), []
    for i in range(v.shape[2]):
        before.append(state)
        state = state * c[:, :, i, -1].exp()[..., None, None] + added[:, :, i]
    out = (q @ torch.stack(before, 2).to(dtype)).float() * c.exp().unsqueeze(4)
    return (out + (scores.to(dtype) @ v).float()).flatten(2, 3)[:, :, :length]


def formula(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, z: Tensor | None
) -> Tensor:
    """The definition at the op's precision."""
    out = chunked(C, B, x, dt, A[:, None] * dt) + D[:, None, None] * x.float()
    return (out if z is None else out * F.silu(z.float())).to(x.dtype)


def forward_or_gradient(function: Callable[..., Tensor], **flags: bool) -> Prepared:
    """Times a function, or where there is a gradient of its output its backward pass, of a forward
    pass that this runs. It gives the gradients of the operands that are tensors, in their order."""

    def prepare(grad_out: Tensor | None = None, **operands: Tensor | None) -> Callable[[], Any]:
        if grad_out is None:
            return lambda: function(**operands)
        with torch.enable_grad():
            leaves = {
                name: None if x is None else x.detach().requires_grad_()
                for name, x in operands.items()
            }
            out = function(**leaves)
        wanted = [x for x in leaves.values() if x is not None]
        return lambda: torch.autograd.grad(out, wanted, grad_out, retain_graph=True)

    return Prepared(prepare, **flags)


def gradient_of(function: Callable[[Tensor], Tensor], x: Tensor, grad_out: Tensor) -> Tensor:
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(function(leaf), leaf, grad_out)
    return gradient


def oracle(**inputs: Any) -> Iterator[Expected]:
    """The first and the last head of a batch; of a gradient that of x, as B and C have sums over
    heads."""
    from ...reference import ssd
    from ...reference._recurrent_backward import ssd_backward

    x, B = inputs["x"], inputs["B"]
    heads = x.shape[1] // B.shape[1]
    for b, h in ((0, 0), (x.shape[0] - 1, x.shape[1] - 1)):

        def one(name: str, b: int = b, h: int = h) -> Any:
            y = inputs[name]
            if y is None or y.dim() == 1:
                return None if y is None else y[h : h + 1]
            at = h // heads if name in "BC" else h
            return y[b : b + 1, at : at + 1]

        named = {name: one(name) for name in ("x", "dt", "A", "B", "C", "D", "z")}
        if "grad_out" in inputs:
            x, z, gradient = named["x"], named["z"], one("grad_out")
            exact = ssd_backward(
                gradient.float(),
                None,
                x.float(),
                *(named[name].float() for name in ("dt", "A", "B", "C")),
                D=named["D"],
                z=None if z is None else z.float(),
            )[0]

            def plain(x: Tensor, named: dict[str, Any] = named) -> Tensor:
                return formula(**(named | {"x": x}))

            yield Expected(0, (b, h), exact[0, 0], gradient_of(plain, x, gradient)[0, 0])
            continue
        exact = ssd(
            *(named[name].float() for name in ("x", "dt", "A", "B", "C")),
            D=named["D"],
            z=None if named["z"] is None else named["z"].float(),
        )
        yield Expected(0, (b, h), exact[0, 0], formula(**named)[0, 0])


def make_case(
    batch: int,
    heads: int,
    groups: int,
    length: int,
    columns: int,
    keys: int,
    gate: bool,
    dtype: torch.dtype,
    backward: bool = False,
) -> Case:
    """SSD on (batch, heads, length) tokens of `columns` elements, with states of `keys` each, or
    its gradient."""

    def make_inputs(device: torch.device, generator: torch.Generator) -> Inputs:
        def normal(count: int, width: int) -> Tensor:
            """As a model has it, (B, T, H, D)."""
            x = random_normal(batch, length, count, width, dtype=dtype, generator=generator)
            return x.transpose(1, 2)

        def uniform(*shape: int) -> Tensor:
            return torch.rand(shape, device=generator.device, generator=generator)

        return {
            "x": normal(heads, columns),
            "dt": torch.exp(uniform(batch, length, heads) * math.log(100)).transpose(1, 2) / 1000,
            "A": -1 - 15 * uniform(heads),
            "B": normal(groups, keys),
            "C": normal(groups, keys),
            "D": uniform(heads),
            "z": normal(heads, columns) if gate else None,
            **({"grad_out": normal(heads, columns)} if backward else {}),
        }

    tokens = batch * heads * length
    parameters = parameters_of(
        f"{batch}x{heads}\nx{length}", dtype, batch=batch, heads=heads, groups=groups,
        length=length, value_dim=columns, key_dim=keys, gate=gate,
    )  # fmt: skip
    return Case(
        name="backward " * backward
        + f"{batch} x {heads} / {groups} x {length} x {columns} x {keys}{', gate' * gate}",
        make_inputs=make_inputs,
        # Of a gradient, products of queries and keys are once per group.
        flops=2.0 * tokens * (CHUNK * 2 * columns + 5 * keys * columns)
        if backward
        else 2.0 * tokens * (CHUNK * (keys + columns) + 2 * keys * columns),
        bytes=dtype.itemsize * tokens * (2.0 + gate + (1 + gate) * backward) * columns
        + 4.0 * tokens * (1 + backward)
        + dtype.itemsize * batch * groups * length * 2.0 * keys * (1 + backward),
        groups=("backward" if backward else "gate" if gate else "no gate",),
        parameters=parameters,
        oracle=oracle,
    )


cases = cases_of(SHAPES, make_case, *CHOICES, backward=True)


def drawn(draw: Draw) -> Case:
    """Tokens of any number, states of any size."""
    groups = draw.choice((1, 1, 2, 4, 8))
    batch, heads, length = within(
        draw,
        lambda: (draw.size(1, 16), groups * draw.size(1, 128 // groups), draw.size(16, 32768)),
        lambda s: 1 << 14 <= s[0] * s[1] * s[2] <= 1 << 22,
    )
    columns, keys = draw.size(8, 256, 8), draw.size(8, 128, 8)
    gate = draw.chance(0.25)
    case = make_case(batch, heads, groups, length, columns, keys, gate, draw.dtype)
    problem = draw.problem(
        batch=batch, heads=heads, groups=groups, length=length, key_dim=keys, value_dim=columns,
        gate=gate,
    )  # fmt: skip
    return draw.case(case, problem=problem)


def prepare_attention(x: Tensor, **inputs: Any) -> Callable[[], Any]:
    """Causal attention over x, with queries and keys of its own."""
    import thunderkittens as tk

    query, key = torch.randn(2, *x.shape[:3], 64, dtype=x.dtype, device=x.device)
    if inputs.get("grad_out") is None:
        return lambda: tk.attention(query, key, x, causal=True)
    with torch.enable_grad():
        leaves = [y.detach().requires_grad_() for y in (query, key, x)]
        out = tk.attention(*leaves, causal=True)
    return lambda: torch.autograd.grad(out, leaves, inputs["grad_out"], retain_graph=True)


def mamba(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, z: Tensor | None
) -> Tensor:
    """mamba_ssm's kernels in Triton, with the layout and the chunks that its models have."""
    module = importlib.import_module("mamba_ssm.ops.triton.ssd_combined")
    operands = [y.transpose(1, 2).contiguous() for y in (x, dt, B, C)]
    gate = None if z is None else z.transpose(1, 2).contiguous()
    result: Tensor = module.mamba_chunk_scan_combined(
        operands[0], operands[1], A, *operands[2:], 256, D=D, z=gate
    )
    return result.transpose(1, 2)


def implementations(device: torch.device) -> dict[str, Implementation]:
    """This package's op first, then mamba_ssm where it is installed, and attention."""
    import thunderkittens as tk

    found: dict[str, Implementation] = {
        "thunderkittens": forward_or_gradient(
            lambda x, dt, A, B, C, D, z: tk.ssd(x, dt, A, B, C, D=D, z=z)
        )
    }
    if device.type == "cuda":
        try:
            importlib.import_module("mamba_ssm.ops.triton.ssd_combined")
            found["mamba_ssm"] = forward_or_gradient(mamba)
        except ImportError:
            pass
    found["attention"] = Prepared(prepare_attention, another_problem=True, apart=True)
    return found


def host_calls(device: torch.device) -> dict[str, Differentiable]:
    """Calls on 128 tokens of one head, bf16."""
    import thunderkittens as tk

    x, B, C = (
        torch.randn(1, 1, 128, n, dtype=torch.bfloat16, device=device) for n in (64, 128, 128)
    )
    dt, A = torch.rand(1, 1, 128, device=device), -torch.rand(1, device=device)
    return {"thunderkittens.ssd": Differentiable(lambda x, B, C: tk.ssd(x, dt, A, B, C), (x, B, C))}
