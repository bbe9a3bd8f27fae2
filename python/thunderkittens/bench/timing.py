"""Timers of interleaved rounds: on the GPU by events behind a flushed L2 cache, or on the CPU.

A GPU repetition is: flush the cache by a buffer larger than twice it, record an event, call, record
an event. Protocol `dirty` writes the buffer, so that the write-back runs beside the call; `cold`
reads it, so that the lines are clean. The flush also keeps the GPU busy while the host submits the
call. Should the GPU reach the first event before the host has submitted everything, the time would
hold launch gaps; each repetition asks for that, drops itself, and when it happens often the flush
is doubled. Protocol `stream` is in stream.py.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

Calls = dict[str, Callable[[], Any]]

FLUSH_BYTES = 256 << 20
BATCH_SECONDS = 0.05
BLOCKS = 10
MAX_ROUNDS = 20
MAX_FLUSHES = 16
DIRTY, COLD, STREAM, WALL_CLOCK = "dirty", "cold", "stream", "wall clock"


def medians_of_blocks(samples: list[float]) -> tuple[float, ...]:
    """The medians of so many equal runs of samples, one after the other: where samples drift with
    clocks and temperature, these differ by what a median is uncertain by."""
    count = min(BLOCKS, len(samples))
    edges = [len(samples) * place // count for place in range(count + 1)]
    return tuple(statistics.median(samples[begin:end]) for begin, end in itertools.pairwise(edges))


@dataclass(frozen=True)
class Timing:
    """Statistics of repetitions, in microseconds; `late` when they include launch gaps. `blocks`
    are the medians of up to `BLOCKS` runs of repetitions, which the calls of a case had in the same
    rounds."""

    median: float
    quartile_1: float
    quartile_3: float
    minimum: float
    repetitions: int
    late: bool = False
    blocks: tuple[float, ...] = ()

    @classmethod
    def of(cls, samples: list[float], late: bool = False) -> Timing:
        if not samples:
            raise ValueError("Timing.of: no samples")
        quartiles = (
            statistics.quantiles(samples, n=4, method="inclusive")
            if len(samples) > 1
            else samples * 3
        )
        return cls(
            statistics.median(samples),
            quartiles[0],
            quartiles[2],
            min(samples),
            len(samples),
            late,
            medians_of_blocks(samples),
        )

    def of_each(self, parts: int) -> Timing:
        """The statistics of one of `parts` equal parts."""
        names = ("median", "quartile_1", "quartile_3", "minimum")
        blocks = tuple(block / parts for block in self.blocks)
        return replace(self, blocks=blocks, **{name: getattr(self, name) / parts for name in names})

    @property
    def spread(self) -> float:
        """Interquartile range over median."""
        return (self.quartile_3 - self.quartile_1) / self.median if self.median else 0.0


@dataclass(frozen=True)
class Within:
    """A call inside a context, which is no part of its time by a wall clock."""

    call: Callable[[], Any]
    context: Callable[[], contextlib.AbstractContextManager[Any]]

    def __call__(self) -> Any:
        with self.context():
            return self.call()


@dataclass(frozen=True)
class Rounds:
    """What a timer returns: a Timing per call, the GPU's clocks under this load if known, the
    protocol, and what there is to say about a call."""

    timings: dict[str, Timing]
    clocks: dict[str, float] = field(default_factory=dict)
    protocol: str = ""
    notes: dict[str, str] = field(default_factory=dict)


class Timer(Protocol):
    """Times calls in rounds, to `repetitions` samples each or `seconds` per call in all."""

    device: torch.device

    def synchronize(self) -> None: ...

    def measure(self, calls: Calls, *, repetitions: int, seconds: float) -> Rounds: ...

    def protocol(self) -> dict[str, Any]: ...


def rotated(names: list[str], turn: int) -> list[str]:
    """The order of round `turn`: each name leads in its turn, to spread what order does."""
    shift = turn % len(names)
    return names[shift:] + names[:shift]


class CpuTimer:
    """Wall-clock times of calls that finish before they return."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.device = torch.device("cpu")
        self.clock = clock

    def synchronize(self) -> None:
        pass

    def measure(self, calls: Calls, *, repetitions: int, seconds: float) -> Rounds:
        samples: dict[str, list[float]] = {name: [] for name in calls}
        deadline = self.clock() + seconds * len(calls)
        for turn in range(repetitions):
            for name in rotated(list(calls), turn):
                call = calls[name]
                inner = call if isinstance(call, Within) else Within(call, contextlib.nullcontext)
                with inner.context():
                    start = self.clock()
                    inner.call()
                    samples[name].append((self.clock() - start) * 1e6)
            if self.clock() > deadline:
                break
        timings = {name: Timing.of(values) for name, values in samples.items()}
        return Rounds(timings, protocol=WALL_CLOCK)

    def protocol(self) -> dict[str, Any]:
        return {"timer": WALL_CLOCK}


