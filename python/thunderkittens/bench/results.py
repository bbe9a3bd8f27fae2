"""Results as JSON: what `--json` and `--save` write, and what plots and READMEs are made from.

Schema 1: `op`, `machine` (the record), `settings`, and either `cases` with `geometric_means`, or
`host_time_us`. Times are in microseconds; a figure that does not exist is null. A case names the
protocol of its times; in files without one it is `dirty`. Drawn shapes have a summary, `drawn`.
A time's `blocks`, which older files lack, are what `comparison` takes its uncertainty from.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .host import HostTimes
from .runner import Measurement, geometric_means
from .timing import DIRTY, WALL_CLOCK

SCHEMA = 1


def finite(value: float) -> float | None:
    """Six significant digits; None for NaN and infinity, which JSON does not have."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def plain(record: Any) -> dict[str, Any] | None:
    """A dataclass of figures as a dictionary; None stays None."""

    def rounded(value: Any) -> Any:
        if isinstance(value, tuple):
            return [rounded(item) for item in value]
        return finite(value) if isinstance(value, float) else value

    return None if record is None else {k: rounded(x) for k, x in asdict(record).items()}


def result(measurement: Measurement, name: str) -> dict[str, Any]:
    """The figures of one implementation in one case."""
    return {
        "time_us": plain(measurement.timings.get(name)),
        "tflops": finite(measurement.tflops(name)),
        "gigabytes_per_second": finite(measurement.gigabytes_per_second(name)),
        "accuracy": plain(measurement.accuracies.get(name)),
        "note": measurement.notes.get(name),
    }


def entry(measurement: Measurement) -> dict[str, Any]:
    """One case with the results of all implementations."""
    case = measurement.case
    names = list(dict.fromkeys([*measurement.timings, *measurement.notes]))
    return {
        "name": case.name,
        "groups": list(case.groups),
        "parameters": dict(case.parameters),
        "flops": case.flops,
        "bytes": case.bytes,
        "exponentials": case.exponentials,
        "operands": case.operands,
        "protocol": measurement.protocol,
        "kernel": measurement.kernel,
        "failed": measurement.failed,
        "clocks": {key: finite(value) for key, value in measurement.clocks.items()},
        "results": {name: result(measurement, name) for name in names},
        "ratios": {
            name: finite(measurement.ratio(name)) for name in names if name != measurement.subject
        },
    }


def document(
    op: str,
    measurements: Sequence[Measurement],
    *,
    machine: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """The content of a result file of GPU times."""
    means = geometric_means(measurements)
    return {
        "schema": SCHEMA,
        "op": op,
        "subject": measurements[0].subject if measurements else None,
        "machine": dict(machine),
        "settings": dict(settings),
        "cases": [entry(measurement) for measurement in measurements],
        "geometric_means": {
            group: {peer: finite(value) for peer, value in peers.items()}
            for group, peers in means.items()
        },
    }


def host_document(
    op: str, times: HostTimes, *, machine: Mapping[str, Any], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """The content of a result file of host times."""
    return {
        "schema": SCHEMA,
        "op": op,
        "machine": dict(machine),
        "settings": dict(settings),
        "host_time_us": {name: plain(timing) for name, timing in times.items()},
    }


def protocol_of(content: Mapping[str, Any], case: Mapping[str, Any]) -> str:
    """The protocol of a case of a result file, also of one from before there were several."""
    settings = content.get("settings", {})
    old = WALL_CLOCK if settings.get("timer") == WALL_CLOCK else DIRTY
    return str(case.get("protocol") or settings.get("protocol") or old)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write `content`, making the folder where needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
