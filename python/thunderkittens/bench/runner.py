"""`compare`: check and time several implementations, interleaved round by round in one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch

from .accuracy import Accuracy, as_tensors, check
from .cases import Case, Implementation, Inputs, NotApplicableError, Prepared, bind
from .stream import StreamTimer, bytes_of, make_timer
from .timing import Calls, Rounds, Timer, Timing

WARMUP = 3


@dataclass
class Measurement:
    """The figures of one case by one protocol; `notes` say why one is missing or to be doubted, and
    `kernel` is the subject's, where that is known."""

    case: Case
    subject: str
    timings: dict[str, Timing] = field(default_factory=dict)
    accuracies: dict[str, Accuracy] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    clocks: dict[str, float] = field(default_factory=dict)
    unrated: set[str] = field(default_factory=set)
    protocol: str = ""
    kernel: str = ""

    @property
    def failed(self) -> bool:
        """Whether the subject could not run or was not accurate."""
        return self.subject not in self.timings

    def tflops(self, name: str) -> float:
        """TFLOP/s of an implementation; NaN when it has no timing or ran another problem."""
        timing = self.timings.get(name)
        if timing is None or name in self.unrated:
            return math.nan
        return self.case.flops / timing.median * 1e-6

    def gigabytes_per_second(self, name: str) -> float:
        """GB/s of the least traffic the case needs; NaN when there is no timing."""
        timing = self.timings.get(name)
        if timing is None or name in self.unrated:
            return math.nan
        return self.case.bytes / timing.median * 1e-3

    def ratio(self, peer: str) -> float:
        """The peer's time over the subject's: above 1 the subject is faster; NaN without both, and
        for a peer that was not accurate."""
        if self.subject not in self.timings or peer not in self.timings:
            return math.nan
        if peer in self.accuracies and not self.accuracies[peer].passed:
            return math.nan
        return self.timings[peer].median / self.timings[self.subject].median


def first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def inputs_of(case: Case, timer: Timer, seed: int) -> Inputs:
    """The case's inputs, drawn from a seed, on the timer's device."""
    generator = torch.Generator(device=timer.device).manual_seed(seed)
    return case.make_inputs(timer.device, generator)


def measure(
    case: Case,
    implementations: Mapping[str, Implementation],
    *,
    subject: str,
    timer: Timer,
    repetitions: int,
    seconds: float,
    seed: int,
    checked: bool,
    protocol: str = "",
) -> Measurement:
    """Check and time one case. An implementation that raises gets a note instead of figures."""
    measurement = Measurement(case, subject)
    inputs = inputs_of(case, timer, seed)
    calls: Calls = {}
    apart: Calls = {}
    results = {}
    for name, implementation in implementations.items():
        try:
            call = bind(implementation, inputs)
            result = as_tensors(call())
            timer.synchronize()
        except torch.AcceleratorError as error:  # which ends the run: the note says whose it was
            if name == subject:
                raise
            raise torch.AcceleratorError(f"{name}: {first_line(error)}") from error
        except NotApplicableError:
            continue
        except (RuntimeError, ValueError, TypeError, ImportError) as error:
            measurement.notes[name] = first_line(error)
            continue
        prepared = implementation if isinstance(implementation, Prepared) else None
        (apart if prepared and prepared.apart else calls)[name] = call
        if prepared and prepared.another_problem:
            measurement.unrated.add(name)
        else:
            results[name] = result
    if checked:
        measurement.accuracies = check(case, inputs, results)
    results.clear()
    for name, accuracy in measurement.accuracies.items():
        if not accuracy.passed:
            figures = (
                f"relative error {accuracy.relative:.2e}, plain PyTorch {accuracy.yardstick:.2e}"
            )
            measurement.notes[name] = f"not accurate: {figures}, largest {accuracy.largest:.2e}"
            if name == subject:
                del calls[name]
    for group in filter(None, (calls, apart)):
        for call in group.values():
            for _ in range(WARMUP):
                call()
        timer.synchronize()
        rounds = rounds_of(
            case,
            implementations,
            group,
            inputs,
            subject,
            timer,
            repetitions,
            seconds,
            seed,
            protocol,
        )
        measurement.timings |= rounds.timings
        measurement.clocks = measurement.clocks or rounds.clocks
        measurement.protocol = measurement.protocol or rounds.protocol
        measurement.notes |= rounds.notes
    for name, timing in measurement.timings.items():
        if timing.late:
            late = "the host was slower than the GPU: launch gaps are in the time"
            notes = [measurement.notes[name], late] if name in measurement.notes else [late]
            measurement.notes[name] = "; ".join(notes)
    return measurement


