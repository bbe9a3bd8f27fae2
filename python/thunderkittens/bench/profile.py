"""What limits an op: the share of tensor cores, exponentials, memory and host in its time.

Of a case's own counts (`flops`, `exponentials`, `bytes`, the least that the problem needs) each
limit takes a time; its share is that time over the measured one. A share near 1 says that nothing
more is to be had there; where all are small, time goes into latencies: too little work, waits
between steps, the start and the end of a kernel. The limits are from:

- tensor cores: FLOP per clock and SM of the architecture, SMs, clock;
- exponentials: 16 per clock and SM (CUDA C++ Programming Guide, throughput of native arithmetic
  instructions; the unit is the MUFU), SMs, clock;
- memory: the bandwidth of PyTorch's copy of a large buffer, measured before the cases;
- host: the time that an eager call takes to return, measured behind each case.

The clock is the mean of what the GPU ran at under the case, where NVML says it (nvidia-ml-py), else
the highest that the device's properties have. A protocol that hides launches leaves a host's share
above 1: an eager loop of such calls is as slow as the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch

from .cases import Case, Implementation, Prepared, bind
from .host import measure_host
from .machine import peak_tflops
from .report import Grid, number
from .runner import Measurement
from .stream import StreamTimer
from .timing import Timer

#: Dense FLOP per clock and SM by compute capability and operands. sm_90: a wgmma of 64 x 256 x 16
#: in 128 clocks, and twice that of 8-bit operands, which gives the data sheet's 989 TFLOP/s at 132
#: SMs and 1830 MHz. sm_80: the data sheet's 312 at 108 SMs and 1410 MHz.
TENSOR = {
    (9, 0): {"bf16": 4096.0, "fp8": 8192.0},
    (8, 0): {"bf16": 2048.0},
}
EXPONENTIALS = 16.0
COPIED_BYTES = 1 << 29  # far more than caches hold
HOST_CALLS, HOST_BLOCK = 100, 20
NAMES = ("tensor", "exponentials", "memory", "host")


@dataclass(frozen=True)
class Limits:
    """Of a device, per microsecond: FLOP by operands, exponentials, bytes. Unknown is NaN."""

    tensor: Mapping[str, float]
    exponentials: float
    bytes: float
    clock_mhz: float = math.nan
    clock_from: str = ""


def limits_of(
    properties: Any, bytes_per_us: float, clocks: Mapping[str, float] | None = None
) -> Limits:
    """The limits of a GPU by its properties, or those of a device without: memory alone."""
    if properties is None:
        return Limits({}, math.nan, bytes_per_us)
    mhz = (clocks or {}).get("sm_mhz", 0.0)
    source = "measured under the load" if mhz else "the highest"
    mhz = mhz or getattr(properties, "clock_rate", 0) / 1e3 or math.nan
    per_clock = TENSOR.get((properties.major, properties.minor), {})
    rate = properties.multi_processor_count * mhz  # clocks of all SMs in a microsecond
    sheet = peak_tflops(properties.name)
    tensor = {}
    for operands, flops in per_clock.items():
        # Some products of an architecture have fewer units than others: as their data sheet says.
        known = math.inf if sheet is None else 1.5 * sheet * 1e6 * flops / per_clock["bf16"]
        tensor[operands] = flops * rate if flops * rate <= known else known / 1.5
    return Limits(tensor, EXPONENTIALS * rate, bytes_per_us, mhz, source)


def shares(case: Case, microseconds: float, limits: Limits, host_us: float) -> dict[str, float]:
    """Each limit's time over the measured one; NaN for what the device or the case does not
    have."""
    needs = {
        "tensor": (case.flops, limits.tensor.get(case.operands, math.nan)),
        "exponentials": (case.exponentials, limits.exponentials),
        "memory": (case.bytes, limits.bytes),
        "host": (host_us, 1.0),
    }
    return {
        name: count / rate / microseconds if count > 0 else math.nan
        for name, (count, rate) in needs.items()
    }


def nearest(found: Mapping[str, float]) -> str:
    """The name of the largest share; "" where there is none."""
    known = {name: share for name, share in found.items() if not math.isnan(share)}
    return max(known, key=lambda name: known[name]) if known else ""


def copy_bandwidth(timer: Timer, count: int) -> float:
    """Bytes per microsecond that PyTorch's copy of so many reads and writes."""
    source = torch.ones(count, dtype=torch.uint8, device=timer.device)
    target = torch.empty_like(source)
    rounds = timer.measure({"copy": lambda: target.copy_(source)}, repetitions=20, seconds=1.0)
    return 2 * count / rounds.timings["copy"].median


class Profile:
    """The shares of a run's cases: `watch` the op, and `add` each case behind its measurement."""

    def __init__(self, timer: Timer) -> None:
        self.timer = timer
        on_gpu = timer.device.type == "cuda"
        self.properties: Any = torch.cuda.get_device_properties(timer.device) if on_gpu else None
        self.bytes_per_us = copy_bandwidth(timer, COPIED_BYTES)
        self.call: Callable[[], Any] | None = None
        self.rows: dict[str, dict[str, Any]] = {}

    def watch(self, implementation: Implementation) -> Prepared:
        """The same implementation, whose call on the case's first inputs is kept for `add`."""

        def prepare(**inputs: Any) -> Callable[[], Any]:
            call = bind(implementation, inputs)
            self.call = self.call or call
            return call

        return Prepared(prepare)

    def add(self, measurement: Measurement) -> None:
        """Takes the host's time of a call, and all shares."""
        call, self.call = self.call, None
        if call is None or measurement.failed:
            return
        stream = self.timer.context() if isinstance(self.timer, StreamTimer) else nullcontext()
        with stream:
            times = measure_host(
                {"": call}, self.timer.synchronize, repetitions=HOST_CALLS, block=HOST_BLOCK
            )
        limits = limits_of(self.properties, self.bytes_per_us, measurement.clocks)
        time, host = measurement.timings[measurement.subject].median, times[""].median
        self.rows[measurement.case.name] = {
            "time_us": time,
            "host_us": host,
            "shares": shares(measurement.case, time, limits, host),
            "limits": limits,
        }

    def report(self) -> str:
        """The shares as text."""
        grid = Grid(["", "us", *NAMES, "nearest", "clock, MHz"])
        for name, row in self.rows.items():
            cells = [number(row["shares"][limit], ".0%") for limit in NAMES]
            clock = number(row["limits"].clock_mhz, ".0f")
            grid.rows.append([name, f"{row['time_us']:.1f}", *cells, nearest(row["shares"]), clock])
        lines = [grid.text(), f"Memory: a copy's {self.bytes_per_us / 1e6:.2f} TB/s, measured."]
        if self.properties is not None:
            count = self.properties.multi_processor_count
            sources = {row["limits"].clock_from for row in self.rows.values()}
            lines.append(
                f"Tensor cores and exponentials: {count} SMs at the clock ({', '.join(sources)})."
            )
        lines.append(
            "A share is the time that the limit takes for the op's least work over the op's. The "
            "host's above 100%: a loop of eager calls takes as long as the host."
        )
        return "\n".join(lines)

    def record(self) -> dict[str, Any]:
        """The shares as part of a result file."""

        def finite(value: Any) -> Any:
            if isinstance(value, Mapping):
                return {key: finite(x) for key, x in value.items()}
            if isinstance(value, float):
                return float(f"{value:.6g}") if math.isfinite(value) else None
            return value

        return {
            name: finite({**row, "limits": asdict(row["limits"])})
            for name, row in self.rows.items()
        }
