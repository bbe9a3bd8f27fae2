"""`tk.compat`: the functions of flash-attn, against its formula written out plainly."""

from __future__ import annotations

import inspect
import math

import pytest
import torch

import thunderkittens as tk
from helpers.attention import BF16, FP16, FP32, gradient_devices, normal
from thunderkittens import compat

NONE = inspect.Parameter.empty
OPTIONS = {
    "dropout_p": 0.0,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None,
    "deterministic": False,
    "return_attn_probs": False,
}
PACKING = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
# Of flash-attn 3, up to `return_softmax_lse`; the last three are this package's, by keyword alone.
CACHE = {
    **dict.fromkeys(("q", "k_cache", "v_cache"), NONE),
    **dict.fromkeys(("k", "v", "qv", "rotary_cos", "rotary_sin", "cache_seqlens")),
    **dict.fromkeys(("cache_batch_idx", "cache_leftpad", "page_table", "cu_seqlens_q")),
    **dict.fromkeys(("cu_seqlens_k_new", "max_seqlen_q", "rotary_seqlens")),
    **dict.fromkeys(("q_descale", "k_descale", "v_descale", "softmax_scale")),
    "causal": False,
    "window_size": (-1, -1),
    "attention_chunk": 0,
    "softcap": 0.0,
    "rotary_interleaved": True,
    "scheduler_metadata": None,
    "num_splits": 0,
    "pack_gqa": None,
    "sm_margin": 0,
    "return_softmax_lse": False,
}
OURS = dict.fromkeys(("block_table", "alibi_slopes", "s_aux"))
METADATA = {
    **dict.fromkeys(("batch_size", "max_seqlen_q", "max_seqlen_k", "num_heads_q"), NONE),
    **dict.fromkeys(("num_heads_kv", "headdim", "cache_seqlens"), NONE),
    "qkv_dtype": BF16,
    **dict.fromkeys(("headdim_v", "cu_seqlens_q", "cu_seqlens_k_new", "cache_leftpad")),
    "page_size": None,
    "max_seqlen_k_new": 0,
    "causal": False,
    "window_size": (-1, -1),
    "attention_chunk": 0,
    "has_softcap": False,
    "num_splits": 0,
    "pack_gqa": None,
    "sm_margin": 0,
}
SIGNATURES = {
    "flash_attn_func": dict.fromkeys("qkv", NONE) | OPTIONS,
    "flash_attn_varlen_func": dict.fromkeys(("q", "k", "v", *PACKING), NONE)
    | OPTIONS
    | {"block_table": None},
    "flash_attn_qkvpacked_func": {"qkv": NONE} | OPTIONS,
    "flash_attn_varlen_qkvpacked_func": dict.fromkeys(("qkv", "cu_seqlens", "max_seqlen"), NONE)
    | OPTIONS,
    "flash_attn_with_kvcache": CACHE | OURS,
    "get_scheduler_metadata": METADATA,
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name):
    parameters = inspect.signature(getattr(compat, name)).parameters
    assert [(n, p.default) for n, p in parameters.items()] == list(SIGNATURES[name].items())
    by_keyword = {n for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
    assert by_keyword == (set(OURS) if name == "flash_attn_with_kvcache" else set())
    assert set(compat.__all__) == set(SIGNATURES)


def formula(q, k, v, scale=None, causal=False, window=(-1, -1), softcap=0.0, slopes=None):
    """Attention of (B, S, H, D) in float64, as flash-attn documents it; out and LSE."""
    rows, keys, groups = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(groups, 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * (scale or 1 / math.sqrt(q.shape[3]))
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    i = torch.arange(rows, device=q.device)[:, None] + keys - rows
    j = torch.arange(keys, device=q.device)[None, :]
    if slopes is not None:
        slopes = slopes.double().expand(q.shape[0], -1)
        scores = scores - slopes[:, :, None, None] * (i - j).abs()
    seen = torch.ones(rows, keys, dtype=torch.bool, device=q.device)
    left, right = window
    if causal:
        right = 0
    if left >= 0:
        seen &= j >= i - left
    if right >= 0:
        seen &= j <= i + right
    scores = scores.masked_fill(~seen, -math.inf)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse[..., None].nan_to_num(neginf=0.0))
    return torch.einsum("bhij,bjhd->bihd", weights, v), lse


CASES = {
    "plain": {},
    "causal": {"causal": True},
    "causal, more keys": {"lengths": (40, 70), "causal": True},
    "causal, more rows": {"lengths": (70, 40), "causal": True},
    "window": {"window": (17, 5)},
    "left window": {"causal": True, "window": (17, -1)},
    "right window": {"window": (-1, 9)},
    "unbounded by -5": {"window": (-5, -2)},
    "softcap": {"softcap": 3.0, "causal": True},
    "slopes": {"slopes": 1},
    "slopes of the batch": {"slopes": 2, "causal": True},
    "scale": {"scale": 0.3},
    "groups": {"heads": (4, 2), "causal": True},
    "float16": {"dtype": FP16, "causal": True},
    "head dim of 60": {"dim": 60, "causal": True},
    "head dim of 60, scale": {"dim": 60, "scale": 0.2},
    "head dim of 9": {"dim": 9},
}


def inputs(case, device):
    case = dict(CASES[case])
    dtype, dim = case.pop("dtype", BF16), case.pop("dim", 64)
    rows, keys = case.pop("lengths", (50, 50))
    heads, heads_k = case.pop("heads", (2, 2))
    if number := case.pop("slopes", 0):
        case["slopes"] = torch.rand(*(2,)[: number - 1], heads, device=device)
    shapes = ((2, rows, heads, dim), (2, keys, heads_k, dim), (2, keys, heads_k, dim))
    return [normal(s, dtype, device).requires_grad_() for s in shapes], case


def renamed(options):
    names = {"scale": "softmax_scale", "window": "window_size", "slopes": "alibi_slopes"}
    return {names.get(key, key): value for key, value in options.items()}


def assert_close(actual, expected):
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x.double(), y.double(), atol=3e-2, rtol=3e-2)