class StepTimer(CpuTimer):
    """Wall-clock times of a step, of calls that do `steps` of them before the device is waited for.

    What a training run takes: the host's part too, where the GPU waits for it.
    """

    def __init__(
        self,
        device: torch.device,
        steps: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(clock)
        self.device, self.steps = device, steps

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def measure(self, calls: Calls, *, repetitions: int, seconds: float) -> Rounds:
        def whole(call: Callable[[], Any]) -> Callable[[], None]:
            if isinstance(call, Within):
                return Within(whole(call.call), call.context)

            def run() -> None:
                call()
                self.synchronize()

            return run

        self.synchronize()
        whole_calls: Calls = {name: whole(call) for name, call in calls.items()}
        rounds = super().measure(whole_calls, repetitions=repetitions, seconds=seconds)
        timings = {name: timing.of_each(self.steps) for name, timing in rounds.timings.items()}
        return replace(rounds, timings=timings)

    def protocol(self) -> dict[str, Any]:
        return {**super().protocol(), "steps": self.steps}


@dataclass(frozen=True)
class Mark:
    """One repetition: its call's name, its events, and whether the host was ahead of the GPU."""

    name: str
    start: Any
    end: Any
    in_time: bool


class CudaTimer:
    """CUDA event times of calls on the device's current stream, each behind a flushed L2 cache."""

    name = DIRTY

    def __init__(
        self,
        device: torch.device | str = "cuda",
        flush_bytes: int | None = None,
        name: str = DIRTY,
    ) -> None:
        if name not in (DIRTY, COLD):
            raise ValueError(f"CudaTimer: name is {name!r}; expected {DIRTY!r} or {COLD!r}")
        self.device, self.name = torch.device(device), name
        l2_bytes: int = torch.cuda.get_device_properties(self.device).L2_cache_size
        self.flush_bytes = (flush_bytes or max(FLUSH_BYTES, 2 * l2_bytes + (1 << 20))) // 4 * 4
        self.buffer = torch.zeros(self.flush_bytes // 4, device=self.device)
        self.total = torch.zeros((), device=self.device)
        self.flushes = 1

    def protocol(self) -> dict[str, Any]:
        return {
            "timer": "CUDA events",
            "protocol": self.name,
            "flushed_bytes": self.flush_bytes,
        }

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def clock(self) -> float:
        return time.perf_counter()

    def event(self) -> Any:
        event: Any = torch.cuda.Event  # untyped in PyTorch
        return event(enable_timing=True)

    def flush(self) -> None:
        for _ in range(self.flushes):
            if self.name == COLD:
                torch.sum(self.buffer, 0, out=self.total)
            else:
                self.buffer.zero_()

    def measure(self, calls: Calls, *, repetitions: int, seconds: float) -> Rounds:
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                return self.measure_here(calls, repetitions, seconds)
        return self.measure_here(calls, repetitions, seconds)

    def measure_here(self, calls: Calls, repetitions: int, seconds: float) -> Rounds:
        """Batches of rounds, short enough to keep the time limit, until there is enough."""
        samples: dict[str, list[float]] = {name: [] for name in calls}
        late: dict[str, list[float]] = {name: [] for name in calls}
        clocks: dict[str, list[float]] = {}
        self.flushes, turn, rounds = 1, 0, 1
        deadline = self.clock() + seconds * len(calls)
        while True:
            begin = self.clock()
            marks = self.enqueue(calls, range(turn, turn + rounds))
            # While the GPU still works on the batch: under its power limit they vary.
            for key, value in read_clocks(self.device).items():
                clocks.setdefault(key, []).append(value)
            self.synchronize()
            for mark in marks:
                kind = samples if mark.in_time else late
                kind[mark.name].append(mark.start.elapsed_time(mark.end) * 1e3)
            now, turn = self.clock(), turn + rounds
            missing = repetitions - min(len(values) for values in samples.values())
            if missing <= 0 or turn >= 2 * repetitions or now > deadline:
                break
            # per call: others that are in time must not hide one whose host part is slow
            lateness = Counter(mark.name for mark in marks if not mark.in_time)
            if turn > 1 and any(2 * count > rounds for count in lateness.values()):
                self.flushes = min(2 * self.flushes, MAX_FLUSHES)
            else:
                fitting = int(BATCH_SECONDS * rounds / max(now - begin, 1e-9))
                rounds = max(1, min(2 * rounds, MAX_ROUNDS, missing, fitting))
        timings = {}
        for name in calls:
            gaps = len(late[name]) > len(samples[name])
            timings[name] = Timing.of(samples[name] + late[name] if gaps else samples[name], gaps)
        means = {key: statistics.fmean(values) for key, values in clocks.items()}
        return Rounds(timings, means, self.name)

    def enqueue(self, calls: Calls, turns: range) -> list[Mark]:
        """Submit rounds of all calls without waiting for any."""
        marks = []
        for turn in turns:
            for name in rotated(list(calls), turn):
                start, end, call = self.event(), self.event(), calls[name]
                self.flush()
                start.record()
                call()
                end.record()
                marks.append(Mark(name, start, end, in_time=not start.query()))
        return marks


def read_clocks(device: torch.device) -> dict[str, float]:
    """SM clock in MHz and power in W at this moment; empty without NVML (nvidia-ml-py)."""
    clocks: dict[str, float] = {}
    with contextlib.suppress(
        Exception
    ):  # a missing package, library or permission each raise their own type
        clocks["sm_mhz"] = float(torch.cuda.clock_rate(device))
        clocks["power_w"] = torch.cuda.power_draw(device) / 1e3
    return clocks
