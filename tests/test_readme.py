"""The README and docs/performance.md: their figures are those of the result files, and `.ci/run`
runs the README's two commands. test_documents.py runs the blocks of code."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from statistics import geometric_mean

import pytest

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "h200"
README = (ROOT / "README.md").read_text()
NOTES = (ROOT / "docs" / "performance.md").read_text()
TOUR = (ROOT / "docs" / "tour.md").read_text()


# Rows of the tables of ratios: op, cases, peer, ratio, file.
def rows_of(document):
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in document.splitlines()
        if line.startswith("|") and re.search(r"`\w+\.json`", line)
    ]


ROWS = rows_of(README) + rows_of(NOTES)
HOST = [row for row in ROWS if "_host.json" in row[-1]]
RATIOS = [row for row in ROWS if row not in HOST]

# The calls of the table of host times, and what follows their names in the files.
HOST_CALLS = {
    "without gradients": "",
    "recording a gradient": ", recording a gradient",
    "forward and backward": ", forward and backward",
}


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
    assert len(RATIOS) > 75
    assert sum(row in RATIOS for row in rows_of(README)) > 12


@pytest.mark.parametrize("row", RATIOS, ids=lambda row: f"{row[0]}, {row[1]}"[:60])
def test_ratios_are_those_of_the_files(row):
    """One figure for each row, and one file that has it."""
    _, _, _, figure, files = row
    assert re.fullmatch(r"\d+\.\d+", figure)
    (name,) = files_of(files)
    unit = 10.0 ** -len(figure.partition(".")[2])
    assert any(abs(ratio - float(figure)) <= 0.51 * unit for ratio in possible(name))


@pytest.mark.parametrize("name", sorted(set(files_of(README + NOTES))))
def test_result_files_exist(name):
    result = json.loads((RESULTS / name).read_text())
    assert result["machine"]["device"] == "NVIDIA H200"
    assert not any(case["failed"] for case in result.get("cases", []))


def test_tokens_per_second_are_those_of_the_file():
    """A table of loops by sizes and batches, and what its text says of NVFP4 weights."""
    found = {}
    for case in json.loads((RESULTS / "generate.json").read_text())["cases"]:
        size, batch, loop, way = (case["parameters"][k] for k in ("size", "batch", "loop", "way"))
        for name, result in case["results"].items():
            rate = batch / result["time_us"]["median"] * 1e6
            found[loop if name == "PyTorch" else way, size.upper(), batch] = rate
    text = NOTES.partition("Tokens per second")[2].partition("\n## ")[0]
    names, _, *rows = (
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    )
    assert names[1:] == ["1B, 1", "1B, 64", "8B, 1", "8B, 64"]
    ways = ["tk.nn cache", "NVFP4, head bf16", "NVFP4, head NVFP4", "own"]
    ways += ["transformers' static cache", "transformers"]
    for way, (_, *figures) in zip(ways, rows, strict=True):
        for name, figure in zip(names[1:], figures, strict=True):
            size, batch = name.split(", ")
            assert figure == f"{found[way, size, int(batch)]:.0f}"
    gains = [
        f"{found[way, size, batch] / found['tk.nn cache', size, batch]:.2f} "
        for way, size, batch in (
            *(("NVFP4, head NVFP4", size, 1) for size in ("8B", "1B")),
            *(("NVFP4, head bf16", size, 1) for size in ("8B", "1B")),
            ("NVFP4, head NVFP4", "8B", 64),
        )
    ]
    assert re.findall(r"\d\.\d\d\s", text.replace("\n", " ").rpartition("|")[2]) == gains


SUMMARIES = sorted(
    path
    for path in (ROOT / "docs" / "performance").glob("*.md")
    if path.name != "host_time.md"  # which has no log
)


@pytest.mark.parametrize("path", SUMMARIES, ids=lambda path: path.stem)
def test_figures_of_a_summary_are_those_of_its_logs(path):
    text = path.read_text()
    logs = re.findall(r"\]\(\.\./(experiments/\w+\.md)", text)
    assert logs
    known = "".join((ROOT / "docs" / log).read_text() for log in logs)
    assert set(re.findall(r"\d+\.\d+", text)) <= set(re.findall(r"\d+\.\d+", known))


def test_host_times_are_those_of_the_files():
    assert {row[1] for row in HOST} == HOST_CALLS.keys()
    assert {row[0] for row in HOST} == {"`tk.attention`", "`tk.sdpa`", "`tk.gemm`"}
    assert len(HOST) == 9
    for op, call, ours, peer, theirs, file in HOST:
        times = json.loads((RESULTS / file.strip("`")).read_text())["host_time_us"]
        for name, figure in ((op.replace("tk.", "thunderkittens."), ours), (peer, theirs)):
            assert figure == f"{times[name.strip('`') + HOST_CALLS[call]]['median']:.1f}"


def test_host_times_stand_in_one_place():
    documents = {ROOT / "README.md", *(ROOT / "docs").rglob("*.md")}
    for document in documents - {ROOT / "docs" / "performance.md"}:
        lines = [line for line in document.read_text().splitlines() if "_host.json" in line]
        assert not any(re.search(r"\d\.\d", line) for line in lines), document
    assert not re.search(r"\d\.\d", (ROOT / "docs/performance/host_time.md").read_text())


def test_the_tour_calls_every_op_and_checks_it():
    blocks = re.findall(r"```python\n(.*?)```", TOUR, re.DOTALL)
    called = set(re.findall(r"\btk\.(\w+)\(", "".join(blocks)))
    assert {path.stem for path in (ROOT / "benchmarks").glob("bench_*.py")} <= {
        f"bench_{name}" for name in called
    }
    assert sum("assert" in block for block in blocks) > len(blocks) * 3 / 4


# ---- the commands ----


def command(marker):
    """The lines of the block that follows a marker."""
    block = re.search(rf"^<!-- {marker} -->\n```bash\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    assert block, marker
    return block[1].splitlines()


def test_the_package_is_built_by_one_of_the_commands():
    (demo,) = command("demo-command")
    assert "python3 -m venv .venv && . .venv/bin/activate && pip install" in demo
    assert "thunderkittens demo" in demo
    install, tests = command("test-command")
    assert tests == "pytest -n 2 --intensity 1"
    requirements = (ROOT / install.removeprefix("pip install -r ")).read_text().splitlines()
    names = [re.match(r"[\w-]+", line) for line in requirements if line[:1] != "#"]
    assert all(name and name[0] != "thunderkittens" for name in names)


STUB = """#!/bin/bash
echo "${{0##*/}} $*" >>"{log}"
if [[ $1 == - ]]; then
  echo "$0"