def rounds_of(
    case: Case,
    implementations: Mapping[str, Implementation],
    calls: Calls,
    inputs: Inputs,
    subject: str,
    timer: Timer,
    repetitions: int,
    seconds: float,
    seed: int,
    protocol: str,
) -> Rounds:
    """Times of the calls, bound to `inputs`, and where inputs rotate to others like them."""
    if not isinstance(timer, StreamTimer):
        return timer.measure(calls, repetitions=repetitions, seconds=seconds)

    def another(place: int) -> Calls:
        others = inputs_of(case, timer, seed + place)
        return {name: bind(implementations[name], others) for name in calls}

    return timer.measure_rotating(
        calls,
        another,
        bytes_moved=case.bytes,
        held=bytes_of(inputs),
        leader=subject if subject in calls else next(iter(calls)),
        repetitions=repetitions,
        seconds=seconds,
        protocol=protocol,
    )


def compare(
    cases: Iterable[Case],
    implementations: Mapping[str, Implementation],
    *,
    subject: str | None = None,
    timer: Timer | None = None,
    device: torch.device | str = "cuda",
    repetitions: int = 100,
    seconds: float = 0.5,
    seed: int = 0,
    checked: bool = True,
    progress: Callable[[Measurement], None] | None = None,
    protocols: Mapping[str, str] | None = None,
) -> list[Measurement]:
    """Measure every implementation on every case.

    `implementations` maps names to callables that take a case's inputs as keywords (or `Prepared`);
    `subject`, by default the first, is the one whose ratios to the others are reported. All get the
    same N(0, 1) inputs, drawn from `seed`. Each is repeated until it has `repetitions` samples or
    the case has taken `seconds` per implementation. Without a `timer`, short calls are timed by the
    protocol `stream` and long ones `cold` (stream.py); `protocols` has the one to take instead, by
    the names of cases. With `checked`, results are first held against the case's oracle, and a
    subject that is not accurate is not timed. `progress` is called after each case. A GPU that an
    error has made unusable ends the run with what there is by then.

        from thunderkittens.bench import compare, table
        from thunderkittens.bench.suites import gemm

        variants = {"new": lambda a, b: new(a, b), "cuBLAS": lambda a, b: a @ b}
        print(table(compare(gemm.cases("rated"), variants)))
    """
    if not implementations:
        raise ValueError(
            "bench.compare: no implementations; expected a mapping of names to callables"
        )
    subject = next(iter(implementations)) if subject is None else subject
    if subject not in implementations:
        raise ValueError(
            f"bench.compare: subject is {subject!r}; expected one of {list(implementations)}"
        )
    timer = make_timer(torch.device(device)) if timer is None else timer
    measurements = []
    for case in cases:
        broken = False
        try:
            with timer.context() if isinstance(timer, StreamTimer) else nullcontext():
                measurement = measure(
                    case,
                    implementations,
                    subject=subject,
                    timer=timer,
                    repetitions=repetitions,
                    seconds=seconds,
                    seed=seed,
                    checked=checked,
                    protocol=(protocols or {}).get(case.name, ""),
                )
        except (torch.OutOfMemoryError, torch.AcceleratorError) as error:
            measurement = Measurement(case, subject, notes={subject: first_line(error)})
            broken = isinstance(error, torch.AcceleratorError)
        measurements.append(measurement)
        if progress is not None:
            progress(measurement)
        if broken:
            break
    return measurements


def geometric_means(measurements: Iterable[Measurement]) -> dict[str, dict[str, float]]:
    """Per group and peer, the geometric mean of the ratios of the group's cases."""
    logarithms: dict[str, dict[str, list[float]]] = {}
    for measurement in measurements:
        for group in measurement.case.groups:
            for peer in measurement.timings:
                ratio = measurement.ratio(peer)
                if peer != measurement.subject and not math.isnan(ratio):
                    logarithms.setdefault(group, {}).setdefault(peer, []).append(math.log(ratio))
    return {
        group: {peer: math.exp(sum(values) / len(values)) for peer, values in peers.items()}
        for group, peers in logarithms.items()
    }