def gradients(out, tensors, seed=7):
    generator = torch.Generator().manual_seed(seed)
    grad = torch.randn(out.shape, generator=generator).to(out.device, out.dtype)
    return torch.autograd.grad(out, tensors, grad)


@pytest.mark.parametrize("name", CASES)
def test_dense(device, name):
    """Results and gradients."""
    tensors, options = inputs(name, device)
    out, lse, empty = compat.flash_attn_func(*tensors, **renamed(options), return_attn_probs=True)
    wide = [x.detach().double().requires_grad_() for x in tensors]
    expected, expected_lse = formula(*wide, **options)
    assert out.shape == tensors[0].shape
    assert out.dtype == tensors[0].dtype
    assert lse.dtype == FP32
    assert empty.numel() == 0
    assert_close([out, lse], [expected, expected_lse])
    alone = compat.flash_attn_func(*tensors, **renamed(options))
    assert torch.equal(alone, out)
    if gradient_devices(device):
        seen = gradients(alone, tensors)
        assert_close(seen, gradients(expected, wide))


def edges_of(lengths, device):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device=device)


@pytest.mark.parametrize("name", ["plain", "causal", "slopes of the batch", "head dim of 60"])
def test_packed_sequences(device, name):
    """Each sequence by itself."""
    (q, k, v), options = inputs(name, device)
    lengths_q, lengths_k = (13, 50), (50, 20)
    tensors = [
        torch.cat([x[b, :n] for b, n in enumerate(lengths)]).detach().requires_grad_()
        for x, lengths in ((q, lengths_q), (k, lengths_k), (v, lengths_k))
    ]
    edges = (edges_of(lengths_q, device), edges_of(lengths_k, device), 50, 50)
    out, lse, _ = compat.flash_attn_varlen_func(
        *tensors, *edges, **renamed(options), return_attn_probs=True
    )
    assert lse.shape == (q.shape[2], 63)
    wide = [x.detach().double().requires_grad_() for x in tensors]
    expected = []
    for b, (start, start_k) in enumerate(((0, 0), (13, 50))):
        stop, stop_k = start + lengths_q[b], start_k + lengths_k[b]
        one = [wide[0][None, start:stop], *(x[None, start_k:stop_k] for x in wide[1:])]
        own = dict(options)
        if "slopes" in own:
            own["slopes"] = own["slopes"][b : b + 1]
        expected.append(formula(*one, **own))
        assert_close([lse[:, start:stop]], [expected[-1][1][0]])
    joined = torch.cat([x[0][0] for x in expected])
    assert_close([out], [joined])
    if gradient_devices(device):
        assert_close(gradients(out, tensors), gradients(joined, wide))


