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
    FP16,
    INF,
    normal,
    operands,
    plain_attention,
    plain_low_lse,
    plain_lse,
)
from helpers.cover import cover, over
from helpers.layouts import HEAD_LAYOUTS, heads
from helpers.numerics import assert_accurate


def gradient_cases(device, intensity):
    return cover(
        {
            "lengths": [(7, 7), (130, 130), (113, 200), (200, 113), (64, 1), (1, 64)]
            + [(1024, 1024), (1031, 777)] * (device == "cuda"),
            "dim": [8, 64, 72, 128, 256],
            "heads": [(2, 2), (4, 2), (3, 1)],
            "causal": CAUSAL,
            "layout": HEAD_LAYOUTS,
            "dtype": [BF16, FP16],
            "scale": [None, 0.3],
            "lse": ["out", "lse", "both"],
            "needs": [n for n in itertools.product((True, False), repeat=3) if any(n)],
            "block": [64, None],
        },
        intensity,
    )


def gradients(function, leaves, loss, grad_out, grad_lse):
    out, lse = function(*leaves)
    outputs, grads = [], []
    if loss in ("out", "both"):
        outputs, grads = [out], [grad_out.to(out.dtype)]
    if loss in ("lse", "both"):
        outputs, grads = [*outputs, lse], [*grads, grad_lse.to(lse.dtype)]
    wanted = [x for x in leaves if x.requires_grad]
    outputs, grads = zip(
        *((x, g) for x, g in zip(outputs, grads, strict=True) if x.requires_grad), strict=True
    )
    return torch.autograd.grad(outputs, wanted, grads, allow_unused=True)


@over(gradient_cases)
def test_gradients(device, case, monkeypatch):
    if case["block"]:
        # A small budget of scores per block makes several blocks of these lengths.
        module = sys.modules["thunderkittens.reference.attention"]
        monkeypatch.setattr(module, "_BLOCK_SCORES", 1)
    q, k, v = operands(case, device)
    options = {"causal": case["causal"], "scale": case["scale"]}
    grad_out = normal(q.shape, q.dtype, device)
    grad_lse = torch.randn(q.shape[:3], device=device)
    grad_lse[plain_lse(q, k, **options) == -INF] = 0

    def leaves(dtype=None):
        return [
            (heads(x, case["layout"]) if dtype is None else x.to(dtype))
            .detach()
            .requires_grad_(need)
            for x, need in zip((q, k, v), case["needs"], strict=True)
        ]

    def run(function, xs):
        return gradients(function, xs, case["lse"], grad_out, grad_lse)

    if case["lse"] == "lse" and case["needs"] == (False, False, True):
        return  # the LSE does not depend on v
    actual = run(lambda *x: tk.attention(*x, **options, return_lse=True), leaves())
    expected = run(
        lambda *x: tk.reference.attention(*x, **options, return_lse=True), leaves(torch.float64)
    )
    plain = run(
        lambda q, k, v: (plain_attention(q, k, v, **options), plain_low_lse(q, k, **options)),
        leaves(case["dtype"]),
    )
    for x, e, p in zip(actual, expected, plain, strict=True):
        if e is None:
            assert x is None or bool((x == 0).all())
            continue
        assert x.dtype == case["dtype"]
        # What rounding the weights and their gradients to the op's precision costs, and what is
        # left of dP - delta where they cancel: there the plain formula may be exact by luck.
        slack = torch.finfo(x.dtype).eps * e.abs().max() + 1e-4
        assert_accurate(x, e, p, slack=slack)


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
            actual = tk.reference.attention_backward(
                grad_out, grad_lse, q, k, v, out, lse, causal=causal
            )
        for x, e in zip(actual, expected, strict=True):
            torch.testing.assert_close(x, e)
