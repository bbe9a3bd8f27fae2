"""The bars that attention is held to, from the measurements of a run.

The best known kernel at a point, and the time that reading a number of bytes takes, are in
`benchmarks/anchors_<gpu>.json` of a source tree, where its note says what they are.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from .report import Grid
from .runner import Measurement

ANCHORS = Path("benchmarks")
CUDNN = "cuDNN"
GRID_MEANS = {"forward": 1.05, "backward": 1.155}
# Of a case to its baseline, by what its name holds; the first that fits.
COSTS = (
    (", ALiBi, sink", "", 0.0),
    ("deterministic", "deterministic order, to the default one", 0.85),
    ("window 1024", "window of 1024 at N = 16384, to full causal", 5.0),
    ("softcap", "softcap, ALiBi, sink, to none", 1 / 1.15),
    ("ALiBi", "softcap, ALiBi, sink, to none", 1 / 1.15),
    ("sink", "softcap, ALiBi, sink, to none", 1 / 1.15),
    (" heads on ", "grouped heads, to as many heads of k", 1.0),
    (" alone", "some gradients, to all", 1.0),
    (" x ", "sequences of one length, to a batch", 1 / 1.05),
)


@dataclass(frozen=True)
class Bar:
    """A figure, and what it must at least (`least`) or at most be."""

    name: str
    value: float
    limit: float
    least: bool = True

    @property
    def met(self) -> bool:
        return self.value >= self.limit if self.least else self.value <= self.limit


def anchors(slug: str, folder: Path = ANCHORS) -> dict[str, Any] | None:
    """The anchors for a GPU; None where there are none."""
    path = folder / f"anchors_{slug}.json"
    return json.loads(path.read_text()) if path.is_file() else None


def mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def read_floor(table: Sequence[Sequence[float]], megabytes: float) -> float:
    """Microseconds to read so many megabytes: between two points by proportion, beyond the last by
    the slope of the last two."""
    pairs = list(pairwise(table))
    low, high = next((pair for pair in pairs if megabytes <= pair[1][0]), pairs[-1])
    return low[1] + (megabytes - low[0]) * (high[1] - low[1]) / (high[0] - low[0])


def of_grid(measurements: Iterable[Measurement], best: dict[str, Any]) -> list[Bar]:
    """To cuDNN over the points that have an anchor, and to the best kernel at each."""
    bars = []
    for direction, limit in GRID_MEANS.items():
        known = {(p["head_dim"], p["causal"], p["length"]): p["ratio"] for p in best[direction]}
        found: dict[int, list[tuple[str, float, float]]] = {}
        for m in measurements:
            p = m.case.parameters
            key = (p.get("head_dim"), p.get("causal"), p.get("length"))
            tokens = p.get("batch", 0) * p.get("length", 0)
            plain = p.get("direction") == direction and tokens == 16384 and "options" not in p
            if plain and "needs" not in p and key in known and not math.isnan(m.ratio(CUDNN)):
                ratio = m.ratio(CUDNN)
                found.setdefault(p["head_dim"], []).append((m.case.name, ratio, ratio / known[key]))
        every = [row for rows in found.values() for row in rows]
        if not every:
            continue
        title = f"{direction}, {len(every)} of {len(known)} points"
        bars.append(Bar(f"{title}: mean to cuDNN", mean([r for _, r, _ in every]), limit))
        for dim, rows in sorted(found.items()):
            name = f"{direction}, D = {dim}: mean to the best"
            bars.append(Bar(name, mean([to_best for *_, to_best in rows]), 0.96))
        name, _, worst = min(every, key=lambda row: row[2])
        bars.append(Bar(f"{direction}: worst point to the best ({name})", worst, 0.90))
    return bars


def of_costs(measurements: Iterable[Measurement]) -> list[Bar]:
    """Of cases with a baseline: the worst of each kind; of partial gradients every one."""
    worst: dict[str, Bar] = {}
    for m in measurements:
        ratio = m.ratio("baseline")
        if math.isnan(ratio):
            continue
        direction = str(m.case.parameters.get("direction"))
        fitting = (row for row in COSTS if row[0] in m.case.name)
        _, text, limit = next(fitting, ("", "", 0.0))
        if not text:
            continue
        bar = Bar(f"{direction}, {text} ({m.case.name})", ratio, limit)
        key = f"{direction} {text}"
        if key not in worst or ratio < worst[key].value:
            worst[key] = bar
    return list(worst.values())


def of_groups(measurements: Sequence[Measurement]) -> list[Bar]:
    """Means to cuDNN of the sets that must be ahead of it."""
    bars = []
    for group in ("forward 192/128", "backward 192/128", "forward B=1", "backward B=1"):
        ratios = [m.ratio(CUDNN) for m in measurements if group in m.case.groups]
        ratios = [r for r in ratios if not math.isnan(r)]
        if ratios:
            bars.append(Bar(f"{group}: mean to cuDNN", mean(ratios), 1.0))
    return bars


def of_decoding(measurements: Iterable[Measurement], table: Sequence[Sequence[float]]) -> list[Bar]:
    """Times of one query row over the time to read the keys and values."""
    return [
        Bar(
            f"{m.case.name}: time over the read floor",
            m.timings[m.subject].median / read_floor(table, m.case.bytes / 1e6),
            1.3,
            least=False,
        )
        for m in measurements
        if m.case.parameters.get("rows") == 1 and not m.failed
    ]


def table(measurements: Sequence[Measurement], slug: str, folder: Path = ANCHORS) -> str:
    """The bars that the measurements allow, as text; empty when there are none."""
    known = anchors(slug, folder)
    bars = [*of_costs(measurements), *of_groups(measurements)]
    if known is not None:
        grid: Callable[..., list[Bar]] = of_grid
        bars = [*grid(measurements, known["best"]), *bars]
        bars += of_decoding(measurements, known["read_floor"])
    if not bars:
        return ""
    rows = Grid(["bar", "value", "limit", "met"])
    for bar in bars:
        limit = f"{'>=' if bar.least else '<='} {bar.limit:.3f}"
        rows.rows.append([bar.name, f"{bar.value:.3f}", limit, "yes" if bar.met else "NO"])
    return rows.text()