@pytest.mark.parametrize("probs", [False, True])
def test_one_tensor_for_all_three(device, probs):
    qkv = normal((2, 40, 3, 2, 64), BF16, device).requires_grad_()
    options = {"causal": True, "softmax_scale": 0.2, "return_attn_probs": probs}
    packed = compat.flash_attn_qkvpacked_func(qkv, **options)
    apart = compat.flash_attn_func(*qkv.unbind(2), **options)
    edges = edges_of((40, 40), device)
    varlen = compat.flash_attn_varlen_qkvpacked_func(qkv.flatten(0, 1), edges, 40, **options)
    if probs:
        assert torch.equal(packed[1], apart[1])
        assert varlen[1].shape == (2, 80)
        packed, apart, varlen = packed[0], apart[0], varlen[0]
    assert torch.equal(packed, apart)
    assert_close([varlen], [apart.flatten(0, 1)])
    if gradient_devices(device):
        of_packed, of_apart = (gradients(x, [qkv]) for x in (packed, apart))
        assert torch.equal(of_packed[0], of_apart[0])


def test_determinism_is_asked_for(monkeypatch):
    seen = []
    monkeypatch.setattr(
        compat, "attention", lambda *a, **o: (seen.append(o), tk.attention(*a, **o))[1]
    )
    q = normal((1, 8, 1, 64), BF16, "cpu")
    for deterministic in (False, True):
        compat.flash_attn_func(q, q, q, deterministic=deterministic)
    assert [o["deterministic"] for o in seen] == [None, True]


def test_errors(device):
    q = normal((1, 8, 2, 64), BF16, device)
    edges = edges_of((8,), device)
    calls = {
        "flash_attn_func": (q, q, q),
        "flash_attn_varlen_func": (*[q[0]] * 3, edges, edges, 8, 8),
        "flash_attn_qkvpacked_func": (torch.stack([q, q, q], 2),),
        "flash_attn_varlen_qkvpacked_func": (torch.stack([q[0]] * 3, 1), edges, 8),
    }
    for name, args in calls.items():
        function = getattr(compat, name)
        function(*args)
        with pytest.raises(TypeError, match=rf"tk.compat.{name}: .* dropout is not supported"):
            function(*args, dropout_p=0.1)
        with pytest.raises(TypeError, match=rf"tk.compat.{name}: q.* must be a torch.Tensor"):
            function(None, *args[1:])
        with pytest.raises(ValueError, match=rf"tk.compat.{name}: .* must have \d dimensions"):
            function(args[0][0], *args[1:])
        with pytest.raises(TypeError, match="float32"):
            function(*(x.float() if x is args[0] else x for x in args))
    with pytest.raises(TypeError, match=r"paged keys .*, or call tk.compat.flash_attn_with_kv"):
        compat.flash_attn_varlen_func(*calls["flash_attn_varlen_func"], block_table=edges)
    with pytest.raises(ValueError, match=r"must be \(B, S, 3, H, D\)"):
        compat.flash_attn_qkvpacked_func(torch.stack([q, q], 2))


def test_compiled(device):
    torch._dynamo.reset()
    tensors = [normal((1, 24, 2, 64), BF16, device).requires_grad_() for _ in range(3)]

    def model(q, k, v):
        return compat.flash_attn_func(q, k, v, causal=True)

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*tensors), model(*tensors))
    torch._dynamo.reset()
