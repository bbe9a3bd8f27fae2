"""Host time of an eager call: from the call to its return, launches not waited for.

The problems are so small that the GPU is done before the next call; the queue is emptied before
every block all the same, so that no call ever waits for room in it.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

from .timing import Calls, Timing, rotated

HostTimes = dict[str, Timing]


def measure_host(
    calls: Calls,
    synchronize: Callable[[], None],
    *,
    repetitions: int = 2000,
    block: int = 50,
    clock: Callable[[], int] = time.perf_counter_ns,
) -> HostTimes:
    """Times per call, in blocks of `block` calls that alternate between the implementations."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(block):
            call()
    collecting = gc.isenabled()
    gc.disable()
    try:
        for turn in range(max(1, repetitions // block)):
            for name in rotated(list(calls), turn):
                call, times = calls[name], samples[name]
                synchronize()
                for _ in range(block):
                    start = clock()
                    call()
                    times.append((clock() - start) * 1e-3)
    finally:
        if collecting:
            gc.enable()
    synchronize()
    return {name: Timing.of(times) for name, times in samples.items()}
