"""Two result files held against each other: has the op become slower, and how sure is that?

What is compared. Peers run in the same rounds as the op, so where both files have them, of the same
versions, the figure is the op's time relative to the geometric mean of its peers; else it is the
time itself. Files of different GPUs are not compared.

What it is uncertain by. A file has for each implementation the medians of up to ten blocks of
rounds; since a block's rounds are those of all implementations, the logarithm of a block's ratio is
free of what all have in common, and the spread of the blocks' logarithms is the uncertainty within
a run, drift of clocks included (the method of batch means). A file without blocks gives its
interquartile range as if ten of its repetitions were independent.

Two runs of the same software differ by more than that: by memory addresses, temperature, and
the GPU that was had. `BETWEEN_RUNS` is what peers that had not changed differed by in all pairs of
versions of the files in benchmarks/results/h200 up to November 2026 (1520 ratios of peers and 6027
times; 80 % within 1.1 % and 2.6 %, their means over a file's cases within 0.9 % and 1.9 %): a part
that a run's cases have in common, and a part of each case.

The verdicts. A case is slower, or faster, where Student's t distribution gives less than 1 - the
confidence to a change as large by chance, after Holm's correction for the number of cases looked
at; else there is "no change shown". So is the mean over all cases, which is one more question and
finds a change of everything that no case shows for itself. A regression is a mean or a case that is
slower.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from . import results
from .host import BACKWARD, PLAIN, RECORDING
from .report import Grid, trim
from .timing import WALL_CLOCK

CONFIDENCE = 0.95
SLOWER, FASTER, NO_CHANGE = "slower", "faster", "no change shown"
#: Standard deviations of logarithms: in common to a run's cases, and of a case.
RELATIVE, ABSOLUTE = "relative to peers", "times"
BETWEEN_RUNS = {RELATIVE: (0.007, 0.010), ABSOLUTE: (0.015, 0.018)}
SAME, SAME_HOST = ("torch", "cuda", "cudnn", "driver"), ("processor", "python")
INDEPENDENT = 10  # repetitions of a file without blocks that count as independent
NORMAL_FROM = 200  # degrees of freedom from which Student's t distribution is a normal one
# Of a normal distribution: the standard error of a median over that of a mean, and the
# interquartile range over the standard deviation.
MEDIAN_ERROR, QUARTILES = math.sqrt(math.pi / 2), 1.349


def upper_tail(t: float, freedom: float) -> float:
    """The probability that Student's t is larger than `t`, with whole degrees of freedom.

    Abramowitz and Stegun 26.7.3 and 26.7.4: finite series of powers of the cosine.
    """
    if freedom >= NORMAL_FROM:
        return statistics.NormalDist().cdf(-t)
    n = max(1, math.floor(freedom))
    angle = math.atan(t / math.sqrt(n))
    sine, cosine = math.sin(angle), math.cos(angle)
    if n % 2:
        term, total = cosine, 0.0
        for place in range(3, n + 1, 2):
            total += term
            term *= cosine**2 * (place - 1) / place
        within = 2 / math.pi * (angle + sine * total)
    else:
        term, total = 1.0, 0.0
        for place in range(2, n + 1, 2):
            total += term
            term *= cosine**2 * (place - 1) / place
        within = sine * total
    return (1 - within) / 2


@dataclass(frozen=True)
class Estimate:
    """A mean of logarithms, the variance of that mean, and its degrees of freedom."""

    mean: float
    variance: float
    freedom: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        count = len(values)
        return cls(statistics.fmean(values), statistics.variance(values) / count, count - 1)


def sum_of(parts: Sequence[Estimate], factors: Sequence[float]) -> Estimate:
    """A weighted sum of independent estimates, with Welch's degrees of freedom."""
    variances = [part.variance * f**2 for part, f in zip(parts, factors, strict=True)]
    total = sum(variances)
    spread = sum(v**2 / p.freedom for v, p in zip(variances, parts, strict=True))
    return Estimate(
        sum(part.mean * f for part, f in zip(parts, factors, strict=True)),
        total,
        total**2 / spread if spread else math.inf,
    )


