"""The demo, with a model so small that a test takes seconds."""

from __future__ import annotations

import argparse
from dataclasses import replace

import pytest
import torch

from thunderkittens import demo

TINY = demo.Config(32, 1, 2, 32, 4, 30, 4e-3, seconds=60, sample_bytes=12)


def run(*options: str) -> int:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    return demo.main(parser.parse_args(options))


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(demo, "CPU", TINY)
    monkeypatch.setattr(demo, "GPU", TINY)


@pytest.mark.usefixtures("tiny")
def test_losses_agree(device, capsys):
    assert run("--device", device) == 0
    printed = capsys.readouterr().out
    for words in ("thunderkittens", "PyTorch", "tokens/s", "within the 2% allowed", "A sample"):
        assert words in printed
    assert "step   30/30" in printed


@pytest.mark.usefixtures("tiny")
def test_quiet_prints_the_result_only(capsys):
    assert run("--device", "cpu", "--quiet", "--steps", "5") == 0
    printed = capsys.readouterr().out
    assert len(printed.strip().splitlines()) == 4
    assert "sample" not in printed
    assert "mean of the last 5 steps" in printed


def test_the_model_learns():
    text = torch.tensor(bytearray(demo.load_text()), dtype=torch.uint8)
    backend = demo.thunderkittens_backend()
    trainee = demo.make_trainee(TINY, backend, torch.device("cpu"), seed=1)
    with demo.one_thread():
        steps = demo.train([trainee], text, TINY, 1, lambda step, trainees: None)
    assert steps == len(trainee.losses) == TINY.steps
    assert trainee.final_loss() < trainee.losses[0] - 0.5
    assert trainee.tokens_per_second(TINY) > 0


def broken_backend(kind: str) -> demo.Backend:
    """The package's ops with the fault that the demo has to find."""
    right = demo.thunderkittens_backend()
    return {
        "scaled": replace(right, linear=lambda x, w, b: 0.5 * right.linear(x, w, b)),
        "no gradient": replace(right, linear=lambda x, w, b: right.linear(x, w.detach(), b)),
        "NaN": replace(right, attention=lambda q, k, v: right.attention(q, k, v) * torch.nan),
    }[kind]


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("kind", ["scaled", "no gradient", "NaN"])
def test_a_wrong_op_fails_the_demo(kind, monkeypatch, capsys):
    backend = broken_backend(kind)
    monkeypatch.setattr(demo, "thunderkittens_backend", lambda: backend)
    assert run("--device", "cpu", "--quiet") == 1
    printed = capsys.readouterr()
    assert "NOT within the 2% allowed" in printed.out
    assert "gemm, attention or a gradient is wrong" in printed.err


def test_same_seed_same_start():
    device = torch.device("cpu")
    backends = (demo.thunderkittens_backend(), demo.pytorch_backend())
    ours, theirs = (demo.make_trainee(TINY, backend, device, seed=3).model for backend in backends)
    for (name, a), (_, b) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    text = torch.arange(200, dtype=torch.uint8)
    inputs, targets = demo.make_batch(text, TINY, seed=3, step=7)
    assert inputs.shape == targets.shape == (TINY.batch, TINY.context)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(inputs, demo.make_batch(text, TINY, seed=3, step=7)[0])
    assert not torch.equal(inputs, demo.make_batch(text, TINY, seed=3, step=8)[0])


def test_time_limit(monkeypatch, capsys):
    monkeypatch.setattr(demo, "CPU", replace(TINY, seconds=0))
    assert run("--device", "cpu", "--quiet") == 0
    assert f"Stopped after {demo.CHUNK} of 30 steps" in capsys.readouterr().out


@pytest.mark.usefixtures("tiny")
def test_bar_on_a_terminal(monkeypatch, capsys):
    pytest.importorskip("rich")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert run("--device", "cpu", "--steps", "20") == 0
    printed = capsys.readouterr().out
    assert "step   20/20" not in printed
    assert "20/20" in printed


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--steps", "0"], "--steps is 0; expected at least 1"),
        (["--device", "tpu"], "--device is 'tpu'; expected cpu, cuda or cuda:<index>"),
        (["--device", "mps"], "--device is 'mps'; expected cpu, cuda or cuda:<index>"),
        (["--device", "cuda:99"], "--device is 'cuda:99'; PyTorch"),
    ],
)
def test_wrong_options(options, words, capsys):
    assert run(*options) == 2
    message = capsys.readouterr().err
    assert message.startswith("thunderkittens demo: ")
    assert words in message
    assert len(message.splitlines()) == 1


def test_a_device_without_kernels_gives_one_line(monkeypatch, capsys):
    def refuse(*arguments):
        raise RuntimeError("tk.gemm: no kernel for sm_75\nand a long tail")

    right = demo.thunderkittens_backend()
    monkeypatch.setattr(demo, "thunderkittens_backend", lambda: replace(right, linear=refuse))
    assert run("--device", "cpu") == 2
    assert capsys.readouterr().err == "thunderkittens demo: tk.gemm: no kernel for sm_75\n"


def test_learning_rate():
    rates = [demo.learning_rate(TINY, step) for step in range(TINY.steps)]
    assert max(rates) == pytest.approx(TINY.learning_rate)
    assert rates[0] < rates[2] > rates[-1] > 0
