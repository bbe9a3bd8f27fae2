"""Host time of eager calls: from the call to its return, launches not waited for.

A differentiable call is measured in three ways: without gradients, recording what its gradient
needs, and forward and backward. The problems are so small that the GPU is done before the next
call; the queue is emptied before every block all the same, so that no call ever waits for room in
it.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .timing import Calls, Timing, rotated

HostTimes = dict[str, Timing]
Context = Callable[[], AbstractContextManager[Any]]

# What follows the name of a call in tables and result files.
PLAIN, RECORDING, BACKWARD = KINDS = ("", ", recording a gradient", ", forward and backward")


@dataclass(frozen=True)
class Differentiable:
    """A call whose gradients are measured, too: `function(*leaves)`, one tensor.

    `context` makes what the call runs in, such as a choice of PyTorch's back end. It is entered
    around a block of calls, because entering it would cost more host time than the call.
    """

    function: Callable[..., Tensor]
    leaves: tuple[Tensor, ...]
    context: Context = nullcontext

    def kinds(self) -> Calls:
        """The calls to measure, by what follows the name."""
        function = self.function
        plain = [x.detach() for x in self.leaves]
        leaves = [x.detach().requires_grad_() for x in self.leaves]
        with self.context():
            grad = torch.randn_like(function(*plain))
        return {
            PLAIN: lambda: function(*plain),
            RECORDING: lambda: function(*leaves),
            BACKWARD: lambda: torch.autograd.grad(function(*leaves), leaves, grad),
        }


HostCalls = Mapping[str, Callable[[], Any] | Differentiable]


def every_kind(host_calls: HostCalls) -> tuple[Calls, dict[str, Context]]:
    """The calls to measure, those of one kind after each other, and what each runs in."""
    by_kind: dict[str, Calls] = {kind: {} for kind in KINDS}
    contexts: dict[str, Context] = {}
    for name, call in host_calls.items():
        if isinstance(call, Differentiable):
            for kind, of_kind in call.kinds().items():
                by_kind[kind][name + kind] = of_kind
                contexts[name + kind] = call.context
        else:
            by_kind[PLAIN][name] = call
    return {name: call for calls in by_kind.values() for name, call in calls.items()}, contexts


def measure_host(
    host_calls: HostCalls,
    synchronize: Callable[[], None],
    *,
    repetitions: int = 2000,
    block: int = 50,
    clock: Callable[[], int] = time.perf_counter_ns,
) -> HostTimes:
    """Times per call and kind, in blocks of `block` calls that alternate between all of them."""
    calls, contexts = every_kind(host_calls)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for name, call in calls.items():
        with contexts.get(name, nullcontext)():
            for _ in range(block):
                call()
    collecting = gc.isenabled()
    gc.disable()
    try:
        for turn in range(max(1, repetitions // block)):
            for name in rotated(list(calls), turn):
                call, times = calls[name], samples[name]
                synchronize()
                with contexts.get(name, nullcontext)():
                    for _ in range(block):
                        start = clock()
                        call()
                        times.append((clock() - start) * 1e-3)
    finally:
        if collecting:
            gc.enable()
    synchronize()
    return {name: Timing.of(times) for name, times in samples.items()}