elif [[ "$1 $2" == "-m venv" ]]; then
  mkdir -p "$3/bin"
  for name in python pip pytest clang-format ruff mypy; do cp "$0" "$3/bin/$name"; done
  echo 'PATH="$PWD/.venv/bin:$PATH"' >"$3/bin/activate"
fi
"""


@pytest.fixture
def checks(tmp_path):
    """Runs `.ci/run` in a repository without content, where every program only writes its call into
    a file; returns its exit status and these lines."""
    clone, programs, log = tmp_path / "clone", tmp_path / "programs", tmp_path / "log"
    shutil.copytree(ROOT / ".ci", clone / ".ci")
    programs.mkdir()
    (programs / "python3.12").write_text(STUB.format(log=log))
    (programs / "python3.12").chmod(0o755)
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", "TMPDIR": str(tmp_path)}
    subprocess.run(["git", "init", "--quiet"], cwd=clone, check=True)

    def run(readme):
        (clone / "README.md").write_text(readme)
        done = subprocess.run([clone / ".ci/run"], env=environment, cwd=tmp_path, timeout=60)
        return done.returncode, log.read_text().splitlines() if log.exists() else []

    return run


def test_ci_runs_the_commands_as_they_stand(checks, tmp_path):
    status, calls = checks(README)
    assert status == 0
    assert calls[:4] == [
        "python3.12 -",
        "python3.12 -m venv .venv",
        "pip install .[demo]",
        "python -m thunderkittens demo",
    ]
    assert calls[-2:] == [
        "pip install -r tests/requirements.txt",
        "pytest -n 2 --intensity 1",
    ]
    assert [call for call in calls if call.startswith("pip install .")] == ["pip install .[demo]"]
    assert {"ruff check .", "mypy ", "python -m thunderkittens info"} <= set(calls)
    assert not (tmp_path / "clone/.venv").exists()


def test_ci_fails_with_a_command(checks, tmp_path):
    status, calls = checks(README.replace("\npytest -n", "\nfalse\npytest -n"))
    assert status == 1
    assert not any(call.startswith("pytest ") for call in calls)
    assert checks(README.replace("test-command", "other-command"))[0] == 1
    (tmp_path / "clone/.venv").mkdir()
    assert checks(README)[0] == 1
    assert (tmp_path / "clone/.venv").exists()
