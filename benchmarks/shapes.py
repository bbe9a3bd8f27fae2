"""The cases that the benchmarks here run, as pytest parameters."""

from __future__ import annotations

import pytest

from thunderkittens.bench.cli import load_suite


def params(op: str, shapes: str) -> list:
    """The cases of an op's set of shapes, with the case's name as the test's id."""
    cases = load_suite(op).cases(shapes)
    return [pytest.param(case, id=case.name.replace(" ", "_")) for case in cases]
