"""Choice of test cases: combinations of options, covered to the chosen strength."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from .attention import emulated


def over(function: Callable[[str, int], Sequence[Any]]) -> pytest.MarkDecorator:
    """Runs a test, which takes `device` and `case`, over the cases that function(device, intensity)
    lists."""
    return pytest.mark.cases.with_args(function)


def over_forced(*values: Sequence[Any]) -> pytest.MarkDecorator:
    """The same over all combinations of the values, on the emulator alone: nowhere else can a test
    force a configuration."""

    def cases(device: str, intensity: int) -> list[tuple[Any, ...]]:
        return list(itertools.product(*values)) if emulated(device) else []

    return over(cases)


def alternate(
    names: Sequence[str], *values: Sequence[Any], other: bool = False
) -> pytest.MarkDecorator:
    """Parametrizes a test over all combinations of the values; at intensity 1 over each other one,
    as the squares of one colour on a chess-board, or of the `other` colour."""
    cases = []
    for indices in itertools.product(*(range(len(v)) for v in values)):
        marks = pytest.mark.intensity(1 + (sum(indices) + other) % 2)
        chosen = [v[i] for v, i in zip(values, indices, strict=True)]
        cases.append(pytest.param(*chosen, marks=marks))
    return pytest.mark.parametrize(tuple(names), cases)


def cover(options: Mapping[str, Sequence[Any]], intensity: int) -> list[dict[str, Any]]:
    """Cases that hold every value (intensity 1), every pair (2) or every triple (3) of values of
    different options at least once; all combinations at 4.

    Greedy: each case starts with a combination that is not yet covered, and is filled up with the
    best of some random choices. The result depends on the arguments alone.
    """
    names = list(options)
    if intensity == 4:
        return [
            dict(zip(names, case, strict=True)) for case in itertools.product(*options.values())
        ]
    strength = min(intensity, len(names))
    groups = list(itertools.combinations(range(len(names)), strength))
    values = [range(len(options[name])) for name in names]
    missing = {
        (group, choice)
        for group in groups
        for choice in itertools.product(*(values[i] for i in group))
    }
    order = sorted(missing)
    draw = random.Random(0)
    draw.shuffle(order)
    cases = []
    for group, choice in order:
        if (group, choice) not in missing:
            continue
        best: set[Any] = set()
        best_case: list[int] = []
        for _ in range(20):
            case = [draw.choice(indices) for indices in values]
            for position, index in zip(group, choice, strict=True):
                case[position] = index
            gained = {(g, tuple(case[i] for i in g)) for g in groups} & missing
            if len(gained) > len(best):
                best, best_case = gained, case
        missing -= best
        cases.append({name: options[name][i] for name, i in zip(names, best_case, strict=True)})
    return cases
