"""The learned part of the dense GEMM's model of cost: its inputs, and the tool that fits it."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from test_gemm_kernels import H200
from thunderkittens import _C

ROOT = Path(__file__).resolve().parents[1]
# m, n, k, batch
PROBLEMS = [
    (1, 8, 8, 1), (1, 65536, 65536, 1), (2**20, 8, 16, 1), (4096, 4096, 4096, 1),
    (128, 128, 64, 1000), (333, 777, 0, 1), (8, 2**20, 2**17, 1), (100000, 50000, 30000, 1),
]  # fmt: skip


def fields(choice: dict[str, object]) -> dict[str, object]:
    given = ("kernel", "dtype", "a_m_major", "b_n_major")
    return {key: x for key, x in choice.items() if key not in given}


@pytest.mark.parametrize("size", PROBLEMS, ids=str)
def test_inputs_of_every_candidate(size):
    """They are numbers, and a choice is one of the candidates, for sizes beyond any that was
    timed, too."""
    for rows in ({}, {"a_m_major": True, "b_n_major": True, "a_alignment": 16, "fused": True}):
        problem = {**dict(zip(("m", "n", "k", "batch"), size, strict=True)), **rows}
        found = _C.candidates("gemm", problem, H200)
        chosen = _C.choose("gemm", problem, H200)
        assert found[0] == chosen
        assert chosen["blocks"] > 0
        inputs = [_C.cost_inputs("gemm", problem, fields(c), H200) for c in found[::7]]
        assert {len(x) for x in inputs} == {48}
        assert all(math.isfinite(v) for x in inputs for v in x)
        # Exactly one kernel.
        assert all(sum(x[-9:]) == 1 for x in inputs)


@pytest.fixture
def tool():
    path = ROOT / "tools/fit_gemm_cost.py"
    spec = importlib.util.spec_from_file_location("fit_gemm_cost", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_time(tool, monkeypatch, tmp_path):
    """A line for each product, with the choice and others, each forced while it is timed; on a CPU,
    where force does nothing."""
    forces = []
    case = min(tool.drawn(seed=3, count=40), key=lambda case: case.flops)
    monkeypatch.setattr(tool, "drawn", lambda seed, count: [case] * count)
    monkeypatch.setattr(
        tool.forced, "library_function", lambda: lambda *x: forces.append(x) or True
    )
    tool.time_choices(tmp_path / "samples.jsonl", seed=1, shapes=2, device=torch.device("cpu"))
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").open()]
    assert [line["problem"] for line in lines] == [case.parameters["problem"]] * 2
    chosen = fields(_C.choose("gemm", lines[0]["problem"], H200))
    for line in lines:
        choices = [choice for choice, _ in line["samples"]]
        assert choices[0] == chosen
        assert len(choices) > 5
        assert all(us > 0 for _, us in line["samples"])
        texts = {x[1].decode() for x in forces}
        assert all(tool.forced.text_of(choice) in texts for choice in choices)


def test_fit(tmp_path):
    """Of times that are the model's, but for one kernel that needs half of it and one that needs
    twice as much, the tool learns these factors, and writes what C++ can include."""
    with (tmp_path / "samples.jsonl").open("w") as file:
        for index in range(60):
            problem = {"m": 200 + 61 * index, "n": 64 * (1 + index % 19), "k": 320 + 8 * index}
            found = _C.candidates("gemm", problem, H200)[::5]
            samples = []
            for choice in map(fields, found):
                cycles = 2 ** _C.cost_inputs("gemm", problem, choice, H200)[0]
                factor = {"cluster_tile": 0.5, "persistent": 2}.get(choice["strategy"], 1)
                samples.append([choice, cycles * factor / 1755])
            file.write(json.dumps({"problem": problem, "samples": samples}) + "\n")
    output = tmp_path / "weights.h"
    command = [sys.executable, ROOT / "tools/fit_gemm_cost.py", "fit", tmp_path / "samples.jsonl"]
    options = ["--epochs", "40", "--output", output]
    run = subprocess.run([*command, *options], capture_output=True, text=True, check=True)
    before, after = map(float, re.findall(r"best time is ([0-9.]+)", run.stdout))
    assert before < 0.97
    assert after > 0.99
    shipped = (ROOT / "csrc/gemm/dense/learned_cost_weights.h").read_text()
    header = output.read_text()
    assert header.splitlines()[1:20] == shipped.splitlines()[1:20]
    count = lambda text: text.count("f,") + text.count("f}")  # noqa: E731
    assert count(header) == count(shipped)
