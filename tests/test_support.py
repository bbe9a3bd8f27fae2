"""`tk.is_supported`: the answer is that of the call."""

from __future__ import annotations

import contextlib
import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import thunderkittens as tk
from helpers.attention import BF16, FP32, normal
from helpers.samples import SAMPLES, equal
from thunderkittens import _load, emulation, support


def recorded(monkeypatch, sample):
    """The arguments with which a sample calls its function."""
    name = sample.public or sample.op
    seen = []
    monkeypatch.setattr(tk, name, lambda *args, **options: seen.append((args, options)) or None)
    tensors = sample.tensors("cpu")
    with contextlib.suppress(TypeError):  # of what is done with the result
        sample.function(*tensors)
    monkeypatch.undo()
    assert len(seen) == 1
    return name, *seen[0]


@pytest.mark.parametrize("key", SAMPLES)
def test_every_op(key, monkeypatch):
    """Calls that are right are supported, leave everything as it was, and wrong ones have the
    error of the call as the reason."""
    name, args, options = recorded(monkeypatch, SAMPLES[key])
    before = [x.clone() for x in support._tensors((args, options))]
    answer = tk.is_supported(name, *args, **options)
    assert answer, answer.reason
    assert answer.supported
    assert answer.reason == ""
    for x, y in zip(before, support._tensors((args, options)), strict=True):
        assert equal(x, y)
    for wrong in ((None, *args[1:]), (torch.zeros(3, dtype=torch.int64), *args[1:])):
        answer = tk.is_supported(name, *wrong, **options)
        assert not answer
        with pytest.raises((TypeError, ValueError, RuntimeError)) as error:
            getattr(tk, name)(*wrong, **options)
        assert answer.reason == str(error.value)


def test_every_function_is_known():
    functions = {sample.public or sample.op for sample in SAMPLES.values()}
    assert functions <= set(support.KERNELS) <= set(tk.__all__)
    assert set(support.KERNELS.values()) <= set(_load.compiled_module().ops())


def test_reasons():
    q = normal((1, 2, 16, 60), BF16, "cpu")
    answer = tk.is_supported("attention", q, q, q, causal=True)
    assert not answer
    assert answer.reason == (
        "tk.attention: q has head dim 60; it must be a multiple of 8 from 8 to 256"
    )
    q = normal((1, 2, 16, 64), FP32, "cpu")
    assert "supported are torch.bfloat16" in tk.is_supported("attention", q, q, q).reason
    assert "dropout is not supported" in tk.is_supported("attention", q, q, q, dropout_p=0.1).reason
    assert "missing" in tk.is_supported("attention", q).reason
    names = ", ".join(support.KERNELS)
    with pytest.raises(ValueError, match=f"there is no op 'atention'; it must be one of {names}$"):
        tk.is_supported("atention", q, q, q)


@pytest.mark.parametrize("op", ["append_kv", "attention_decode", "attention_paged"])
def test_caches(op, device):
    """Answers for a call that changes a cache, or reads it, leave it as it is."""
    x = normal((1, 3, 2, 64), BF16, device)
    cache = torch.zeros(1, 64, 2, 64, dtype=BF16, device=device)
    lengths = torch.zeros(1, dtype=torch.int32, device=device)
    table = torch.zeros(1, 1, dtype=torch.int32, device=device)
    calls = {
        "append_kv": ((x, x, cache, cache.clone()), {"seq_lens": lengths}),
        "attention_decode": ((x, cache, cache.clone(), lengths), {"k": x, "v": x}),
        "attention_paged": ((x, cache, cache.clone(), table, lengths), {"k": x, "v": x}),
    }
    args, options = calls[op]
    answer = tk.is_supported(op, *args, **options)
    assert answer, answer.reason
    assert not bool(cache.any())
    getattr(tk, op)(*args, **options)
    assert torch.equal(cache[:, :3], x)
    wrong = tk.is_supported(op, *args[:2], cache[..., :60], *args[3:], **options)
    assert not wrong
    with pytest.raises(ValueError, match=re.escape(wrong.reason)):
        getattr(tk, op)(*args[:2], cache[..., :60], *args[3:], **options)


def test_gradients_that_are_not_computed():
    q = normal((1, 2, 16, 64), BF16, "cpu")
    slopes = torch.ones(2, requires_grad=True)
    assert (
        "requires a gradient" in tk.is_supported("attention", q, q, q, alibi_slopes=slopes).reason
    )
    with torch.no_grad():
        assert tk.is_supported("attention", q, q, q, alibi_slopes=slopes)


@pytest.mark.emulator
def test_nothing_runs():
    q = normal((1, 2, 16, 64), BF16, "cpu").requires_grad_()
    with tk.emulate() as run:
        assert tk.is_supported("attention", q, q, q, return_lse=True)
    assert not run.kernels
    assert q.grad is None


@pytest.mark.emulator
def test_the_emulator_may_lack_a_kernel(monkeypatch):
    q = normal((1, 2, 16, 64), BF16, "cpu")
    monkeypatch.setattr(emulation, "has", lambda op: op != "attention")
    assert tk.is_supported("attention", q, q, q)
    with tk.emulate():
        answer = tk.is_supported("attention", q, q, q)
        assert answer.reason == "tk.attention: the emulator has no kernel of it"


def test_tensors_without_data():
    q = torch.empty(1, 2, 1 << 20, 64, dtype=BF16, device="meta")
    assert tk.is_supported("attention", q, q, q)
    with FakeTensorMode():
        fake = torch.empty(1, 2, 1 << 20, 64, dtype=BF16)
    assert tk.is_supported("attention", fake, fake, fake)
    assert not tk.is_supported("attention", fake, fake, fake[0])


def test_gpus_without_kernels(monkeypatch):
    """On tensors of a GPU that is not there, the reason is what is missing."""
    with FakeTensorMode():
        q = torch.empty(1, 2, 16, 64, dtype=BF16, device="cuda")
    monkeypatch.setattr(_load, "cuda_problem", "a sentence")
    assert tk.is_supported("attention", q, q, q).reason == "tk.attention: a sentence"
    assert "head dim 60" in tk.is_supported("attention", *[q[..., :60]] * 3).reason
    monkeypatch.setattr(_load, "cuda_problem", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "sees no CUDA device" in tk.is_supported("attention", q, q, q).reason


@pytest.mark.gpu
def test_on_a_gpu():
    q = normal((1, 2, 16, 64), BF16, "cuda")
    assert tk.is_supported("attention", q, q, q)
    assert "on cpu" in tk.is_supported("attention", q, q.cpu(), q).reason
