"""What the tests of attention share: operands, the formula at the op's precision, comparison."""

from __future__ import annotations

import math

import torch

import thunderkittens as tk

from .numerics import assert_accurate

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
INF = math.inf
CAUSAL = [False, True, "upper_left"]


def normal(shape, dtype, device):
    return torch.randn(shape, device=device).to(dtype)


def operands(case, device, batch=2):
    (length_q, length_k), (heads_q, heads_k) = case["lengths"], case["heads"]
    shapes = [(batch, heads_q, length_q), (batch, heads_k, length_k), (batch, heads_k, length_k)]
    return [normal((*shape, case["dim"]), case["dtype"], device) for shape in shapes]


def visible(length_q, length_k, causal, device):
    """Which keys each row sees, written down independently of the library."""
    rows = torch.arange(length_q, device=device).unsqueeze(1)
    columns = torch.arange(length_k, device=device)
    if causal == "upper_left":
        return columns <= rows
    if causal:
        return columns - length_k <= rows - length_q
    return torch.ones(length_q, length_k, dtype=torch.bool, device=device)


def plain_attention(q, k, v, causal, scale):
    """The formula in plain PyTorch at the op's precision; rows that see nothing are 0."""
    group = q.shape[1] // max(k.shape[1], 1)
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.mT * (1 / math.sqrt(q.shape[3]) if scale is None else scale)
    mask = visible(q.shape[2], k.shape[2], causal, q.device)
    weights = torch.softmax(scores.masked_fill(~mask, -INF), 3).masked_fill(~mask, 0.0)
    return weights @ v


def plain_lse(q, k, causal, scale):
    k = k.repeat_interleave(q.shape[1] // max(k.shape[1], 1), 1)
    scores = q.float() @ k.float().mT * (1 / math.sqrt(q.shape[3]) if scale is None else scale)
    mask = visible(q.shape[2], k.shape[2], causal, q.device)
    return scores.masked_fill(~mask, -INF).logsumexp(3)


def double(*tensors):
    return [x.double() for x in tensors]


def assert_attention(result, q, k, v, *, causal=False, scale=None):
    """Compares an output, or a pair of output and LSE, to the definition in float64."""
    out, lse = result if isinstance(result, tuple) else (result, None)
    options = {"causal": causal, "scale": scale}
    expected, expected_lse = tk.reference.attention(*double(q, k, v), **options, return_lse=True)
    assert out.dtype == q.dtype
    assert_accurate(out, expected, plain_attention(q, k, v, **options), rows=16)
    if lse is not None:
        assert lse.dtype == FP32
        assert lse.is_contiguous()
        slack = 2**-16 * torch.clamp(expected_lse.abs().nan_to_num(posinf=0.0), min=1.0)
        assert_accurate(lse, expected_lse, plain_lse(q, k, **options), slack=slack)


def plain_low_lse(q, k, causal, scale):
    """The LSE at the op's precision; rows that see nothing contribute no gradient."""
    k = k.repeat_interleave(q.shape[1] // max(k.shape[1], 1), 1)
    scores = q @ k.mT * (1 / math.sqrt(q.shape[3]) if scale is None else scale)
    mask = visible(q.shape[2], k.shape[2], causal, q.device)
    return scores.masked_fill(~mask, torch.finfo(q.dtype).min).logsumexp(3)