def estimate(times: Mapping[str, Any], peers: Sequence[Mapping[str, Any]]) -> Estimate:
    """The logarithm of a time over the geometric mean of the peers', from one file."""
    everyone = [times, *peers]
    blocks = [t.get("blocks") or [] for t in everyone]
    count = min(map(len, blocks))
    if count > 1:
        ours, *theirs = [[math.log(block) for block in of_one[:count]] for of_one in blocks]
        means = [statistics.fmean(x) for x in zip(*theirs, strict=True)] or [0.0] * count
        return Estimate.of([x - mean for x, mean in zip(ours, means, strict=True)])
    parts = []
    for t in everyone:
        number = max(2, min(INDEPENDENT, t["repetitions"]))
        deviation = (t["quartile_3"] - t["quartile_1"]) / QUARTILES / t["median"]
        variance = (MEDIAN_ERROR * deviation) ** 2 / number
        parts.append(Estimate(math.log(t["median"]), variance, number - 1))
    return sum_of(parts, [1.0, *(-1 / len(peers) for _ in peers)])


@dataclass(frozen=True)
class Change:
    """What became of a case, or of the mean of all: the new figure over the old one."""

    name: str
    estimate: Estimate
    kind: str = RELATIVE
    confidence: float = 0.0
    verdict: str = NO_CHANGE

    @property
    def ratio(self) -> float:
        return math.exp(self.estimate.mean)

    @property
    def chance(self) -> float:
        """The probability of a change as large in this direction where there is none."""
        mean, error = abs(self.estimate.mean), math.sqrt(self.estimate.variance)
        if error == 0:
            return 0.0 if mean else 0.5
        return upper_tail(mean / error, self.estimate.freedom)


def judged(change: Change, chance: float, confidence: float) -> Change:
    """The change with its verdict, by a probability of chance that is corrected."""
    sure = 1 - min(chance, 1.0)
    verdict = (SLOWER if change.estimate.mean > 0 else FASTER) if sure >= confidence else NO_CHANGE
    return replace(change, confidence=sure, verdict=verdict)


def holm(changes: Sequence[Change], confidence: float) -> list[Change]:
    """Each change with its verdict: the k-th least probable of n is held against n + 1 - k times
    its probability, and none is surer than the one before."""
    order = sorted(range(len(changes)), key=lambda place: changes[place].chance)
    result, worst = list(changes), 0.0
    for rank, place in enumerate(order):
        # Both directions are looked at.
        worst = max(worst, 2 * (len(changes) - rank) * changes[place].chance)
        result[place] = judged(changes[place], worst, confidence)
    return result


@dataclass(frozen=True)
class Comparison:
    """The verdicts on two files: on the mean of all cases, and on each."""

    total: Change
    changes: list[Change]
    notes: list[str]

    @property
    def regression(self) -> bool:
        return any(change.verdict == SLOWER for change in (self.total, *self.changes))


