"""How far a run is, on a terminal: a bar by rich where it is installed, else a line per case.

It goes to stderr, so that stdout has the results alone, and says nothing where stderr is no
terminal. The bar is drawn between cases only. A thread that redraws it would take the interpreter's
lock from the host's part of what is being timed.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO, TypeVar

T = TypeVar("T")


def follow(
    items: Iterable[T], total: int, name: Callable[[T], str], stream: TextIO | None = None
) -> Iterator[T]:
    """The items, one by one; what is taken is shown as under way until the next one is."""
    stream = stream or sys.stderr
    if not stream.isatty():
        return iter(items)
    by_rich = importlib.util.find_spec("rich") is not None
    return (_bar if by_rich else _lines)(items, total, name, stream)


def _lines(items: Iterable[T], total: int, name: Callable[[T], str], stream: TextIO) -> Iterator[T]:
    for place, item in enumerate(items, 1):
        print(f"{place}/{total} {name(item)}", file=stream, flush=True)
        yield item


def _bar(items: Iterable[T], total: int, name: Callable[[T], str], stream: TextIO) -> Iterator[T]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns: tuple[Any, ...] = (
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
    )
    console = Console(file=stream)
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as bar:
        task = bar.add_task("", total=total)
        for item in items:
            bar.update(task, description=name(item), refresh=True)
            yield item
            bar.advance(task)
