"""The benchmark of training steps, with a model so small that a test takes seconds.

Nothing is asserted about speed.
"""

from __future__ import annotations

import argparse
import json

import pytest
import torch
import torch.nn.functional as F

from thunderkittens import bench
from thunderkittens.bench import cli, training
from thunderkittens.bench.accuracy import check

CPU = torch.device("cpu")
BOTH = ("tk.attention", "tk.gemm")
LAYERS = 4  # linear layers of a block


def run(*options: str) -> int:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return bench.main(parser.parse_args(["training", *options]))


def make_inputs(case: bench.Case, seed: int = 0) -> dict:
    return case.make_inputs(CPU, torch.Generator().manual_seed(seed))


@pytest.fixture
def case() -> bench.Case:
    return training.make_case(training.SHAPES["tiny"], "eager", BOTH)


def test_cases():
    cases = training.cases()
    assert [case.name for case in cases] == [
        "eager, tk.attention",
        "eager, tk.attention and tk.gemm",
        "compiled, tk.attention",
        "compiled, tk.attention and tk.gemm",
    ]
    sizes = {"width": 768, "layers": 4, "heads": 12, "batch": 8, "length": 512}
    for case in cases:
        assert sizes.items() <= case.parameters.items()
    linear, causal = 12 * 768**2 * 8 * 512, 12 * 8 * 512**2 / 2 * 64
    assert cases[0].flops == 4 * (6 * linear + (4 + 10) * causal)
    assert len(training.cases("tiny", modes=("eager",))) == 2
    with pytest.raises(ValueError, match="mode 'lazy' is unknown"):
        training.cases(modes=("lazy",))


@pytest.mark.parametrize("ops", [(), *training.OPS])
def test_models_use_the_ops_that_are_named(ops, case, monkeypatch):
    used = []
    for name in ("torch_attention", "tk_attention", "torch_linear", "tk_linear"):
        function = getattr(training, name)
        call = lambda *x, n=name, f=function: (used.append(n), f(*x))[1]  # noqa: E731
        monkeypatch.setattr(training, name, call)
    size = training.SHAPES["tiny"]
    model = training.make_model(size, ops).bfloat16()
    model(torch.randn(size.batch, size.length, size.width, dtype=torch.bfloat16))
    attention = "tk_attention" if ops else "torch_attention"
    linear = "tk_linear" if "tk.gemm" in ops else "torch_linear"
    assert set(used) == {attention, linear}
    assert used.count(attention) == size.layers
    assert used.count(linear) == size.layers * LAYERS


@pytest.mark.parametrize("seed", [0, 1])
def test_training(case, seed):
    """Losses fall, gradients are those of the given weights, and calls go on from each other."""
    inputs = make_inputs(case, seed)
    given = {name: weight.clone() for name, weight in inputs["weights"].items()}
    train = training.make_training(**inputs)
    losses, *gradients = train()
    assert losses.shape == (training.STEPS,)
    assert bool((losses[1:] < losses[:-1]).all())
    later, *same = train()
    assert later[0] < losses[-1]
    assert all(x is y for x, y in zip(same, gradients, strict=True))
    assert all(torch.equal(given[name], weight) for name, weight in inputs["weights"].items())

    model = training.make_model(inputs["size"], inputs["ops"]).bfloat16()
    model.load_state_dict(given)
    F.mse_loss(model(inputs["x"]).float(), inputs["target"]).backward()
    parameters = list(model.parameters())
    expected = [x.grad for x in parameters if x.ndim > 1]
    expected.append(torch.cat([x.grad for x in parameters if x.ndim == 1]))
    torch.testing.assert_close(gradients, expected)


def test_both_models_start_from_the_same(case):
    """And the global generator of random numbers is left alone."""
    before = torch.random.get_rng_state()
    inputs, again, other = make_inputs(case), make_inputs(case), make_inputs(case, 1)
    assert torch.equal(before, torch.random.get_rng_state())
    for name, weight in inputs["weights"].items():
        assert torch.equal(weight, again["weights"][name])
    assert not torch.equal(inputs["weights"]["0.qkv.weight"], other["weights"]["0.qkv.weight"])


class Scaled(torch.autograd.Function):
    """Its input, with a gradient that is 5 % too large."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * 1.05


right = training.tk_attention
FAULTS = {
    "none": right,
    "no mask": F.scaled_dot_product_attention,
    "gradient of v": lambda q, k, v: right(q, k, Scaled.apply(v)),
    "no gradient of k": lambda q, k, v: right(q, k.detach(), v),
    "NaN": lambda q, k, v: right(q, k, v) * torch.nan,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault, case, monkeypatch):
    monkeypatch.setattr(training, "tk_attention", FAULTS[fault])
    inputs = make_inputs(case)
    results = {
        name: implementation.prepare(**inputs)()
        for name, implementation in training.implementations(CPU).items()
    }
    accuracies = check(case, inputs, results)
    assert accuracies["thunderkittens"].passed is (fault == "none")
    assert accuracies["PyTorch"].passed


def test_command(device, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(training, "STEPS", 2)
    json_file = tmp_path / "r.json"
    options = ["--device", device, "--shapes", "tiny", "--repetitions", "3"]
    assert run(*options, "--json", str(json_file)) == 0
    printed = capsys.readouterr().out
    content = json.loads(json_file.read_text())
    assert content["op"] == "training"
    assert content["settings"]["steps"] == 2
    assert [case["name"] for case in content["cases"]] == [
        case.name for case in training.cases("tiny")
    ]
    for case in content["cases"]:
        assert case["name"] in printed
        assert not case["failed"]
        ours, theirs = (case["results"][name] for name in ("thunderkittens", "PyTorch"))
        assert ours["accuracy"]["passed"]
        assert ours["time_us"]["repetitions"] == 3
        ratio = theirs["time_us"]["median"] / ours["time_us"]["median"]
        assert case["ratios"]["PyTorch"] == pytest.approx(ratio, rel=1e-4)


def test_a_wrong_model_gives_exit_status_1(monkeypatch, capsys):
    monkeypatch.setattr(training, "tk_attention", F.scaled_dot_product_attention)
    assert run("--device", "cpu", "--quick", "--modes", "eager") == 1
    assert "not accurate" in capsys.readouterr().out


def test_save(tmp_path, monkeypatch, capsys):
    (tmp_path / "benchmarks").mkdir()
    monkeypatch.chdir(tmp_path)
    options = ["--device", "cpu", "--repetitions", "2", "--save"]
    for part in (["--shapes", "tiny"], ["--modes", "eager"], ["--quick"]):
        assert run(*options, *part) == 2
        assert "--save needs a full run" in capsys.readouterr().err
    tiny = training.cases("tiny", modes=("eager",))
    monkeypatch.setattr(training, "cases", lambda *shapes, **options: tiny)
    assert run(*options) == 0
    assert (tmp_path / "benchmarks" / "results" / "cpu" / "training.json").exists()


def test_it_is_no_op():
    assert "training" not in cli.suite_names()
    for option in ("--host", "--dtype=fp16"):
        with pytest.raises(SystemExit):
            run("--device", "cpu", option)
