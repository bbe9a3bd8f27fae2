"""Protocol `stream`: CUDA graphs of calls on rotating inputs, as a model's loop runs its kernels.

A graph holds several calls of one implementation. Each takes the next of several sets of inputs,
which together with the outputs are larger than twice the L2 cache, so that every call finds its
operands in memory and the cache full of what calls like it left there. Graphs of all
implementations are replayed in random order between events; a time is that of a replay over its
number of calls. Launches cost nothing there, and what one kernel hides of the next one's start
counts, as in a model.

A case whose calls are longer than `SHORT_US` is timed `cold`, where the state of the cache between
calls matters little, and so is one with an implementation that cannot be captured.
"""

from __future__ import annotations

import contextlib
import gc
import math
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .timing import (
    COLD,
    DIRTY,
    STREAM,
    Calls,
    CpuTimer,
    CudaTimer,
    Mark,
    Rounds,
    Timer,
)

PROTOCOLS = (STREAM, COLD, DIRTY)
SHORT_US = 200.0  # the longest call that is timed by `stream` where no protocol is named
REPLAY_US = 200.0  # the least time of a replay, beside which its start counts little
LEAST_COPIES, MOST_COPIES = 2, 256
MOST_CALLS = 512  # of a graph, where calls are short beside the turns that they need
MEMORY_SHARE = 0.25  # of the free memory that sets of inputs may take
ESTIMATES = 3  # repetitions of the first look at a case


def copies_for(bytes_moved: float, l2_bytes: int, held: float = 0.0, free: float = 0.0) -> int:
    """How many sets of inputs rotate: the fewest that exceed twice the L2 cache, within limits.

    `bytes_moved` are a call's, `held` the bytes that a set of inputs takes, of `free` ones. 256
    sets of less than 0.4 MB do not exceed the cache: the operands of such shapes stay there.
    """
    copies = MOST_COPIES
    if bytes_moved > 0:
        copies = min(copies, math.floor(2 * l2_bytes / bytes_moved) + 1)
    if held > 0 and free > 0:
        copies = min(copies, int(MEMORY_SHARE * free / held))
    return max(LEAST_COPIES, copies)


