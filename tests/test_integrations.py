"""The ops behind other libraries' interfaces."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from helpers.attention import BF16, FP16, FP32, normal
from thunderkittens.integrations import sdpa

CALLS = {
    "plain": ({}, True),
    "causal": ({"is_causal": True}, True),
    "upper left": ({"attn_mask": causal_upper_left(33, 45)}, True),
    "lower right": ({"attn_mask": causal_lower_right(33, 45)}, True),
    "scale": ({"scale": 0.3}, True),
    "mask": ({"attn_mask": torch.ones(33, 45, dtype=torch.bool).tril(5)}, False),
    "bias": ({"attn_mask": torch.randn(33, 45)}, False),
}


@pytest.fixture
def calls(monkeypatch):
    """Which calls `tk.attention` gets."""
    seen = []

    def spy(module, attention):
        def call(*args, **options):
            seen.append(options)
            return attention(*args, **options)

        monkeypatch.setattr(module, "attention", call)

    spy(sdpa, sdpa.attention)
    return seen


def operands(device, dtype=BF16, dim=64, kv_heads=4):
    q = normal((2, 4, 33, dim), dtype, device)
    return q, *(normal((2, kv_heads, 45, dim), dtype, device) for _ in range(2))


def test_signature():
    ours = inspect.signature(sdpa.scaled_dot_product_attention)
    assert list(ours.parameters) == [
        *("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    ]


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("name", CALLS)
def test_sdpa(device, name, dtype, calls):
    """The same results as PyTorch's, by `tk.attention` on a GPU where it can be."""
    options, direct = CALLS[name]
    options = dict(options)
    mask = options.get("attn_mask")
    if type(mask) is torch.Tensor:
        options["attn_mask"] = (
            mask.to(device) if mask.dtype == torch.bool else mask.to(device, dtype)
        )
    tensors = [x.requires_grad_() for x in operands(device, dtype)]
    out = sdpa.scaled_dot_product_attention(*tensors, **options)
    expected = F.scaled_dot_product_attention(*tensors, **options)
    torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)
    assert len(calls) == (direct and device == "cuda" and dtype != FP32)
    out.sum().backward()


def test_sdpa_groups_and_errors(device, calls):
    q, k, v = operands(device, kv_heads=2)
    out = sdpa.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    expected = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)
    assert len(calls) == (device == "cuda")
    with pytest.raises(RuntimeError):
        sdpa.scaled_dot_product_attention(q, k, v)
    sdpa.scaled_dot_product_attention(q, k, v, dropout_p=0.5, enable_gqa=True)
    odd = [x[..., :60] for x in operands(device)]
    sdpa.scaled_dot_product_attention(*odd)
    sdpa.scaled_dot_product_attention(q[0], q[0], q[0])
    assert len(calls) == (device == "cuda")
