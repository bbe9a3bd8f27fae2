"""The gradient of `tk.attention`: its values, what it costs, and what it refuses."""

from __future__ import annotations

import itertools
import sys

import pytest
import torch

import thunderkittens as tk
from helpers.attention import (
    BF16,
    CAUSAL,
    DIMS,
    EMULATED_DIMS,
    FP16,
    HEADS,
    INF,
    LONG,
    MASKS,
    SCORES,
    assert_gradients,
    call_options,
    emulated,
    gradient_devices,
    gradients,
    normal,
    operands,
    plain_attention,
    plain_low_lse,
    plain_lse,
    sink_noise,
)
from helpers.cover import cover, over
from helpers.layouts import HEAD_LAYOUTS, heads

NEEDS = [n for n in itertools.product((True, False), repeat=4) if any(n)]


def gradient_cases(device, intensity):
    if not gradient_devices(device):
        return []
    lengths = [(7, 7), (130, 130), (113, 200), (200, 113), (64, 1), (1, 64)]
    return cover(
        {
            "lengths": lengths + LONG * (device == "cuda"),
            "dim": EMULATED_DIMS if emulated(device) else DIMS,
            "heads": HEADS,
            "mask": MASKS,
            "scores": SCORES,
            "layout": HEAD_LAYOUTS,
            "dtype": [BF16, FP16],
            "scale": [None, 0.3, -0.1],
            "lse": ["out", "lse", "both"],
            "needs": NEEDS,
            "block": [64, None],
            "deterministic": [None, False, True],
        },
        intensity,
    )


@over(gradient_cases)
def test_gradients(device, case, monkeypatch):
    if case["block"]:
        # A small budget of scores per block makes several blocks of these lengths.
        module = sys.modules["thunderkittens.reference.attention"]
        monkeypatch.setattr(module, "_BLOCK_SCORES", 1)
    q, k, v = operands(case, device)
    options = call_options(case, device)
    sink = options.pop("sink", None)
    grad_out = normal((*q.shape[:3], v.shape[3]), q.dtype, device)
    grad_lse = torch.randn(q.shape[:3], device=device)
    grad_lse[plain_lse(q, k, sink=sink, **options) == -INF] = 0
    wanted = case["needs"][:3] if sink is None else case["needs"]

    def leaves(place):
        tensors = [place(x) for x in (q, k, v)] + ([] if sink is None else [sink])
        return [x.detach().requires_grad_(need) for x, need in zip(tensors, wanted, strict=True)]

    def run(function, xs):
        def call(q, k, v, sink=None):
            return function(q, k, v, sink=sink, **options)

        return gradients(call, xs, case["lse"], grad_out, grad_lse)

    if case["lse"] == "lse" and not (wanted[0] or wanted[1] or wanted[3:] == (True,)):
        return  # the LSE does not depend on v
    if not any(wanted):
        return
    actual = run(
        lambda *x, **o: tk.attention(*x, **o, deterministic=case["deterministic"], return_lse=True),
        leaves(lambda x: heads(x, case["layout"])),
    )
    expected = run(
        lambda *x, **o: tk.reference.attention(*x, **o, return_lse=True),
        leaves(torch.Tensor.double),
    )
    plain = run(
        lambda q, k, v, **o: (plain_attention(q, k, v, **o), plain_low_lse(q, k, **o)),
        leaves(lambda x: x),
    )
    noise = 0.0 if sink is None else sink_noise(q, k, v, grad_out, sink=sink, **options)
    assert_gradients(actual, expected, plain, noise=noise)
    for x, leaf in zip(
        actual, (x for x, need in zip((q, k, v, sink), wanted, strict=False) if need), strict=True
    ):
        assert x is None or x.dtype == leaf.dtype


def test_gradient_keeps_the_order_of_strides(device):
    leaves = [
        heads(normal((2, 3, 20, 64), BF16, device), "bshd").detach().requires_grad_()
        for _ in range(3)
    ]
    tk.attention(*leaves).sum().backward()
    assert all(x.grad.stride() == x.stride() for x in leaves)


def test_double_backward_is_refused(device):
    q, k, v = (normal((1, 2, 9, 64), BF16, device).requires_grad_() for _ in range(3))
    (grad,) = torch.autograd.grad(tk.attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match=r"tk.attention: .*double backward"):
        grad.sum().backward()


def test_no_graph_when_no_gradient_is_wanted(device):
    q, k, v = (normal((1, 2, 9, 64), BF16, device) for _ in range(3))
    assert tk.attention(q, k, v).grad_fn is None
    k.requires_grad_()
    assert tk.attention(q, k, v).grad_fn is not None
    with torch.no_grad():
        assert not tk.attention(q, k, v).requires_grad
        assert not tk.attention(q, k, v, return_lse=True)[1].requires_grad


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_gradient_memory_is_linear(device, causal):
    """The scores of this call would take 16 GiB."""
    leaves = [normal((1, 1, 65536, 64), BF16, device).requires_grad_() for _ in range(3)]
    out = tk.attention(*leaves, causal=causal)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out.backward(torch.ones_like(out))
    assert torch.cuda.max_memory_allocated() - before < 2 << 30


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "heads"), [(70000, 1), (1, 70000)])
@pytest.mark.parametrize("length", [3, 130])
def test_more_heads_than_a_grid_is_wide(device, length, batch, heads):
    """As windows of pictures make them: 65535 is the limit of two of a grid's dimensions."""
    leaves = [normal((batch, heads, length, 8), BF16, device) for _ in range(4)]

    def run(q, k, v, grad):
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        out = tk.attention(*inputs, causal=True, deterministic=True)
        return [out, *torch.autograd.grad(out, inputs, grad)]

    part = (slice(-3, None), slice(-3, None))
    for x, y in zip(run(*leaves), run(*(x[part] for x in leaves)), strict=True):
        torch.testing.assert_close(x[part], y, atol=1e-2, rtol=1e-2)


def test_gradient_in_blocks_is_the_gradient(device):
    """The public blocked gradient of the reference, in float64, against autograd."""
    q, k, v = (
        torch.randn(2, h, n, 16, dtype=torch.float64, device=device, requires_grad=True)
        for h, n in ((4, 150), (2, 170), (2, 170))
    )
    for causal in CAUSAL:
        out, lse = tk.reference.attention(q, k, v, causal=causal, return_lse=True)
        grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse)
        expected = torch.autograd.grad((out, lse), (q, k, v), (grad_out, grad_lse))
        with torch.no_grad():
            *actual, grad_sink = tk.reference.attention_backward(
                grad_out, grad_lse, q, k, v, out, lse, causal=causal
            )
        assert grad_sink is None
        for x, e in zip(actual, expected, strict=True):
            torch.testing.assert_close(x, e)