def cases_of(content: Mapping[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """(name, protocol) of each case to the times of its subject and of its peers. Of host times,
    each call of this package is a case, whose peers are the others of its kind."""
    if "host_time_us" in content:
        return _host_calls(content["host_time_us"])
    found = {}
    for case in content.get("cases", ()):
        times = {name: r["time_us"] for name, r in case["results"].items() if r["time_us"]}
        if content["subject"] in times:
            peers = {n: t for n, t in times.items() if case["ratios"].get(n) is not None}
            key = (case["name"], results.protocol_of(content, case))
            found[key] = {"subject": times[content["subject"]], "peers": peers}
    return found


def _host_calls(times: Mapping[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    def kind(name: str) -> str:
        return next((k for k in (RECORDING, BACKWARD) if name.endswith(k)), PLAIN)

    ours = [name for name in times if name.startswith("thunderkittens")]
    return {
        (name, "host"): {
            "subject": times[name],
            "peers": {n: times[n] for n in times if n not in ours and kind(n) == kind(name)},
        }
        for name in ours
    }


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What of the two machines' records would change the peers, too."""
    on_host = "host_time_us" in new or new.get("settings", {}).get("timer") == WALL_CLOCK
    names = (*SAME, *(SAME_HOST if on_host else ()))
    before, after = old.get("machine", {}), new.get("machine", {})
    if before.get("device") != after.get("device"):
        raise ValueError(f"the files are of {before.get('device')} and of {after.get('device')}")
    return [
        f"{name} was {before.get(name)} and is {after.get(name)}: times are compared, not ratios "
        "to peers."
        for name in names
        if before.get(name) != after.get(name)
    ]


def missing(text: str, these: Mapping[Any, Any], those: Mapping[Any, Any]) -> list[str]:
    """A note on the cases that one file has alone."""
    names = [f"{name} ({protocol})" for name, protocol in these if (name, protocol) not in those]
    if not names:
        return []
    more = ", ..." if len(names) > 5 else ""
    return [f"Of cases, {len(names)} {text}: {', '.join(names[:5])}{more}"]


def compare_files(
    old: Mapping[str, Any], new: Mapping[str, Any], confidence: float = CONFIDENCE
) -> Comparison:
    """The verdicts on the cases that two result files of an op have in common.

    Raises:
        ValueError: the files are of different ops or devices, or have no case in common; the
            confidence is none.
    """
    if not 0.5 < confidence < 1:
        raise ValueError(f"--confidence is {confidence}; expected a number between 0.5 and 1")
    if old.get("op") != new.get("op"):
        raise ValueError(f"the files are of {old.get('op')} and of {new.get('op')}")
    notes, before, after = differences(old, new), cases_of(old), cases_of(new)
    common = [key for key in after if key in before]
    if not common:
        raise ValueError("the files have no case in common, by name and protocol")
    share, kinds, within, changes = 1 / len(common), [], [], []
    for key in common:
        peers = [] if notes else [n for n in after[key]["peers"] if n in before[key]["peers"]]
        kinds.append(RELATIVE if peers else ABSOLUTE)
        both = [
            estimate(of_file[key]["subject"], [of_file[key]["peers"][name] for name in peers])
            for of_file in (before, after)
        ]
        within.append(sum_of(both, (-1.0, 1.0)))
        of_run, of_case = BETWEEN_RUNS[kinds[-1]]
        between = Estimate(0.0, of_run**2 + of_case**2, math.inf)
        changes.append(Change(key[0], sum_of([within[-1], between], (1.0, 1.0)), kinds[-1]))
    of_run = max(BETWEEN_RUNS[kind][0] for kind in kinds)
    of_cases = sum(BETWEEN_RUNS[kind][1] ** 2 for kind in kinds) * share**2
    between = Estimate(0.0, of_run**2 + of_cases, math.inf)
    mean = sum_of([*within, between], [*([share] * len(within)), 1.0])
    total = Change("mean", mean, "" if len(set(kinds)) > 1 else kinds[0])
    notes += missing("are new", after, before) + missing("are gone, or failed", before, after)
    return Comparison(judged(total, 2 * total.chance, confidence), holm(changes, confidence), notes)


def report(comparison: Comparison) -> str:
    """The verdicts as text, the largest changes first."""
    changes = sorted(comparison.changes, key=lambda change: -change.estimate.mean)
    total = replace(comparison.total, name=f"mean of {len(changes)} cases")
    grid = Grid(["", "new / old", "change", "uncertainty", "verdict", "confidence"])
    grid.sections.append(len(changes))
    for change in (*changes, total):
        error = math.sqrt(change.estimate.variance)
        # Rounded down: 100 % it never is.
        sure = f"{math.floor(min(change.confidence, 0.9999) * 1e4) / 100:.2f}%"
        shown = "-" if change.verdict == NO_CHANGE else sure
        figures = [f"{change.ratio - 1:+.1%}", f"{error:.1%}", change.verdict, shown]
        grid.rows.append([change.name, change.kind, *figures])
    counts = [sum(c.verdict == v for c in changes) for v in (SLOWER, FASTER, NO_CHANGE)]
    return trim(
        "\n".join(
            [
                grid.text(),
                *comparison.notes,
                "Above 0 is slower; the uncertainty is a standard deviation, with what two runs of "
                "the same differ by.",
                "{} slower, {} faster, {} without a change that shows".format(*counts)
                + f"; in all: {total.verdict}.",
            ]
        )
    )


def read(path: Path) -> dict[str, Any]:
    """A result file. ValueError for what is none."""
    try:
        content = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no result file: {error}") from None
    if not isinstance(content, dict) or content.get("schema") != results.SCHEMA:
        raise ValueError(f"{path} is no result file of schema {results.SCHEMA}")
    return content


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("old", type=Path, help="a result file")
    parser.add_argument("new", type=Path, help="another one of the same op")
    add_confidence(parser)


def add_confidence(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--confidence",
        type=float,
        default=CONFIDENCE,
        help=f"from which a change counts as one (default: {CONFIDENCE})",
    )
