"""THUNDERKITTENS_LOG: a line for each call of an op."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch

import thunderkittens as tk
from helpers.attention import BF16, normal
from helpers.samples import SAMPLES, equal
from thunderkittens import _log


@pytest.fixture
def lines():
    written = []
    log = _log.Log(written.append)
    yield written
    log.remove()


def test_a_call_on_the_cpu(lines):
    q = normal((1, 2, 16, 64), BF16, "cpu")
    k = q.transpose(1, 2).contiguous().transpose(1, 2)
    tk.attention(q, k, q, causal=True, scale=0.5)
    tk.gemm(q[0, 0], q[0, 0].t())
    assert lines[0] == (
        "thunderkittens: attention_forward(q bfloat16 (1, 2, 16, 64), k bfloat16 (1, 2, 16, 64) "
        "strides (2048, 64, 128, 1), v bfloat16 (1, 2, 16, 64), causal=1, scale=0.5): "
        "the formula, in PyTorch"
    )
    assert lines[1].startswith("thunderkittens: gemm_forward(a bfloat16 (16, 64), b bfloat16 (64,")
    assert len(lines) == 2


@pytest.mark.emulator
def test_the_kernel_is_that_of_the_launch(lines):
    q = normal((1, 2, 100, 64), BF16, "cpu").requires_grad_()
    with tk.emulate() as run:
        tk.attention(q, q, q).sum().backward()
    assert len(lines) == len(run.kernels) == 2
    for line, choice, op in zip(
        lines, run.kernels, ("attention", "attention_backward"), strict=True
    ):
        assert line.startswith(f"thunderkittens: {op}(")
        text = line.rpartition("): ")[2]
        kernel, fields = re.fullmatch(r"(\w+) \[(.*)\]", text).groups()
        assert kernel == choice["kernel"]
        pairs = dict(pair.split("=") for pair in fields.split())
        assert set(pairs) == set(choice) - {"kernel"}
        assert all(pairs[name] == _log._value_text(choice[name]) for name in pairs)


@pytest.mark.parametrize("key", SAMPLES)
def test_results_are_as_without(key):
    """Of every op, also where it changes a state or writes to a tensor."""
    sample = SAMPLES[key]
    tensors = sample.tensors("cpu")
    expected = sample.function(*tensors)
    written = []
    log = _log.Log(written.append)
    try:
        results = sample.function(*tensors)
    finally:
        log.remove()
    assert written
    for x, y in zip(results, expected, strict=True):
        assert equal(x, y)
    count = len(written)
    sample.function(*tensors)
    assert len(written) == count


def test_compiled_code_is_logged(lines):
    torch._dynamo.reset()
    q = normal((1, 2, 16, 64), BF16, "cpu").requires_grad_()
    compiled = torch.compile(
        lambda q: tk.attention(q, q, q, causal=True), fullgraph=True, backend="aot_eager"
    )
    compiled(q).sum().backward()
    assert [re.match(r"thunderkittens: (\w+)", line)[1] for line in lines] == [
        *("attention", "attention_backward")
    ]
    torch._dynamo.reset()


@pytest.mark.parametrize("value", [None, "0", "1"])
def test_the_environment_asks_for_it(value):
    code = (
        "import torch, thunderkittens as tk\n"
        "x = torch.ones(8, 8, dtype=torch.bfloat16)\n"
        "tk.gemm(x, x)\n"
    )
    environment = {key: x for key, x in os.environ.items() if key != "THUNDERKITTENS_LOG"}
    if value is not None:
        environment["THUNDERKITTENS_LOG"] = value
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    found = [line for line in done.stderr.splitlines() if line.startswith("thunderkittens: ")]
    assert len(found) == (value == "1")
    assert "Warning" not in done.stderr
    assert done.stdout == ""


@pytest.mark.gpu
def test_on_a_gpu(lines):
    q = normal((1, 2, 200, 64), BF16, "cuda").requires_grad_()
    tk.attention(q, q, q).sum().backward()
    x = normal((256, 256), BF16, "cuda")
    tk.gemm(x, x.t())
    tk.fp8_quantize(x, "row")
    ops = [re.match(r"thunderkittens: (\w+)\(", line)[1] for line in lines]
    assert ops[:3] == ["attention", "attention_backward", "gemm_forward"]
    assert all(re.search(r"\): .*\w+ \[\w+=.*\]", line) for line in lines), lines
