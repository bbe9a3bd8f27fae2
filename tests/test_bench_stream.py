"""The protocols of the benchmark: how many inputs rotate, what a graph holds, which one times what.

Graphs run on a simulated GPU; the last test is of real ones, where there is a GPU.
"""

from __future__ import annotations

import contextlib
import math

import pytest
import torch

from test_bench_timing import Event, Gpu
from thunderkittens import bench
from thunderkittens.bench import results, stream, timing
from thunderkittens.bench.runner import compare
from thunderkittens.bench.suites import gemm

CPU = torch.device("cpu")
L2 = 50 << 20


@pytest.mark.parametrize(
    ("bytes_moved", "copies"),
    [(1 << 30, 2), (2 * L2 + 1, 2), (2 * L2, 2), (L2, 3), (10 << 20, 11), (1000, 256), (0, 256)],
)
def test_copies_exceed_twice_the_cache(bytes_moved, copies):
    assert stream.copies_for(bytes_moved, L2) == copies
    if 2 < copies < 256:
        assert (copies - 1) * bytes_moved <= 2 * L2 < copies * bytes_moved


def test_copies_keep_the_memory_limit():
    assert stream.copies_for(1 << 20, L2, held=1 << 30, free=40 << 30) == 10
    assert stream.copies_for(1 << 20, L2, held=30 << 30, free=40 << 30) == 2
    assert stream.copies_for(1 << 30, L2, held=1 << 20, free=40 << 30) == 2


@pytest.mark.parametrize("copies", [2, 3, 17, 64, 256])
@pytest.mark.parametrize("microseconds", [0.0, 0.5, 2.0, 30.0, 190.0, 5000.0])
def test_calls_are_whole_turns(copies, microseconds):
    calls = stream.calls_for(microseconds, copies)
    assert calls % copies == 0
    assert copies <= calls <= max(copies, stream.MOST_CALLS)
    if calls + copies <= stream.MOST_CALLS:
        assert calls * microseconds >= stream.REPLAY_US
    assert (calls - copies) * microseconds < stream.REPLAY_US


def test_bytes_of_inputs():
    x = torch.zeros(4, 8, dtype=torch.bfloat16)
    assert stream.bytes_of({"a": x, "again": x.t(), "option": "relu", "nothing": None}) == 64
    assert stream.bytes_of([x[:, :2], {"more": (torch.zeros(3), 7)}]) == 16 + 12
    assert stream.bytes_of({"wide": torch.zeros(1).expand(1000)}) == 4


class Replays(stream.ReplayTimer):
    def __init__(self, gpu: Gpu) -> None:
        super().__init__(CPU)
        self.gpu = gpu

    def clock(self) -> float:
        return self.gpu.host * 1e-6

    def event(self) -> Event:
        return Event(self.gpu)

    def synchronize(self) -> None:
        self.gpu.host = max(self.gpu.host, self.gpu.queue)


class Cold(Replays):
    """A flush before each call, as the simulated timer of test_bench_timing.py."""

    name = "cold"
    enqueue = bench.CudaTimer.enqueue

    def flush(self) -> None:
        for _ in range(self.flushes):
            self.gpu.submit(5, 80)


class Simulated(stream.StreamTimer):
    """Graphs are loops here; a call in one costs the host nothing."""

    def __init__(self, always: bool = False, refused: str = "") -> None:
        self.gpu = Gpu()
        self.device, self.always, self.l2_bytes = CPU, always, L2
        self.cold, self.replays = Cold(self.gpu), Replays(self.gpu)
        self.refused, self.captured = refused, []

    @contextlib.contextmanager
    def context(self):
        yield

    def synchronize(self) -> None:
        self.gpu.host = max(self.gpu.host, self.gpu.queue)

    def free_bytes(self) -> float:
        return 80e9

    def capture(self, calls, count):
        if self.refused and self.refused in calls[0].__name__:
            raise RuntimeError("operation not permitted\nwhen capturing")
        self.captured.append((len(calls), count))

        def replay() -> None:
            self.gpu.host += 5
            self.gpu.queue = max(self.gpu.queue, self.gpu.host)
            for place in range(count):
                self.gpu.queue += calls[place % len(calls)].gpu

        return replay


def named(gpu: Gpu, name: str, host: float, time: float):
    def call() -> None:
        gpu.submit(host, time)

    call.__name__, call.gpu = name, time
    return call


def measured(timer: Simulated, times: dict[str, float], bytes_moved: float = 10 << 20, **options):
    def bind(place: int) -> dict:
        return {name: named(timer.gpu, name, 20, time) for name, time in times.items()}

    return timer.measure_rotating(
        bind(0),
        bind,
        bytes_moved=bytes_moved,
        held=bytes_moved,
        leader=next(iter(times)),
        repetitions=20,
        seconds=1,
        **options,
    )


def test_short_calls_are_streamed():
    timer = Simulated()
    rounds = measured(timer, {"ours": 30.0, "peer": 4.0})
    assert rounds.protocol == "stream"
    assert not rounds.notes
    assert timer.captured == [(11, 11), (11, 55)]
    for name, time in (("ours", 30.0), ("peer", 4.0)):
        timing = rounds.timings[name]
        # Between two replays lies the record of an event.
        assert timing.median == pytest.approx(time, rel=0.01)
        assert timing.repetitions >= 20
        assert not timing.late


