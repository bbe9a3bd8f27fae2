"""examples/hybrid.py: it learns, the two ways are the same model, and steps are measured; sizes are
tiny.

Nothing is asserted about speed.
"""

from __future__ import annotations

import importlib
import json
import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import thunderkittens as tk
from thunderkittens import bench
from thunderkittens.bench import comparison

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "hybrid.py"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def example():
    name = "hybrid_example"
    module = sys.modules[name] = SimpleNamespace()  # where dataclasses look for annotations
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLE.parent))
        vars(module).update(runpy.run_path(str(EXAMPLE), run_name=name))
        yield module
    for loaded in (name, "llama"):
        sys.modules.pop(loaded, None)


def run(example, monkeypatch, *options):
    monkeypatch.setattr(sys, "argv", ["hybrid.py", "--device", "cpu", *options])
    example.main()


def test_sizes(example):
    """Operations of a step, counted by the products and the ops that it does."""
    stack = example.STACKS["large"]
    with torch.device("meta"):
        model = example.make_model(stack.size, example.OURS)
    matrices = sum(p.numel() for p in model.parameters() if p.ndim == 2)
    tokens, heads = 2 * 4096, 16
    shape = 2, heads, 4096, 128
    op = importlib.import_module("thunderkittens.ops.gated_delta_rule")
    recurrent = op._flops(shape, shape, (2, 2 * heads, 4096, 128))
    scores = 2 * 4096 * tokens * 2048
    for training, factors in ((False, (1, 1, 1)), (True, (3, 4, 3.5))):
        parts = 2 * tokens * matrices, 3 * recurrent, scores
        expected = sum(n * factor for n, factor in zip(parts, factors, strict=True))
        assert stack.flops(training) == pytest.approx(expected, rel=1e-9)


def test_a_task(example):
    """Keys are not repeated among the pairs, all are asked for, and values are those of the
    pairs."""
    task = example.Task(pairs=5, keys=9, batch=7, steps=1, rate=0.1)
    tokens, questions = task.batch_of(torch.Generator().manual_seed(0), CPU)
    assert tokens.shape == (7, task.length + 1)
    for row in tokens.tolist():
        pairs = dict(zip(row[:10:2], row[1:10:2], strict=True))
        asked = {row[i]: row[i + 1] for i in questions.tolist()}
        assert len(pairs) == 5
        assert asked == pairs
        assert all(key < 9 <= value < 18 for key, value in pairs.items())


def test_it_learns(example, monkeypatch, capsys):
    """At its tiniest size the loss goes down, and steps over caches give what the whole gives."""
    size, _ = example.TRAINED["tiny"]
    task = example.Task(pairs=3, keys=4, batch=24, steps=45, rate=1e-2)
    monkeypatch.setitem(example.TRAINED, "tiny", (size, task))
    run(example, monkeypatch, "--size", "tiny")
    printed = capsys.readouterr().out
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", printed)]
    assert len(losses) >= 8
    assert losses[-1] < 0.6 * losses[0]
    assert re.search(r"[\d.e+]+ tokens per second", printed)
    whole, stepped = re.search(r"sequences ([\d.]+)%, .* ([\d.]+)%", printed).groups()
    assert whole == stepped


def test_every_way_is_the_same_model(example):
    """In plain PyTorch and on the ops, in float64: outputs and gradients."""
    torch.manual_seed(0)
    size = example.STACKS["tiny"].size
    ours, plain = (example.make_model(size, way).double() for way in (example.OURS, example.PLAIN))
    ours.load_state_dict(plain.state_dict())
    kinds = {type(block.mixer).__name__ for block in plain[:-1]}
    assert kinds == {"PlainDeltaNet", "Attention"}
    x, weight = torch.randn(2, 2, 70, size.width).double()
    found = []
    for model in (ours, plain):
        out = model(x)
        (out * weight).sum().backward()
        found.append([out, *(p.grad for p in model.parameters())])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(("task", "mode"), [("training", "eager"), ("prefill", "compiled")])
def test_measurement(task, mode, example, tmp_path, monkeypatch, capsys):
    file = tmp_path / "r.json"
    options = ["--tasks", task, "--modes", mode, "--repetitions", "1", "--json", str(file)]
    run(example, monkeypatch, "--measure", "--stacks", "tiny", *options)
    printed = capsys.readouterr().out
    content = json.loads(file.read_text())
    (case,) = content["cases"]
    assert case["name"] == f"tiny, {task}, {mode}, {example.OURS}"
    ours, theirs = (case["results"][name] for name in ("thunderkittens", "PyTorch"))
    assert ours["accuracy"]["passed"]
    assert theirs["accuracy"]["passed"]
    rate = 140 / ours["time_us"]["median"] * 1e6
    assert f"{case['name']}: thunderkittens {rate:.4g}, PyTorch" in printed
    assert not comparison.compare_files(content, content).regression


def test_a_wrong_layer_is_found(example, monkeypatch):
    monkeypatch.setattr(tk.nn.GatedDeltaNet, "_mix", lambda self, call, operands: operands[2])
    implementations = {
        way: bench.Prepared(lambda way=way, **inputs: example.make_steps(way, **inputs))
        for way in (example.OURS, example.PLAIN)
    }
    case, timer = example.make_case("tiny", "prefill", "eager"), bench.StepTimer(CPU, 2)
    (found,) = bench.compare([case], implementations, timer=timer, repetitions=1)
    assert found.failed
    assert "not accurate" in found.notes[example.OURS]
