"""The README and the table of docs/performance.md: their figures are those of the result files, and
the examples of the README run."""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
from pathlib import Path
from statistics import geometric_mean

import pytest

import thunderkittens as tk

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "h200"
README = (ROOT / "README.md").read_text()
NOTES = (ROOT / "docs" / "performance.md").read_text()

# Rows of the table of ratios: op, cases, peer, ratio, files.
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (README + NOTES).splitlines()
    if line.startswith("|") and re.search(r"`\w+\.json`", line)
]
RATIOS = [row for row in ROWS if len(row) == 5]


def files_of(text):
    return re.findall(r"`(\w+\.json)`", text)


def figures_of(case):
    """A case's ratio to each peer."""
    return {peer: ratio for peer, ratio in case["ratios"].items() if ratio}


def facts_of(case):
    """What a mean may be over: the case's groups and parameters, and the combinations of two."""
    single = [("group", group) for group in case["groups"]]
    single += [(k, str(v)) for k, v in case["parameters"].items() if k != "label"]
    return [
        (),
        *itertools.combinations(sorted(single), 1),
        *itertools.combinations(sorted(single), 2),
    ]


def possible(name):
    """Every ratio that a file can stand for: of cases, and geometric means of sets of them."""
    sets = {}
    for case in json.loads((RESULTS / name).read_text())["cases"]:
        for peer, ratio in figures_of(case).items():
            sets.setdefault((peer, case["name"]), []).append(ratio)
            for fact in facts_of(case):
                sets.setdefault((peer, fact), []).append(ratio)
    return {geometric_mean(ratios) for ratios in sets.values()}


def test_the_table_is_found():
    assert len(RATIOS) > 25


@pytest.mark.parametrize("row", RATIOS, ids=lambda row: f"{row[0]}, {row[1]}"[:60])
def test_ratios_are_those_of_the_files(row):
    known = set().union(*(possible(name) for name in files_of(row[4])))
    figures = re.findall(r"\d+\.\d+", row[3])
    assert figures
    for figure in figures:
        unit = 10.0 ** -len(figure.partition(".")[2])
        assert any(abs(ratio - float(figure)) <= 0.51 * unit for ratio in known), figure


@pytest.mark.parametrize("name", sorted(set(files_of(README + NOTES))))
def test_result_files_exist(name):
    result = json.loads((RESULTS / name).read_text())
    assert result["machine"]["device"] == "NVIDIA H200"
    assert not any(case["failed"] for case in result.get("cases", []))


def test_host_times_are_those_of_the_files():
    rows = [row for row in ROWS if len(row) == 4]
    assert rows
    for op, ours, theirs, files in rows:
        times = json.loads((RESULTS / files_of(files)[0]).read_text())["host_time_us"]
        known = {name: f"{time['median']:.1f}" for name, time in times.items()}
        assert ours == known[f"thunderkittens.{op.strip('`').removeprefix('tk.')}"]
        assert theirs in known.values()


def test_the_examples_run():
    """One after the other, as in one session."""
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) > 3
    names = {}
    for block in blocks:
        if "transformers" not in block or importlib.util.find_spec("transformers"):
            exec(block, names)
    assert bool(names["q"].grad.isfinite().all())


def test_functions_exist():
    for name in set(re.findall(r"`?\btk\.(\w+)", README)) - {"nn"}:
        assert hasattr(tk, name), name
