"""A step of causal convolutions beside the compiled formula, causal-conv1d, and a copy.

The states are nearly all that a step has to move: they are read and written once. The copy, which
is another problem, moves as many bytes.
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
from ..drawn import ANY, Draw

WIDTH = 4
# Sequences, channels.
SHAPES: dict[str, list[tuple[int, int]]] = {
    "default": [(1, 8192), (64, 8192), (256, 8192), (1024, 8192)],
    "rated": [(1024, 8192)],
    "tiny": [(2, 16)],
}

DRAWN_CLASSES = (ANY,)
DRAWN_PEERS = ("copy",)
OF_MODEL = models.causal_conv1d_update


CHOICES = (Flag("channels_last", "channels of a state adjacent"),)


def formula(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The definition at the op's precision."""
    inputs = torch.cat([state, x.unsqueeze(2)], 2)
    state.copy_(inputs[..., 1:])
    return F.silu((inputs * weight).sum(2) + bias)


def oracle(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor) -> Iterator[Expected]:
    """The output; the state is what the timed calls make of it, here as it is given."""
    from ...reference import causal_conv1d_update

    wide = x.float(), state.float(), weight.float(), bias.float()
    exact = causal_conv1d_update(*wide, activation="silu")
    yield Expected(0, ..., exact, formula(x, state.clone(), weight, bias))


def make_case(batch: int, channels: int, channels_last: bool, dtype: torch.dtype) -> Case:
    """One token of each of so many sequences, with four taps, a bias and SiLU."""

    def make_inputs(device: torch.device, generator: torch.Generator) -> Inputs:
        def normal(*shape: int) -> Tensor:
            return random_normal(*shape, dtype=dtype, generator=generator)

        before = WIDTH - 1
        return {
            "x": normal(batch, channels),
            "state": normal(batch, before, channels).transpose(1, 2)
            if channels_last
            else normal(batch, channels, before),
            "weight": normal(channels, WIDTH),
            "bias": normal(channels),
        }

    parameters = parameters_of(
        f"{batch}x{channels}", dtype, batch=batch, channels=channels, channels_last=channels_last,
    )  # fmt: skip
    return Case(
        name=f"{batch} x {channels}{', channels last' * channels_last}",
        make_inputs=make_inputs,
        flops=2.0 * WIDTH * batch * channels,
        bytes=float(dtype.itemsize * batch * channels * 2 * WIDTH),
        groups=("step",),
        parameters=parameters,
        oracle=oracle,
    )


cases = cases_of(SHAPES, make_case, *CHOICES)


def drawn(draw: Draw) -> Case:
    """Any number of sequences and channels."""
    batch, channels = draw.size(1, 1024), draw.size(64, 16384)
    case = make_case(batch, channels, draw.chance(0.5), draw.dtype)
    problem = {"dtype": draw.code, "batch": batch, "channels": channels}
    return draw.case(case, problem=problem, peer_bytes=case.bytes)


def _prepare(step: Callable[..., Tensor]) -> Callable[..., Callable[[], Tensor]]:
    """One step after the other from a copy of the state; the first is the one that is checked."""

    def prepare(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor) -> Callable[[], Tensor]:
        mine = state.clone()
        return lambda: step(x, mine, weight, bias)

    return prepare


def prepare_copy(x: Tensor, **inputs: Any) -> Callable[[], Any]:
    """Reads and writes as many bytes."""
    source = x.new_empty(x.numel() * WIDTH).normal_()
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def step(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """This package's op."""
    import thunderkittens as tk

    return tk.causal_conv1d_update(x, state, weight, bias, activation="silu")


def implementations(device: torch.device) -> dict[str, Implementation]:
    """This package's op first, then the copy, and on a GPU what is compiled or installed."""
    found: dict[str, Implementation] = {
        "thunderkittens": Prepared(_prepare(step)),
        "copy": Prepared(prepare_copy, another_problem=True),
    }
    if device.type != "cuda":
        return found
    found["torch.compile"] = Prepared(_prepare(torch.compile(formula, dynamic=False)))
    if importlib.util.find_spec("causal_conv1d") is not None:
        from causal_conv1d import causal_conv1d_update

        def published(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            result: Tensor = causal_conv1d_update(x, state, weight, bias, activation="silu")
            return result

        found["causal-conv1d"] = Prepared(_prepare(published))
    return found


def host_calls(device: torch.device) -> dict[str, Callable[[], Any]]:
    """Calls on one sequence of 16 channels, bf16."""
    x, weight, bias = (
        torch.randn(shape, dtype=torch.bfloat16, device=device) for shape in ((1, 16), (16, 4), 16)
    )
    state = torch.zeros(1, 16, WIDTH - 1, dtype=torch.bfloat16, device=device)
    return {"thunderkittens.causal_conv1d_update": lambda: step(x, state, weight, bias)}
