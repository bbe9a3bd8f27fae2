"""examples/llama.py: each way runs the same model, and its steps are measured; sizes are tiny.

Nothing is asserted about speed.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import thunderkittens as tk
from thunderkittens import bench
from thunderkittens.bench import comparison
from thunderkittens.bench.timing import Within

CPU = torch.device("cpu")
EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "llama.py"


@pytest.fixture(scope="module")
def llama():
    name = "llama_example"
    module = sys.modules[name] = SimpleNamespace()  # where dataclasses look for annotations
    vars(module).update(runpy.run_path(str(EXAMPLE), run_name=name))
    yield module
    del sys.modules[name]


@pytest.fixture
def inputs(llama):
    case = llama.make_case("tiny", "training", "eager")
    return case.make_inputs(CPU, torch.Generator().manual_seed(0))


def test_sizes(llama):
    """Those of the models that the stacks are named after, and the operations of a step."""
    large = llama.SIZES["large"]
    assert (large.width, large.heads, large.kv_heads, large.hidden) == (4096, 32, 8, 14336)
    with torch.device("meta"):
        block = llama.Block(4096, 32, 8, 14336, 4096)
    weights = sum(p.numel() for p in block.parameters() if p.ndim == 2)
    pairs = 4096**2 / 2 * 2 * 32
    assert large.flops(False) == 2 * (2 * 8192 * weights + 4 * 128 * pairs)
    assert large.flops(True) == 2 * (6 * 8192 * weights + 14 * 128 * pairs)


def test_every_way_is_the_same_model(llama, inputs):
    results = {way: llama.make_steps(way, **inputs)() for way in llama.CHANGES}
    losses, *gradients = results["PyTorch"]
    assert bool((losses[1:] < losses[:-1]).all())
    for way, (found, *others) in results.items():
        bound = 0.2 if way == llama.FP8 else 0.02
        assert torch.allclose(found, losses, rtol=bound / 10), way
        for ours, theirs in zip(others, gradients, strict=True):
            error = (ours - theirs).float().norm() / theirs.float().norm()
            assert error < bound, way


def test_what_a_way_does_to_a_model(llama):
    with torch.device("meta"):
        plain, on_gemm, on_fp8 = (llama.make_model(llama.SIZES["tiny"]) for _ in range(3))
    llama.on_gemm(on_gemm)
    llama.on_fp8(on_fp8)
    for model in (on_gemm, on_fp8):
        assert model.state_dict().keys() == plain.state_dict().keys()
        assert not [m for m in model.modules() if type(m) is torch.nn.Linear]
    assert [type(block.mlp).__name__ for block in on_gemm[:-1]] == ["FusedMlp"] * 2
    assert sum(isinstance(m, tk.Fp8Linear) for m in on_fp8.modules()) == 2 * 4


@pytest.mark.emulator
def test_attention_is_taken(llama, inputs):
    """Within `tk.sdpa`, and only there, also of fewer heads of keys."""
    tk.sdpa_report(reset=True)
    inputs |= {"task": "prefill"}
    with tk.emulate():
        (ours,) = llama.make_steps(llama.ATTENTION, **inputs)()
    taken = [call for call in tk.sdpa_report(reset=True) if call.taken]
    assert sum(call.calls for call in taken) == 2 * 2  # blocks, steps
    (theirs,) = llama.make_steps("PyTorch", **inputs)()
    assert not tk.sdpa_report(reset=True)
    assert torch.allclose(ours, theirs, atol=0.05)


def test_a_context_is_no_part_of_the_time():
    now, inside = [0.0], []

    class Context:
        def __enter__(self):
            now[0] += 1
            inside.append(True)

        def __exit__(self, *error):
            now[0] += 1
            inside.pop()

    def call():
        assert inside
        now[0] += 3e-6

    timer = bench.StepTimer(CPU, 3, clock=lambda: now[0])
    rounds = timer.measure({"x": Within(call, Context)}, repetitions=2, seconds=100)
    assert rounds.timings["x"].median == pytest.approx(1, rel=1e-3)
    assert Within(call, Context)() is None


@pytest.mark.parametrize(("task", "mode"), [("training", "eager"), ("prefill", "compiled")])
def test_measurement(task, mode, llama, tmp_path, monkeypatch, capsys):
    file = tmp_path / "r.json"
    options = ["--tasks", task, "--modes", mode, "--repetitions", "2", "--json", str(file)]
    monkeypatch.setattr(
        sys, "argv", ["llama.py", "--measure", "--stacks", "tiny", "--device", "cpu", *options]
    )
    llama.main()
    printed = capsys.readouterr().out
    content = json.loads(file.read_text())
    assert [c["name"] for c in content["cases"]] == [
        f"tiny, {task}, {mode}, {w}" for w in llama.WAYS
    ]
    for case in content["cases"]:
        assert case["name"] in printed
        ours, theirs = (case["results"][name] for name in ("thunderkittens", "PyTorch"))
        assert theirs["accuracy"]["passed"]
        fp8 = case["parameters"]["way"] == llama.FP8
        assert ours["accuracy"] is None if fp8 else ours["accuracy"]["passed"]
        ratio = theirs["time_us"]["median"] / ours["time_us"]["median"]
        assert case["ratios"]["PyTorch"] == pytest.approx(ratio, rel=1e-4)
    assert not comparison.compare_files(content, content).regression


def test_a_wrong_model_is_found(llama, monkeypatch):
    def wrong(model):
        for block in model[:-1]:
            block.o = torch.nn.Identity()

    change = {llama.BOTH: (wrong, tk.sdpa), "PyTorch": llama.CHANGES["PyTorch"]}
    implementations = {
        way: bench.Prepared(lambda way=way, **inputs: llama.make_steps(way, **inputs))
        for way in change
    }
    monkeypatch.setitem(llama.CHANGES, llama.BOTH, change[llama.BOTH])
    case = llama.make_case("tiny", "prefill", "eager")
    timer = bench.StepTimer(CPU, 2)
    (found,) = bench.compare([case], implementations, timer=timer, repetitions=2)
    assert found.failed
    assert "not accurate" in found.notes[llama.BOTH]
