"""The regret of a choice: every kernel that could run a drawn problem, beside the chosen one.

All candidates are checked and timed shortly behind a flushed cache; those near the best one, and
the choice, again by the protocol of the run. A problem's regret is the best time over that of the
choice: 1 is a perfect choice, and how far a perfect one is from the peers says what kernels are
missing. A kernel's worth is what the best of the others would need more on the problems it wins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .cases import Case, Implementation
from .drawn import WORST, geometric_mean
from .forced import Fields, candidates, forcing, labels
from .report import Grid, number
from .runner import Measurement, compare
from .timing import Timer

FINALISTS = 1.25  # times of the first look, over its best, that are looked at again
FIRST_REPETITIONS, FIRST_SECONDS = 3, 0.02
EVEN = 0.98  # choices that lose less are as good as the best


@dataclass
class Regret:
    """What the candidates of one problem need, in us: at the first look, and the finalists."""

    case: Case
    chosen: str
    kernels: dict[str, str]  # of each candidate
    first: dict[str, float] = field(default_factory=dict)
    final: dict[str, float] = field(default_factory=dict)
    protocol: str = ""
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def best(self) -> str:
        return min(self.final, key=lambda label: self.final[label])

    @property
    def value(self) -> float:
        """The best time over that of the choice; NaN where the choice has none."""
        if self.chosen not in self.final:
            return math.nan
        return self.final[self.best] / self.final[self.chosen]

    def by_kernel(self) -> dict[str, float]:
        """The best time of each kernel that was timed: at the last look, else scaled to it."""
        if not self.final:
            return {}
        common = [self.final[x] / self.first[x] for x in self.final if x in self.first]
        scale = geometric_mean(common) if common else 1.0
        times: dict[str, float] = {}
        for label, first in self.first.items():
            time = self.final.get(label, first * scale)
            kernel = self.kernels[label]
            times[kernel] = min(time, times.get(kernel, math.inf))
        return times


def medians(measurement: Measurement) -> dict[str, float]:
    """Times of the implementations that are accurate."""
    return {
        name: timing.median
        for name, timing in measurement.timings.items()
        if name not in measurement.accuracies or measurement.accuracies[name].passed
    }


def measure_case(
    case: Case,
    found: Sequence[Fields],
    make: Callable[[Fields], Implementation],
    *,
    first_timer: Timer,
    timer: Timer,
    repetitions: int,
    seconds: float,
    seed: int,
) -> Regret:
    """Times the candidates of one problem; the first one is the choice."""
    names = labels(found)
    variants = {name: make(fields) for name, fields in zip(names, found, strict=True)}
    kernels = {name: str(f["kernel"]) for name, f in zip(names, found, strict=True)}
    regret = Regret(case, names[0], kernels)
    (first,) = compare(
        [case], variants, timer=first_timer, seed=seed,
        repetitions=FIRST_REPETITIONS, seconds=FIRST_SECONDS,
    )  # fmt: skip
    regret.first = medians(first)
    # Launch gaps of a first look say nothing: the second one is by graphs.
    regret.notes = {name: note for name, note in first.notes.items() if name not in regret.first}
    if not regret.first:
        return regret
    limit = FINALISTS * min(regret.first.values())
    finalists = {
        name: variants[name]
        for name, time in regret.first.items()
        if time <= limit or name == regret.chosen
    }
    (final,) = compare(
        [case], finalists, timer=timer, seed=seed,
        repetitions=repetitions, seconds=seconds, checked=False,
    )  # fmt: skip
    regret.final, regret.protocol = medians(final), final.protocol
    regret.notes |= final.notes
    return regret


def measure(
    op: str,
    cases: Iterable[Case],
    implementation: Implementation,
    force: Any,
    gpu: Mapping[str, Any],
    *,
    first_timer: Timer,
    timer: Timer,
    repetitions: int,
    seconds: float,
    seed: int,
) -> list[Regret]:
    """The regret of each case whose op says what could run."""
    result = []
    for case in cases:
        found = candidates(op, case.parameters["problem"], gpu)
        if not found:
            continue

        def make(fields: Fields) -> Implementation:
            return forcing(implementation, op, fields, force)

        regret = measure_case(
            case, found, make, first_timer=first_timer, timer=timer,
            repetitions=repetitions, seconds=seconds, seed=seed,
        )  # fmt: skip
        result.append(regret)
    return result


# What it says.


@dataclass(frozen=True)
class Worth:
    """A kernel's problems: how many it was timed on, was chosen for and wins, and what the best of
    the others would need more on those, as a geometric mean and at most."""

    kernel: str
    timed: int
    chosen: int
    won: int
    gain: float
    most: float


def worths(regrets: Sequence[Regret]) -> list[Worth]:
    """A row per kernel, those that win most first."""
    timed: dict[str, int] = {}
    chosen: dict[str, int] = {}
    gains: dict[str, list[float]] = {}
    for regret in regrets:
        times = regret.by_kernel()
        for kernel in times:
            timed[kernel] = timed.get(kernel, 0) + 1
        kernel = regret.kernels[regret.chosen]
        chosen[kernel] = chosen.get(kernel, 0) + 1
        if len(times) > 1:
            winner, second = sorted(times, key=lambda name: times[name])[:2]
            gains.setdefault(winner, []).append(times[second] / times[winner])
    rows = [
        Worth(
            kernel,
            timed.get(kernel, 0),
            chosen.get(kernel, 0),
            len(gains.get(kernel, [])),
            geometric_mean(gains[kernel]) if kernel in gains else math.nan,
            max(gains[kernel]) if kernel in gains else math.nan,
        )
        for kernel in {**timed, **chosen}
    ]
    return sorted(rows, key=lambda row: (-row.won, -row.chosen, row.kernel))


def resources(op: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """What the build says of the op's kernels, by name, from `info.kernels()`.

    Seconds are those of the file, which may hold several.
    """
    result: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row.get("op") != op or "name" not in row:
            continue
        none = {"registers": 0, "code_bytes": 0, "seconds": 0.0}
        of_name = result.setdefault(str(row["name"]), none)
        of_name["registers"] = max(of_name["registers"], int(row.get("registers") or 0))
        of_name["code_bytes"] += int(row.get("code_bytes") or 0)
        of_name["seconds"] = max(of_name["seconds"], float(row.get("seconds") or 0.0))
    return result


def report(regrets: Sequence[Regret], built: Mapping[str, Mapping[str, Any]]) -> str:
    """The regret as a whole, the worst ten, and a row per kernel, as text."""
    known = [regret for regret in regrets if not math.isnan(regret.value)]
    values = [regret.value for regret in known]
    grid = Grid(
        ["regret of the choice", "shapes", "geometric mean", "as good as the best", "least"]
    )
    groups: dict[str, list[float]] = {"all": values}
    for regret in known:
        for group in regret.case.groups:
            groups.setdefault(group, []).append(regret.value)
    for group, of_group in groups.items():
        even = sum(value >= EVEN for value in of_group) / max(len(of_group), 1)
        least = min(of_group, default=math.nan)
        cells = [number(geometric_mean(of_group), ".3f"), f"{even:.0%}", number(least, ".3f")]
        grid.rows.append([group, str(len(of_group)), *cells])
    table = Grid([f"worst {WORST}", "regret", "chosen us", "best us", "chosen", "best", "protocol"])
    for regret in sorted(known, key=lambda regret: regret.value)[:WORST]:
        times = [f"{regret.final[x]:.1f}" for x in (regret.chosen, regret.best)]
        names = [regret.chosen, regret.best, regret.protocol]
        table.rows.append([regret.case.name, number(regret.value, ".3f"), *times, *names])
    headings = ["kernel", "timed", "chosen", "won", "gain", "at most"]
    audit = Grid([*headings, "registers", "code bytes", "file's seconds"])
    for row in worths(regrets):
        figures = built.get(row.kernel, {})
        cells = [str(row.timed), str(row.chosen), str(row.won)]
        cells += [number(row.gain, ".3f"), number(row.most, ".3f")]
        cells += [str(figures.get(key, "-")) for key in ("registers", "code_bytes", "seconds")]
        audit.rows.append([row.kernel, *cells])
    notes = [
        f"{regret.case.name}, {name}: {note}"
        for regret in regrets
        for name, note in regret.notes.items()
    ]
    return "\n".join([grid.text(), table.text(), audit.text(), *notes])


def record(regrets: Sequence[Regret], built: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The content of a result file, less what all have."""

    def rounded(value: float) -> float | None:
        return float(f"{value:.6g}") if math.isfinite(value) else None

    values = [regret.value for regret in regrets if not math.isnan(regret.value)]
    return {
        "regret": {
            "geometric_mean": rounded(geometric_mean(values)),
            "least": rounded(min(values, default=math.nan)),
            "share_as_good": sum(value >= EVEN for value in values) / max(len(values), 1),
        },
        "shapes": [
            {
                "name": regret.case.name,
                "parameters": dict(regret.case.parameters),
                "protocol": regret.protocol,
                "chosen": regret.chosen,
                "best": regret.best if regret.final else None,
                "regret": rounded(regret.value),
                "first_us": {name: rounded(time) for name, time in regret.first.items()},
                "time_us": {name: rounded(time) for name, time in regret.final.items()},
                "kernels": regret.kernels,
                "notes": regret.notes,
            }
            for regret in regrets
        ],
        "kernels": [
            {
                "name": row.kernel,
                "timed": row.timed,
                "chosen": row.chosen,
                "won": row.won,
                "gain": rounded(row.gain),
                "most": rounded(row.most),
                **built.get(row.kernel, {}),
            }
            for row in worths(regrets)
        ],
    }
