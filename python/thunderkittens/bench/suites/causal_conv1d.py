"""Causal convolutions beside PyTorch's, the compiled formula, causal-conv1d, and a copy.

Every input is read once and every output written once; so does the copy, which is another problem:
its time is the yardstick. causal-conv1d is a peer where it is installed.
"""

from __future__ import annotations

import importlib.util
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

WIDTH = 4
# Batch, channels, tokens, and the dimension that is adjacent in memory.
SHAPES: dict[str, list[tuple[int, int, int, str]]] = {
    "default": [
        (batch, channels, length, layout)
        for batch, channels, length in (
            (1, 8192, 8192),
            (1, 2048, 32768),
            (16, 2560, 2048),
            (8, 10240, 4096),
            (1, 8192, 512),
        )
        for layout in ("channels", "tokens")
    ],
    "rated": [(1, 8192, 8192, "channels"), (1, 8192, 8192, "tokens")],
    "tiny": [(1, 16, 40, "channels"), (1, 16, 40, "tokens")],
}

DRAWN_CLASSES = (ANY,)
DRAWN_PEERS = ("copy",)
OF_MODEL = models.causal_conv1d


CHOICES = (Flag("backward", "the gradients"),)


def formula(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """By PyTorch's own convolution, at the op's precision."""
    out = F.conv1d(x, weight.unsqueeze(1), bias, padding=WIDTH - 1, groups=x.shape[1])
    return F.silu(out[..., : x.shape[2]])


def oracle(
    x: Tensor, weight: Tensor, bias: Tensor, grad_out: Tensor, backward: bool
) -> Iterator[Expected]:
    """The output, or the gradient of x, of some channels."""
    from ...reference import causal_conv1d, causal_conv1d_backward

    for part in (slice(0, 8), slice(x.shape[1] - 8, None)):
        some, taps, offsets = x[:, part], weight[part], bias[part]
        wide = some.float(), taps.float(), offsets.float()
        if backward:
            grad = grad_out[:, part]
            exact = causal_conv1d_backward(grad.float(), None, *wide, activation="silu")[0]
            with torch.enable_grad():
                leaf = some.detach().requires_grad_()
                (plain,) = torch.autograd.grad(formula(leaf, taps, offsets), leaf, grad)
        else:
            exact = causal_conv1d(*wide, activation="silu")
            plain = formula(some, taps, offsets)
        yield Expected(0, (slice(None), part), exact, plain)


def make_case(
    batch: int, channels: int, length: int, layout: str, backward: bool, dtype: torch.dtype
) -> Case:
    """With four taps, a bias and SiLU."""

    def make_inputs(device: torch.device, generator: torch.Generator) -> Inputs:
        def normal(*shape: int) -> Tensor:
            return random_normal(*shape, dtype=dtype, generator=generator)

        def operand() -> Tensor:
            if layout == "tokens":
                return normal(batch, channels, length)
            return normal(batch, length, channels).transpose(1, 2)

        return {
            "x": operand(),
            "weight": normal(channels, WIDTH),
            "bias": normal(channels),
            "grad_out": operand() if backward else None,
            "backward": backward,
        }

    elements = batch * channels * length
    parameters = parameters_of(
        f"{batch}x{channels}\nx{length}", dtype, batch=batch, channels=channels, length=length,
        layout=layout, backward=backward,
    )  # fmt: skip
    return Case(
        name=f"{batch} x {channels} x {length}, {layout}{', backward' * backward}",
        make_inputs=make_inputs,
        flops=2.0 * WIDTH * elements * (3 if backward else 1),
        bytes=float(dtype.itemsize * elements * (3 if backward else 2)),
        groups=("backward" if backward else layout,),
        parameters=parameters,
        oracle=oracle,
    )


cases = cases_of(SHAPES, make_case, *CHOICES)


def drawn(draw: Draw) -> Case:
    """Any number of channels and tokens, most of them multiples of 8."""
    step = draw.choice((1, 8, 8, 8))
    batch, channels, length = within(
        draw,
        lambda: (draw.size(1, 32), draw.size(64, 16384, step), draw.size(16, 65536, step)),
        lambda s: 1 << 20 <= s[0] * s[1] * s[2] <= 1 << 28,
    )
    layout, backward = draw.choice(("channels", "tokens")), draw.chance(0.5)
    case = make_case(batch, channels, length, layout, backward, draw.dtype)
    problem = draw.problem(
        batch=batch, channels=channels, length=length, layout=layout if step == 8 else "any"
    )
    return draw.case(case, problem=problem, peer_bytes=case.bytes)


def _prepare(function: Callable[..., Tensor]) -> Callable[..., Callable[[], Any]]:
    """The call, or that of its gradients."""

    def prepare(
        x: Tensor, weight: Tensor, bias: Tensor, grad_out: Tensor | None, backward: bool
    ) -> Callable[[], Any]:
        if not backward:
            return lambda: function(x, weight, bias)
        leaves = [y.detach().requires_grad_() for y in (x, weight, bias)]
        out = function(*leaves)
        return lambda: torch.autograd.grad(out, leaves, grad_out, retain_graph=True)

    return prepare


def prepare_copy(x: Tensor, backward: bool, **inputs: Any) -> Callable[[], Any]:
    """Reads and writes as many bytes."""
    count = x.numel() * (3 if backward else 2) // 2
    source = x.new_empty(count).normal_()
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def convolve(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """This package's op."""
    import thunderkittens as tk

    return tk.causal_conv1d(x, weight, bias, activation="silu")


def implementations(device: torch.device) -> dict[str, Implementation]:
    """This package's op first, then the copy, PyTorch's, and what is installed."""
    found: dict[str, Implementation] = {
        "thunderkittens": Prepared(_prepare(convolve)),
        "copy": Prepared(prepare_copy, another_problem=True),
        "torch": Prepared(_prepare(formula)),
    }
    if device.type != "cuda":
        return found
    found["torch.compile"] = Prepared(_prepare(torch.compile(formula, dynamic=False)))
    if importlib.util.find_spec("causal_conv1d") is not None:
        from causal_conv1d import causal_conv1d_fn

        def published(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            result: Tensor = causal_conv1d_fn(x, weight, bias, activation="silu")
            return result

        found["causal-conv1d"] = Prepared(_prepare(published))
    return found


def host_calls(device: torch.device) -> dict[str, Differentiable]:
    """Calls on 16 channels of 16 tokens, bf16."""
    x = torch.randn(1, 16, 16, dtype=torch.bfloat16, device=device)
    weight = torch.randn(16, WIDTH, dtype=torch.bfloat16, device=device)
    bias = torch.randn(16, dtype=torch.bfloat16, device=device)
    return {
        "thunderkittens.causal_conv1d": Differentiable(convolve, (x, weight, bias)),
        "torch conv1d and silu": Differentiable(formula, (x, weight, bias)),
    }