def test_long_calls_are_cold_unless_stream_is_asked_for():
    times = {"ours": 900.0, "peer": 20.0}
    timer = Simulated()
    rounds = measured(timer, times)
    assert rounds.protocol == "cold"
    assert not timer.captured
    always = Simulated(always=True)
    rounds = measured(always, times, bytes_moved=1 << 30)
    assert rounds.protocol == "stream"
    assert always.captured == [(2, 2), (2, 10)]
    assert rounds.timings["ours"].median == pytest.approx(900, rel=0.01)


def test_a_protocol_that_is_given():
    """As of an older file, whatever the length is now."""
    for time, protocol in ((190.0, "cold"), (210.0, "stream")):
        rounds = measured(Simulated(), {"ours": time, "peer": 20.0}, protocol=protocol)
        assert rounds.protocol == protocol
    assert measured(Simulated(always=True), {"ours": 30.0}, protocol="cold").protocol == "stream"


def test_clocks_are_the_mean_of_all_batches(monkeypatch):
    read = iter(range(1000, 2000))
    monkeypatch.setattr(timing, "read_clocks", lambda device: {"sm_mhz": float(next(read))})
    gpu = Gpu()
    rounds = Cold(gpu).measure({"a": lambda: gpu.submit(20, 30)}, repetitions=40, seconds=1)
    assert rounds.clocks == {"sm_mhz": (1000 + next(read) - 1) / 2}


def test_what_cannot_be_captured_is_cold_and_says_so():
    timer = Simulated(refused="peer")
    rounds = measured(timer, {"ours": 30.0, "peer": 4.0})
    assert rounds.protocol == "cold"
    assert set(rounds.timings) == {"ours", "peer"}
    assert rounds.notes["peer"].endswith("timed cold: operation not permitted")
    assert rounds.timings["ours"].median == pytest.approx(30)


def test_replays_come_in_random_order():
    gpu, seen = Gpu(), []
    calls = {name: lambda name=name: seen.append(name) for name in "abc"}
    timer = Replays(gpu)
    marks = timer.enqueue(calls, range(200))
    order = [mark.name for mark in marks]
    assert seen[1:] == order  # the first one is not timed
    rounds = [tuple(order[i : i + 3]) for i in range(0, 600, 3)]
    assert all(sorted(one) == list("abc") for one in rounds)
    assert len(set(rounds)) == 6


def test_compare_rotates_its_inputs():
    """Each graph has as many sets of inputs as exceed the cache, drawn from further seeds."""
    timer = Simulated()
    seeds, case = [], gemm.make_case(16, 24, 32, "NN", torch.bfloat16)

    def make_inputs(device, generator):
        seeds.append(generator.initial_seed())
        return case.make_inputs(device, generator)

    def ours(a, b):
        timer.gpu.submit(20, 30)
        return a @ b

    timer.capture = lambda calls, count: lambda: [timer.gpu.submit(1, 30) for _ in range(count)]
    counted = bench.Case("counted", make_inputs, case.flops, L2, oracle=case.oracle)
    (measurement,) = compare([counted], {"ours": ours}, timer=timer, repetitions=3, seed=5)
    assert seeds == [5, 6, 7]
    assert measurement.protocol == "stream"
    assert measurement.accuracies["ours"].passed
    assert "Timed by protocol: stream." in bench.table([measurement])
    assert results.entry(measurement)["protocol"] == "stream"
    other = bench.Measurement(case, "ours", dict(measurement.timings), protocol="cold")
    mixed = bench.table([measurement, other])
    assert "Timed by" not in mixed
    assert all(any(p in line.split() for line in mixed.splitlines()) for p in ("stream", "cold"))


def test_protocol_of_old_files():
    assert results.protocol_of({"settings": {"timer": "CUDA events"}}, {"name": "x"}) == "dirty"
    assert results.protocol_of({"settings": {"timer": "wall clock"}}, {"name": "x"}) == "wall clock"
    new = {"settings": {"protocol": "stream to 200 us, else cold"}}
    assert results.protocol_of(new, {"protocol": "cold"}) == "cold"


def test_timers_of_protocols(device):
    with pytest.raises(ValueError, match="expected one of stream, cold, dirty"):
        bench.make_timer(CPU, "warm")
    with pytest.raises(ValueError, match="expected 'dirty' or 'cold'"):
        bench.CudaTimer(CPU, name="warm")
    if device == "cpu":
        assert isinstance(bench.make_timer(CPU, "cold"), bench.CpuTimer)
        return
    case = gemm.make_case(512, 512, 512, "NT", torch.bfloat16)
    peers = gemm.implementations(torch.device(device))
    synchronizing = {"synchronizes": lambda a, b: (a @ b, a.sum().item())[0]}
    for protocol in (None, *bench.PROTOCOLS):
        timer = bench.make_timer(torch.device(device), protocol)
        (one,) = compare([case], peers, timer=timer, repetitions=10)
        assert one.protocol == (protocol or "stream")
        assert not one.notes
        assert all(0 < timing.median < 1000 for timing in one.timings.values())
    (refused, after) = compare(
        [case, case], {**peers, **synchronizing}, device=device, repetitions=10
    )
    assert refused.protocol == after.protocol == "cold"
    assert "not captured in a CUDA graph" in refused.notes["synchronizes"]
    assert math.isfinite(after.ratio("cuBLAS"))
