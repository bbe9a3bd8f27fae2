"""Steps of training a small transformer, with this package's ops and with PyTorch's own.

A step is forward, backward and the optimiser, of pre-norm blocks in bf16: causal attention, a
multilayer perceptron four times as wide with gelu, layer norms, `AdamW(fused=True)`. The models
differ in their ops alone: `tk.attention` for `scaled_dot_product_attention`, and in half of the
cases `tk.gemm` for the linear layers too. They are run eagerly and compiled. A ratio is the time of
the model on PyTorch's ops, in the same rounds, over that of the other.

A call trains for `STEPS` steps and returns their losses, and with them the parameters' gradients of
the first step, so that the accuracy rule of the other benchmarks holds here too: against the
same training in fp32, each may be off by twice as much as on PyTorch's own ops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import steps
from .cases import Case, Expected, Implementation, Inputs, Prepared, random_normal
from .choices import Names, check_part, dtype_name, sizes_of
from .steps import compiler
from .timing import StepTimer

MODES = ("eager", "compiled")
OPS = (("tk.attention",), ("tk.attention", "tk.gemm"))
STEPS = 8  # of a call
LEARNING_RATE = 1e-3
SECONDS = 10.0  # limit per call and case
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Linear = Callable[[Tensor, nn.Linear], Tensor]


@dataclass(frozen=True)
class Size:
    """Of a model and its batch."""

    width: int
    layers: int
    heads: int
    batch: int
    length: int

    @property
    def flops(self) -> float:
        """Of the products of a step, forward and backward; half of them for the causal mask."""
        tokens = self.batch * self.length
        linear = 3 * 2.0 * 12 * self.width**2 * tokens
        attention = 3.5 * 2.0 * self.width * self.length * tokens
        return self.layers * (linear + attention)


SHAPES = {"default": Size(768, 4, 12, 8, 512), "tiny": Size(32, 2, 2, 2, 24)}


CHOICES = (Names(MODES, name="modes"),)


# The ops of a model.


def torch_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def torch_linear(x: Tensor, layer: nn.Linear) -> Tensor:
    return F.linear(x, layer.weight, layer.bias)


def tk_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    import thunderkittens as tk

    return tk.attention(q, k, v, causal=True)


def tk_linear(x: Tensor, layer: nn.Linear) -> Tensor:
    import thunderkittens as tk

    return tk.gemm(x, layer.weight.t(), bias=layer.bias)


class Block(nn.Module):
    """Causal attention and a multilayer perceptron, each behind a layer norm."""

    def __init__(self, width: int, heads: int, attention: Attention, linear: Linear) -> None:
        super().__init__()
        self.heads, self.attention, self.linear = heads, attention, linear
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.linear(self.norms[0](x), self.qkv).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        heads = self.attention(q, k, v).transpose(1, 2).reshape(batch, length, width)
        x = x + self.linear(heads, self.projection)
        hidden = F.gelu(self.linear(self.norms[1](x), self.up))
        return x + self.linear(hidden, self.down)


def make_model(size: Size, ops: Sequence[str] = ()) -> nn.Sequential:
    """The model on the given ops of this package, and PyTorch's own for the others; on the CPU."""
    attention = tk_attention if "tk.attention" in ops else torch_attention
    linear = tk_linear if "tk.gemm" in ops else torch_linear
    blocks = (Block(size.width, size.heads, attention, linear) for _ in range(size.layers))
    return nn.Sequential(*blocks, nn.LayerNorm(size.width))


def make_training(
    size: Size,
    weights: Mapping[str, Tensor],
    x: Tensor,
    target: Tensor,
    mode: str = "eager",
    ops: Sequence[str] = (),
) -> Callable[[], tuple[Tensor, ...]]:
    """A call that trains for `STEPS` more steps, in the dtype of `x`."""
    model = make_model(size, ops).to(x.device, x.dtype)
    model.load_state_dict(weights)
    run = torch.compile(model, **compiler(x.device)) if mode == "compiled" else model
    return steps.training(model, run, x, target, count=STEPS, learning_rate=LEARNING_RATE)


# Cases and implementations, as a suite has them.


def oracle(
    size: Size, weights: Mapping[str, Tensor], x: Tensor, **inputs: Any
) -> Iterator[Expected]:
    """Losses and gradients on PyTorch's own ops, in fp32 and in the dtype of `x`."""
    exact, plain = (
        make_training(size, weights, x.to(dtype), inputs["target"])()
        for dtype in (torch.float32, x.dtype)
    )
    for output, pair in enumerate(zip(exact, plain, strict=True)):
        yield Expected(output, slice(None), *pair)


def make_case(size: Size, mode: str, ops: tuple[str, ...]) -> Case:
    """A step of one mode, with the ops of this package that are named."""

    def make_inputs(device: torch.device, generator: torch.Generator) -> Inputs:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(generator.initial_seed())
            weights = make_model(size).bfloat16().state_dict()
        shape = (size.batch, size.length, size.width)
        return {
            "size": size,
            "weights": {name: weight.to(device) for name, weight in weights.items()},
            "x": random_normal(*shape, dtype=torch.bfloat16, generator=generator),
            "target": random_normal(*shape, dtype=torch.float32, generator=generator),
            "mode": mode,
            "ops": ops,
        }

    name = f"{mode}, {' and '.join(ops)}"
    return Case(
        name=name,
        make_inputs=make_inputs,
        flops=size.flops,
        parameters={
            "label": name.replace(", ", "\n"),
            "mode": mode,
            "ops": ", ".join(ops),
            **asdict(size),
            "dtype": dtype_name(torch.bfloat16),
        },
        oracle=oracle,
    )


def cases(
    shapes: str = "default",
    *,
    dtype: torch.dtype = torch.bfloat16,
    modes: Sequence[str] = MODES,
) -> list[Case]:
    """The cases of a size, which are in bf16. ValueError for a name there is not."""
    check_part("mode", modes, MODES)
    size = sizes_of(SHAPES, shapes)
    return [make_case(size, mode, ops) for mode in modes for ops in OPS]


def implementations(device: torch.device) -> dict[str, Implementation]:
    """A model on the ops of the case, and one on PyTorch's own."""

    def on_torch(ops: Sequence[str], **inputs: Any) -> Callable[[], tuple[Tensor, ...]]:
        return make_training(**inputs)

    return {"thunderkittens": Prepared(make_training), "PyTorch": Prepared(on_torch)}


def make_timer(device: torch.device) -> StepTimer:
    """Wall-clock times: of eager steps the host's part counts."""
    return StepTimer(device, STEPS)
