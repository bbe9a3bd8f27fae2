"""Steps of a model as calls to time: training, and prefill, the forward pass alone.

What `training` and `examples/llama.py` measure models by. A call does several steps, and the
device is waited for behind it (`StepTimer`), as in a run. Its results are what the accuracy rule of
the other benchmarks is applied to: against the same model in fp32, each may be off by twice as much
as on PyTorch's own ops.

Where one case has several ways of running a model, all of them have the same rounds; `apart` makes
of such a measurement one for each way, with PyTorch's beside it, as tables and result files have
them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .runner import Measurement

SUBJECT, PEER = "thunderkittens", "PyTorch"
Steps = Callable[[], tuple[Tensor, ...]]


def compiler(device: torch.device) -> dict[str, Any]:
    """Options of `torch.compile`. On a CPU the tool is only tried: without a compiler of C++."""
    backend = "inductor" if device.type == "cuda" else "aot_eager"
    return {"fullgraph": True, "backend": backend}


def training(
    model: nn.Module,
    run: Callable[[Tensor], Tensor],
    x: Tensor,
    target: Tensor,
    *,
    count: int,
    learning_rate: float,
) -> Steps:
    """A call that trains for `count` more steps: forward, mean squared error against the target,
    backward, `AdamW(fused=True)`; `run` is the model, or the model compiled.

    It returns their losses, and behind them the gradients at the weights that the model has now,
    which are computed here, before any call: of each matrix, and of all vectors as one, because the
    largest of a few errors says little.
    """
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate, fused=True)

    @torch.enable_grad()
    def loss_of_a_step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        x.grad = None  # which it has where it requires one, as behind an embedding
        loss = F.mse_loss(run(x).float(), target)
        torch.autograd.backward(loss)
        return loss.detach()

    loss_of_a_step()
    given = [parameter.grad for parameter in parameters if parameter.grad is not None]
    vectors = torch.cat([gradient for gradient in given if gradient.ndim == 1])
    gradients = [*(gradient for gradient in given if gradient.ndim > 1), vectors]

    def train() -> tuple[Tensor, ...]:
        losses = []
        for _ in range(count):
            losses.append(loss_of_a_step())
            optimizer.step()
        return torch.stack(losses), *gradients

    return train


def prefill(run: Callable[[Tensor], Tensor], x: Tensor, *, count: int) -> Steps:
    """A call that runs the model `count` times without gradients; it returns the last output."""

    @torch.no_grad()
    def forward() -> tuple[Tensor, ...]:
        for _ in range(count):
            out = run(x)
        return (out,)

    return forward


def apart(measurement: Measurement, ways: Sequence[str]) -> list[Measurement]:
    """One measurement for each way, named `thunderkittens`, beside that of PyTorch."""

    def named(way: str, entries: dict[str, Any]) -> dict[str, Any]:
        pairs = ((SUBJECT, way), (PEER, PEER))
        return {name: entries[key] for name, key in pairs if key in entries}

    case = measurement.case
    return [
        replace(
            measurement,
            case=replace(
                case,
                name=f"{case.name}, {way}",
                groups=(*case.groups, f"{case.groups[0]}, {way}"),
                parameters={**case.parameters, "way": way, "label": way},
            ),
            subject=SUBJECT,
            timings=named(way, measurement.timings),
            accuracies=named(way, measurement.accuracies),
            notes=named(way, measurement.notes),
            unrated=set(),
        )
        for way in ways
        if way in measurement.timings or way in measurement.notes
    ]
