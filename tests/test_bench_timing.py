"""The benchmark's timers: statistics of repetitions, the CPU's and the GPU's clock, time limits.

The CUDA timer runs on a simulated GPU with a clock of its own.
"""

from __future__ import annotations

import math

import pytest
import torch

from thunderkittens import bench
from thunderkittens.bench.timing import MAX_FLUSHES, rotated

CPU = torch.device("cpu")


def test_timing_of_samples():
    timing = bench.Timing.of([4.0, 1.0, 2.0, 3.0, 100.0])
    assert (timing.median, timing.quartile_1, timing.quartile_3) == (3.0, 2.0, 4.0)
    assert (timing.minimum, timing.repetitions) == (1.0, 5)
    assert timing.spread == pytest.approx(2 / 3)
    assert bench.Timing.of([7.0]).quartile_3 == 7.0
    with pytest.raises(ValueError, match="no samples"):
        bench.Timing.of([])


def test_every_call_leads_in_its_turn():
    assert [rotated(["a", "b", "c"], turn)[0] for turn in range(4)] == ["a", "b", "c", "a"]
    assert rotated(["a", "b", "c"], 5) == ["c", "a", "b"]


class Clock:
    """A clock that only moves when told to, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def work(self, seconds: float):
        def call() -> None:
            self.now += seconds

        return call


def test_cpu_timer():
    clock = Clock()
    calls = {"fast": clock.work(1e-6), "slow": clock.work(5e-6)}
    rounds = bench.CpuTimer(clock).measure(calls, repetitions=9, seconds=1)
    assert rounds.timings["fast"].median == pytest.approx(1)
    assert rounds.timings["slow"].median == pytest.approx(5)
    assert rounds.timings["slow"].repetitions == 9


def test_step_timer():
    """Of calls of four steps, and the wait for the device counts."""
    clock, waits = Clock(), []

    class Waiting(bench.StepTimer):
        def synchronize(self) -> None:
            waits.append(clock.now)
            clock.now += 8e-6

    timer = Waiting(CPU, 4, clock)
    calls = {"fast": clock.work(4e-6), "slow": clock.work(32e-6)}
    timings = timer.measure(calls, repetitions=3, seconds=1).timings
    for name, time in (("fast", 3), ("slow", 10)):
        timing = timings[name]
        times = (timing.minimum, timing.quartile_1, timing.median, timing.quartile_3)
        assert times == pytest.approx((time,) * 4)
        assert timing.repetitions == 3
    assert len(waits) == 1 + 2 * 3
    assert timer.protocol() == {"timer": "wall clock", "steps": 4}


def test_cpu_timer_keeps_the_time_limit():
    clock = Clock()
    rounds = bench.CpuTimer(clock).measure({"slow": clock.work(2)}, repetitions=9, seconds=3)
    assert rounds.timings["slow"].repetitions == 2


class Gpu:
    """A host and a queue, in microseconds: what is submitted runs in order, when it can."""

    def __init__(self) -> None:
        self.host = self.queue = 0.0

    def submit(self, host: float, gpu: float) -> None:
        self.host += host
        self.queue = max(self.queue, self.host) + gpu

    def call(self, host: float, gpu: float):
        return lambda: self.submit(host, gpu)


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.time = gpu, math.nan

    def record(self) -> None:
        self.gpu.submit(1, 0)
        self.time = self.gpu.queue

    def query(self) -> bool:
        return self.time <= self.gpu.host

    def elapsed_time(self, end: Event) -> float:
        return (end.time - self.time) / 1e3


class SimulatedTimer(bench.CudaTimer):
    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.device, self.flush_bytes, self.flushes = gpu, CPU, 1, 1

    def clock(self) -> float:
        return self.gpu.host * 1e-6

    def event(self) -> Event:
        return Event(self.gpu)

    def flush(self) -> None:
        for _ in range(self.flushes):
            self.gpu.submit(5, 80)

    def synchronize(self) -> None:
        self.gpu.host = max(self.gpu.host, self.gpu.queue)


def test_cuda_timer_times_the_gpu_alone():
    gpu = Gpu()
    timer = SimulatedTimer(gpu)
    calls = {"a": gpu.call(host=20, gpu=30), "b": gpu.call(host=40, gpu=7)}
    timings = timer.measure(calls, repetitions=50, seconds=1).timings
    assert timings["a"].median == pytest.approx(30)
    assert timings["b"].median == pytest.approx(7)
    assert timings["b"].repetitions >= 50
    assert not timings["b"].late
    assert timer.flushes == 1


def test_cuda_timer_stays_ahead_of_a_slow_host():
    gpu = Gpu()
    timer = SimulatedTimer(gpu)
    calls = {"slow host": gpu.call(host=300, gpu=10), "fast host": gpu.call(host=5, gpu=10)}
    timings = timer.measure(calls, repetitions=20, seconds=10).timings
    for timing in timings.values():
        assert timing.median == timing.quartile_3 == pytest.approx(10)
        assert not timing.late
    assert timer.flushes >= 4


def test_cuda_timer_tells_when_the_host_is_too_slow():
    gpu = Gpu()
    timer = SimulatedTimer(gpu)
    calls = {"hopeless": gpu.call(host=5000, gpu=10), "fine": gpu.call(host=5, gpu=10)}
    timings = timer.measure(calls, repetitions=20, seconds=10).timings
    assert timings["hopeless"].late
    assert timings["hopeless"].median > 10
    assert not timings["fine"].late
    assert timer.flushes <= MAX_FLUSHES


def test_cuda_timer_keeps_the_time_limit():
    gpu = Gpu()
    calls = {"long": gpu.call(host=20, gpu=50_000)}
    timings = SimulatedTimer(gpu).measure(calls, repetitions=1000, seconds=0.5).timings
    assert 5 <= timings["long"].repetitions <= 15
    assert gpu.host * 1e-6 < 1


def test_timer_of_the_device(device):
    timer = bench.make_timer(torch.device(device))
    x = torch.randn(64, 64, device=device)
    timings = timer.measure({"copy": x.clone, "sum": x.sum}, repetitions=5, seconds=5).timings
    assert all(timing.repetitions >= 5 for timing in timings.values())
    assert all(timing.median > 0 for timing in timings.values())
    if device != "cpu":
        l2_bytes = torch.cuda.get_device_properties(timer.device).L2_cache_size
        assert timer.cold.flush_bytes > 2 * l2_bytes
