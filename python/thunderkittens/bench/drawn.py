"""Drawn shapes: problems from a seed instead of a list, and how the op does on them as a whole.

Every draw has a generator of its own, made of op, seed, class and number, so that the first ten of
a seed are the same however many are drawn. Sizes are log-uniform. Class `aligned` is what TMA can
read: each contiguous dimension and each pitch a multiple of 16 bytes; in class `any` they are what
comes. Ops that take only some sizes draw among those.

A case's score is the time of the best peer over the op's. Where the yardstick is a copy that moves
other bytes than the op, it is the op's bandwidth over the copy's; where there is no peer, the op's
work per time over the best of its kind in the run, of cases of 64 MB and more. 1 and more is good.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from .cases import Case
from .report import Grid, number
from .runner import Measurement

T = TypeVar("T")

ALIGNED, ANY = CLASSES = ("aligned", "any")
LOW_SCORE = 0.95
LARGE_BYTES = 64e6  # where the time of an op is that of its work
WORST = 10
MOST_TRIES = 1000
DTYPES = (torch.bfloat16, torch.float16)
CODES = {torch.bfloat16: "bf16", torch.float16: "fp16"}  # as the compiled choose() names them


@dataclass
class Draw:
    """The choices of one case. `forms` are the kinds of problems to draw among, `dtypes` theirs."""

    op: str
    seed: int
    kind: str
    index: int
    forms: tuple[str, ...] = ("",)
    dtypes: tuple[torch.dtype, ...] = DTYPES
    random: random.Random = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.random = random.Random(f"{self.op} {self.seed} {self.kind} {self.index}")
        self.form = self.choice(self.forms)
        self.dtype = self.choice(self.dtypes)

    @property
    def code(self) -> str:
        """The dtype's name in problems."""
        return CODES[self.dtype]

    @property
    def aligned(self) -> bool:
        return self.kind == ALIGNED

    def choice(self, options: Sequence[T]) -> T:
        return options[self.random.randrange(len(options))]

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def size(self, low: int, high: int, multiple: int = 1) -> int:
        """Log-uniform in low..high, rounded to a multiple, which is at least one."""
        value = math.exp(self.random.uniform(math.log(low), math.log(high)))
        most = max(high // multiple, 1)
        return multiple * min(max(round(value / multiple), 1), most)

    def padding(self, multiple: int) -> int:
        """Elements between a row's end and the next row: mostly none, else up to 128; in class
        `aligned` a multiple of the given number of elements, which are 16 bytes."""
        if not self.chance(0.25):
            return 0
        return self.size(multiple, 128, multiple) if self.aligned else self.size(1, 128)

    def split(self, total: int, parts: int) -> list[int]:
        """Sizes of groups, some of them empty, that add up to `total`."""
        cuts = sorted(self.random.randint(0, total) for _ in range(parts - 1))
        return [end - begin for begin, end in zip([0, *cuts], [*cuts, total], strict=True)]

    def name(self, text: str) -> str:
        """A case's name: unique, since two draws may give the same sizes."""
        return f"{self.kind} {self.index}: {text}"

    def groups(self, *more: str) -> tuple[str, ...]:
        """The sets over which ratios are averaged."""
        names = (self.kind, *([self.form] if self.form else []), *more)
        return tuple(dict.fromkeys([self.kind, *(f"{self.kind}, {x}" for x in names[1:])]))

    def problem(self, **fields: Any) -> dict[str, Any]:
        """The fields of a problem, the dtype among them, as the compiled choose() takes them."""
        return {"dtype": self.code, **fields}

    def case(self, case: Case, text: str = "", *more: str, **parameters: Any) -> Case:
        """`case` as a drawn one, with further parameters; `problem` is what `problem` returns, and
        `text` the name where it is not that of the case and the dtype."""
        return replace(
            case,
            name=self.name(text or f"{case.name}, {self.code}"),
            groups=self.groups(*more),
            parameters={**case.parameters, "class": self.kind, "form": self.form, **parameters},
        )


def forms_of(suite: Any, wanted: str | None) -> tuple[str, ...]:
    """The forms to draw among: all that are wanted, else the suite's usual ones."""
    known: tuple[str, ...] = getattr(suite, "DRAWN_FORMS", ("",))
    if wanted is None:
        return tuple(getattr(suite, "DRAWN_DEFAULT", known))
    names = tuple(name.strip() for name in wanted.split(",") if name.strip())
    for name in names:
        if name not in known or not name:
            raise ValueError(f"--draw has {name!r}; expected a part of {','.join(known)}")
    return names


def classes_of(suite: Any, wanted: str | None) -> tuple[str, ...]:
    """The classes to draw, of those in which the suite's op differs."""
    known: tuple[str, ...] = getattr(suite, "DRAWN_CLASSES", CLASSES)
    if wanted is None:
        return known
    names = tuple(name.strip() for name in wanted.split(",") if name.strip())
    for name in names:
        if name not in known:
            raise ValueError(f"--class has {name!r}; expected a part of {','.join(known)}")
    return names


def draw_cases(
    op: str,
    suite: Any,
    *,
    seed: int,
    count: int,
    classes: Sequence[str] = CLASSES,
    forms: tuple[str, ...] = ("",),
    dtype: torch.dtype | None = None,
) -> list[Case]:
    """`count` cases of each class."""
    if count < 1:
        raise ValueError(f"--count is {count}; it must be positive")
    dtypes = DTYPES if dtype is None else (dtype,)
    return [
        suite.drawn(Draw(op, seed, kind, index, forms, dtypes))
        for kind in classes
        for index in range(count)
    ]


def within(draw: Draw, sizes: Callable[[], T], fits: Callable[[T], bool]) -> T:
    """The first result of `sizes()` that keeps the limits of time and memory."""
    for _ in range(MOST_TRIES):
        result = sizes()
        if fits(result):
            return result
    raise ValueError(f"{draw.op}: no draw of {draw.kind} {draw.form} keeps the limits")


def matrix(draw: Draw, multiple: int = 1) -> tuple[int, int]:
    """Rows and columns of a pass over memory, 0.1 to 512 MB of 16 bits; columns are a multiple."""
    multiple = max(multiple, 32 if draw.aligned else 1)
    return within(
        draw,
        lambda: (draw.size(16, 32768), draw.size(64, 32768, multiple)),
        lambda sizes: 1 << 16 <= sizes[0] * sizes[1] <= 1 << 28,
    )


def product(draw: Draw, multiple: int) -> tuple[int, int, int]:
    """M, N, K of rows times a weight: from a row of decoding on; K is a multiple, and in class
    `aligned` N one of 16."""
    return (
        draw.size(1, 8192),
        draw.size(64, 16384, 16 if draw.aligned else 1),
        draw.size(64, 16384, multiple),
    )


# What the draws say.


@dataclass(frozen=True)
class Score:
    """A case's score and the peer that it is relative to."""

    measurement: Measurement
    value: float
    peer: str


def scores(measurements: Sequence[Measurement], peers: Sequence[str]) -> list[Score]:
    """The scores of the cases that have one."""
    if not peers:
        return _against_the_best(measurements)
    found = []
    for measurement in measurements:
        bytes_of_peer = measurement.case.parameters.get("peer_bytes")
        factor = measurement.case.bytes / bytes_of_peer if bytes_of_peer else 1.0
        ratios = {peer: measurement.ratio(peer) * factor for peer in peers}
        known = {peer: ratio for peer, ratio in ratios.items() if not math.isnan(ratio)}
        if known:
            best = min(known, key=lambda peer: known[peer])
            found.append(Score(measurement, known[best], best))
    return found


def _against_the_best(measurements: Sequence[Measurement]) -> list[Score]:
    """Work per time over the best of those with the same form, from `LARGE_BYTES` on."""
    rates: dict[str, dict[int, float]] = {}
    for place, measurement in enumerate(measurements):
        if not measurement.failed and measurement.case.bytes >= LARGE_BYTES:
            form = str(measurement.case.parameters.get("form", ""))
            rates.setdefault(form, {})[place] = measurement.tflops(measurement.subject)
    return [
        Score(measurements[place], rate / max(of_form.values()), "best of the run")
        for of_form in rates.values()
        for place, rate in of_form.items()
    ]


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def summary(found: Sequence[Score]) -> dict[str, dict[str, float]]:
    """Per group of cases: how many, geometric mean, share below 0.95, and the least."""
    groups: dict[str, list[float]] = {}
    for score in found:
        for group in score.measurement.case.groups:
            groups.setdefault(group, []).append(score.value)
    return {
        group: {
            "shapes": len(values),
            "geometric_mean": geometric_mean(values),
            "share_below_0.95": sum(value < LOW_SCORE for value in values) / len(values),
            "least": min(values),
        }
        for group, values in groups.items()
    }


def worst(found: Sequence[Score]) -> list[Score]:
    return sorted(found, key=lambda score: score.value)[:WORST]


def report(measurements: Sequence[Measurement], peers: Sequence[str]) -> str:
    """The summary, the worst ten with the kernels that ran, and the notes, as text."""
    found = scores(measurements, peers)
    grid = Grid(["drawn", "shapes", "geometric mean", "below 0.95", "least"])
    for group, figures in summary(found).items():
        grid.rows.append(
            [
                group,
                str(int(figures["shapes"])),
                number(figures["geometric_mean"], ".3f"),
                f"{figures['share_below_0.95']:.0%}",
                number(figures["least"], ".3f"),
            ]
        )
    parts = [grid.text(), "A score is the best peer's time over the op's, or see bench/drawn.py."]
    table = Grid([f"worst {WORST}", "score", "us", "peer", "protocol", "kernel"])
    for score in worst(found):
        m = score.measurement
        time = m.timings[m.subject].median
        cells = [number(score.value, ".3f"), f"{time:.1f}", score.peer, m.protocol, m.kernel]
        table.rows.append([m.case.name, *cells])
    parts.append(table.text())
    protocols = [m.protocol for m in measurements if m.protocol]
    counts = {name: protocols.count(name) for name in dict.fromkeys(protocols)}
    parts.append("Protocols: " + ", ".join(f"{name} {n} cases" for name, n in counts.items()))
    without = len(measurements) - len(found)
    if without:
        parts.append(
            f"{without} cases have no score: the op failed, no peer took them, or they are small."
        )
    parts += [
        f"{m.case.name}, {name}: {note}" for m in measurements for name, note in m.notes.items()
    ]
    return "\n".join(parts)


def record(measurements: Sequence[Measurement], peers: Sequence[str]) -> dict[str, Any]:
    """The summary as part of a result file."""
    found = scores(measurements, peers)
    rounded = {
        group: {name: float(f"{value:.6g}") for name, value in figures.items()}
        for group, figures in summary(found).items()
    }
    return {
        "groups": rounded,
        "worst": [
            {
                "name": score.measurement.case.name,
                "score": float(f"{score.value:.6g}"),
                "peer": score.peer,
                "kernel": score.measurement.kernel,
            }
            for score in worst(found)
        ],
        "scores": {score.measurement.case.name: float(f"{score.value:.6g}") for score in found},
    }