def calls_for(microseconds: float, copies: int) -> int:
    """How many calls a graph has: whole turns through the copies, at least `REPLAY_US` in all."""
    turns = math.ceil(REPLAY_US / max(microseconds * copies, 1e-3))
    return copies * max(1, min(turns, MOST_CALLS // copies))


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of inputs: in mappings, sequences and named tuples, too."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)


def bytes_of(inputs: Any) -> int:
    """The bytes of distinct tensors in the inputs, those that a view leaves out not counted."""
    sizes: dict[int, int] = {}
    for x in tensors_in(inputs):
        size = min(x.numel() * x.element_size(), x.untyped_storage().nbytes())
        sizes[x.data_ptr()] = max(sizes.get(x.data_ptr(), 0), size)
    return sum(sizes.values())


def abandon(graph: Any, pool: Any) -> None:
    """Ends a capture that has failed. PyTorch's own end of it says that the capture is invalid, and
    leaves the allocator as if it went on."""
    with contextlib.suppress(RuntimeError):
        graph.capture_end()
    with contextlib.suppress(RuntimeError, AttributeError):
        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)


def capture(calls: Sequence[Callable[[], Any]], count: int) -> Any:
    """A CUDA graph of `count` calls in turn, captured on the current stream.

    As many results are kept as there are calls, so that outputs rotate as the inputs do; then their
    memory, the graph's own, is used again. `torch.cuda.graph` would empty PyTorch's cache each
    time.
    """
    graph: Any = torch.cuda.CUDAGraph()  # untyped in PyTorch
    pool: Any = torch.cuda.graph_pool_handle()
    kept: deque[Any] = deque(maxlen=len(calls))
    collecting = gc.isenabled()
    gc.disable()  # what it frees may not be freed during a capture
    try:
        graph.capture_begin(pool=pool)
        try:
            for place in range(count):
                kept.append(calls[place % len(calls)]())
        except BaseException:
            abandon(graph, pool)
            raise
        graph.capture_end()
    finally:
        if collecting:
            gc.enable()
    return graph


class ReplayTimer(CudaTimer):
    """CUDA event times of replays, in random order, one behind the other."""

    name = STREAM

    def __init__(self, device: torch.device, seed: int = 0) -> None:
        self.device, self.flushes, self.random = device, 1, random.Random(seed)

    def protocol(self) -> dict[str, Any]:
        return {"timer": "CUDA events", "protocol": self.name}

    def enqueue(self, calls: Calls, turns: range) -> list[Mark]:
        """Submit rounds of all calls. The first ones are not timed: they give the GPU something to
        do while the host submits."""
        marks, order = [], list(calls)
        for _ in range(self.flushes):
            calls[order[0]]()
        for _ in turns:
            self.random.shuffle(order)
            for name in order:
                start, end = self.event(), self.event()
                start.record()
                calls[name]()
                end.record()
                marks.append(Mark(name, start, end, in_time=not start.query()))
        return marks


class StreamTimer:
    """Times cases by `stream`, and `cold` those for which that is not meant.

    With `always`, calls of any length are streamed. All that a case does has to happen in
    `context()`: a capture needs a stream of its own, and gradients run on the stream of their
    forward pass.
    """

    def __init__(self, device: torch.device | str = "cuda", always: bool = False) -> None:
        self.device, self.always = torch.device(device), always
        self.l2_bytes: int = torch.cuda.get_device_properties(self.device).L2_cache_size
        self.stream: Any = torch.cuda.Stream(self.device)
        with self.context():
            self.cold = CudaTimer(self.device, name=COLD)
            self.replays = ReplayTimer(self.device)
        self.synchronize()

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            yield

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def protocol(self) -> dict[str, Any]:
        kind = STREAM if self.always else f"{STREAM} to {SHORT_US:.0f} us, else {COLD}"
        return {**self.cold.protocol(), "protocol": kind}

    def measure(self, calls: Calls, *, repetitions: int, seconds: float) -> Rounds:
        """Without sets of inputs to take turns: cold."""
        with self.context():
            return self.cold.measure(calls, repetitions=repetitions, seconds=seconds)

    def free_bytes(self) -> float:
        """The memory that can be had, after giving back the pools of graphs that are gone where
        these have grown large."""
        free, total = torch.cuda.mem_get_info(self.device)
        if free < total / 2:
            torch.cuda.empty_cache()
            free, _ = torch.cuda.mem_get_info(self.device)
        cached = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return float(free + cached)

    def capture(self, calls: Sequence[Callable[[], Any]], count: int) -> Callable[[], Any]:
        """The replay of a graph of these calls, which has run once. RuntimeError where they cannot
        be captured; where the GPU is unusable too, it is raised by synchronize()."""
        try:
            graph = capture(calls, count)
        except RuntimeError as error:
            self.synchronize()
            # A capture that succeeds, of anything, gives PyTorch's random numbers back.
            capture([partial(torch.zeros, 1, device=self.device)], 1)
            raise RuntimeError(str(error)) from None
        graph.replay()
        self.synchronize()
        replay: Callable[[], Any] = graph.replay
        return replay

    def measure_rotating(
        self,
        calls: Calls,
        another: Callable[[int], Calls],
        *,
        bytes_moved: float,
        held: float,
        leader: str,
        repetitions: int,
        seconds: float,
        protocol: str = "",
    ) -> Rounds:
        """Times the calls of a case; `another(i)` binds them to a further set of inputs.

        `leader` is the call whose length decides about the protocol, if that is not given; `held`
        the bytes of a set.
        """
        estimate = self.cold.measure(calls, repetitions=ESTIMATES, seconds=seconds / 4)
        if not protocol and estimate.timings[leader].median > SHORT_US:
            protocol = COLD
        if not self.always and protocol == COLD:
            return self.cold.measure(calls, repetitions=repetitions, seconds=seconds)
        copies = copies_for(bytes_moved or held, self.l2_bytes, held, self.free_bytes())
        sets = [calls, *(another(place) for place in range(1, copies))]
        for of_a_set in sets[1:]:
            for call in of_a_set.values():
                call()
        self.synchronize()
        counts, replays = {}, {}
        for name in calls:
            counts[name] = calls_for(estimate.timings[name].median, copies)
            try:
                in_turn = [of_a_set[name] for of_a_set in sets]
                replays[name] = self.capture(in_turn, counts[name])
            except RuntimeError as error:
                replays.clear()
                text = (str(error).strip().splitlines() or [type(error).__name__])[0]
                rounds = self.cold.measure(calls, repetitions=repetitions, seconds=seconds)
                note = f"not captured in a CUDA graph, so the case is timed {COLD}: {text}"
                return replace(rounds, notes={name: note})
        rounds = self.replays.measure(replays, repetitions=repetitions, seconds=seconds)
        timings = {name: time.of_each(counts[name]) for name, time in rounds.timings.items()}
        return replace(rounds, timings=timings)


def make_timer(device: torch.device, protocol: str | None = None) -> Timer:
    """The timer for calls on `device`, by a protocol: without a name, `stream` for calls to 200 us
    and `cold` for longer ones. On a CPU there is one clock."""
    if protocol not in (None, *PROTOCOLS):
        raise ValueError(f"protocol is {protocol!r}; expected one of {', '.join(PROTOCOLS)}")
    if device.type != "cuda":
        return CpuTimer()
    if protocol in (COLD, DIRTY):
        return CudaTimer(device, name=protocol)
    return StreamTimer(device, always=protocol == STREAM)
