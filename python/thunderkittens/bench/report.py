"""Results on the terminal and as a picture.

Tables are drawn by rich, or in plain columns without it: the machines that have the GPUs often have
little else installed. Pictures need matplotlib.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .host import BACKWARD, PLAIN, RECORDING, HostTimes
from .runner import Measurement, geometric_means

UNLIMITED = 250  # columns where no terminal sets the width; tables take what they need


def names_of(measurements: Sequence[Measurement]) -> list[str]:
    """The implementations that ran or left a note anywhere, the subject first."""
    names = {m.subject: None for m in measurements}
    for measurement in measurements:
        names.update(dict.fromkeys([*measurement.timings, *measurement.notes]))
    return list(names)


@dataclass
class Grid:
    """A table's content: headings of one or two lines, rows of text, and where sections begin."""

    headings: list[str]
    rows: list[list[str]] = field(default_factory=list)
    sections: list[int] = field(default_factory=list)

    def text(self) -> str:
        """The table, by rich where it is installed, else in plain columns."""
        if importlib.util.find_spec("rich") is None:
            return self.plain()
        from rich import box
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for place, heading in enumerate(self.headings):
            justify: Any = "right" if place else "left"
            table.add_column(escape(heading), justify=justify, no_wrap=True, vertical="bottom")
        for place, row in enumerate(self.rows):
            if place in self.sections:
                table.add_section()
            table.add_row(*map(escape, row))
        console = Console(width=None if sys.stdout.isatty() else UNLIMITED)
        with console.capture() as capture:
            console.print(table)
        return trim(capture.get())

    def plain(self) -> str:
        lines = [*zip(*(heading.split("\n") for heading in self.headings), strict=True)]
        lines += [tuple(row) for row in self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        first, *others = widths
        texts = [
            "  ".join([line[0].ljust(first), *map(str.rjust, line[1:], others)]) for line in lines
        ]
        body = len(lines) - len(self.rows)
        for section in reversed(self.sections):
            texts.insert(body + section, "")
        texts.insert(body, "-" * (sum(widths) + 2 * len(others)))
        return trim("\n".join(["", *texts, ""]))


def trim(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.splitlines())


def number(value: float, form: str) -> str:
    return "-" if math.isnan(value) else format(value, form)


def subject_cells(measurement: Measurement, peak: float | None, moving: bool) -> list[str]:
    timing = measurement.timings.get(measurement.subject)
    if timing is None:
        return ["failed", "-", "-"] + ["-"] * (not moving)
    cells = [f"{timing.median:.1f}", f"{timing.spread:.1%}"]
    if moving:
        return [*cells, f"{measurement.gigabytes_per_second(measurement.subject):.0f}"]
    tflops = measurement.tflops(measurement.subject)
    return [*cells, f"{tflops:.1f}", f"{tflops / peak:.0%}" if peak else "-"]


def table(measurements: Sequence[Measurement], *, peak: float | None = None) -> str:
    """The figures of every case, the geometric means per group, and the notes, as text.

    A ratio is the peer's time over the subject's: above 1 the subject is faster. `peak` is the
    hardware's limit in TFLOP/s; the spread is the interquartile range over the median. Cases that
    multiply nothing have GB/s.
    """
    if not measurements:
        return "no cases"
    subject, *peers = names_of(measurements)
    protocols = [m.protocol for m in measurements if m.protocol]
    mixed = len(set(protocols)) > 1
    moving = all(m.case.flops == 0 for m in measurements)
    unit = "GB/s" if moving else "TFLOP/s"
    headings = ["\ncase", f"{subject}\nus", "\nspread", f"\n{unit}"]
    headings += ["\nof peak"] * (not moving) + ["\nprotocol"] * mixed
    for peer in peers:
        headings += [f"{peer}\n{unit}", "\nratio"]
    figures = Grid(headings)
    for place, measurement in enumerate(measurements):
        if place and measurement.case.groups[:1] != measurements[place - 1].case.groups[:1]:
            figures.sections.append(place)
        row = [measurement.case.name, *subject_cells(measurement, peak, moving)]
        row += [measurement.protocol] * mixed
        for peer in peers:
            rate = (
                number(measurement.gigabytes_per_second(peer), ".0f")
                if moving
                else number(measurement.tflops(peer), ".1f")
            )
            row += [rate, number(measurement.ratio(peer), ".3f")]
        figures.rows.append(row)
    parts = [figures.text()]
    if protocols and not mixed:
        parts.append(f"Timed by protocol: {protocols[0]}.")
    groups = geometric_means(measurements)
    if groups:
        means = Grid([f"geometric mean of the ratio of {subject} to", *peers])
        for name, ratios in groups.items():
            cells = [number(ratios.get(peer, math.nan), ".3f") for peer in peers]
            means.rows.append([name, *cells])
        parts += [means.text(), f"A ratio is the peer's time over that of {subject}."]
    parts += [
        f"{measurement.case.name}, {name}: {note}"
        for measurement in measurements
        for name, note in measurement.notes.items()
    ]
    return "\n".join(parts)


def host_table(times: HostTimes) -> str:
    """Host time per call, as text, with a section for each kind of call."""
    grid = Grid(["host time of an eager call", "median us", "quartiles", "calls"])
    before = PLAIN
    for place, (name, timing) in enumerate(times.items()):
        kind = next((kind for kind in (RECORDING, BACKWARD) if name.endswith(kind)), PLAIN)
        if kind != before:
            grid.sections.append(place)
        before = kind
        quartiles = f"{timing.quartile_1:.2f} - {timing.quartile_3:.2f}"
        grid.rows.append([name, f"{timing.median:.2f}", quartiles, str(timing.repetitions)])
    return grid.text()


def plot(
    measurements: Sequence[Measurement], path: Path, *, title: str, peak: float | None = None
) -> None:
    """Draw TFLOP/s as bars, a picture per section of the table, in the format of `path`'s suffix.

    `peak`, the hardware's limit in TFLOP/s, is the upper end of the axis.
    """
    from matplotlib.figure import Figure  # not pyplot: it would pick a back end for the process

    sections: dict[str, list[Measurement]] = {}
    for measurement in measurements:
        sections.setdefault((*measurement.case.groups, "")[0], []).append(measurement)
    names = names_of(measurements)
    columns = min(2, len(sections))
    rows = math.ceil(len(sections) / columns)
    figure = Figure(figsize=(7 * columns, 0.6 + 3 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharey=True).flatten()
    for axis, (group, members) in zip(axes, sections.items(), strict=False):
        width = 0.8 / len(names)
        for place, name in enumerate(names):
            shift = (place - (len(names) - 1) / 2) * width
            heights = [measurement.tflops(name) for measurement in members]
            axis.bar([i + shift for i in range(len(members))], heights, width, label=name)
        labels = [str(m.case.parameters.get("label", m.case.name)) for m in members]
        axis.set_xticks(range(len(members)), labels, fontsize=8)
        axis.set_title(group, fontsize=10)
        axis.grid(axis="y", alpha=0.3)
        axis.set_axisbelow(True)
    for axis in axes[len(sections) :]:
        axis.set_axis_off()
    for axis in axes[::columns]:
        axis.set_ylabel("TFLOP/s")
    axes[0].set_ylim(0, peak)
    axes[0].legend(fontsize=8)
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
