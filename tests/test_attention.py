"""`tk.attention`: values, layouts, masks, gradients, wrong calls. What holds for every op (streams,
graphs, threads, compilation ...) is in test_library.py."""

from __future__ import annotations

import itertools
import math
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import thunderkittens as tk
from helpers.cover import cover, over
from helpers.guard import assert_guards_intact
from helpers.layouts import HEAD_LAYOUTS, embed, heads
from helpers.numerics import assert_accurate, integers
from thunderkittens.reference import attention as reference_attention

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
INF = math.inf

DIMS = [8, 40, 64, 72, 96, 128, 160, 192, 256]
LENGTHS = [  # Sq, Sk
    (0, 5),
    (5, 0),
    (1, 1),
    (1, 129),
    (7, 7),
    (127, 129),
    (129, 127),
    (64, 64),
    (128, 128),
    (113, 257),
    (256, 100),
    (3, 300),
]
LENGTHS_CUDA = [
    (1024, 1024),
    (1023, 1031),
    (2003, 777),
    (777, 2003),
    (4099, 4099),
    (1, 8192),
    (130, 16384),
]
CAUSAL = [False, True, "upper_left"]


def cases(device, intensity):
    return cover(
        {
            "lengths": LENGTHS + LENGTHS_CUDA * (device == "cuda"),
            "dim": DIMS,
            "heads": [(2, 2), (4, 2), (3, 1), (6, 2)],
            "causal": CAUSAL,
            "layout_q": HEAD_LAYOUTS,
            "layout_k": HEAD_LAYOUTS,
            "layout_v": HEAD_LAYOUTS,
            "dtype": [BF16, FP16],
            "scale": [None, 0.3, -0.05],
            "lse": [True, False],
        },
        intensity,
    )


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


@over(cases)
def test_accuracy(device, case):
    q, k, v = operands(case, device)
    placed = [heads(x, case[f"layout_{name}"]) for name, x in zip("qkv", (q, k, v), strict=True)]
    options = {"causal": case["causal"], "scale": case["scale"]}
    result = tk.attention(*placed, **options, return_lse=case["lse"])
    out = result[0] if case["lse"] else result
    assert out.stride() == torch.empty_like(placed[0]).stride()
    assert_attention(result, q, k, v, **options)


def selecting(length_q, length_k, dim, causal, heads_q, heads_k, dtype, device):
    """Operands whose softmax is one key per row, so that every output is a row of v, bit by bit.

    The keys are different words of +-1; a query is the word of the key that it selects among those
    that it sees. With a scale of 100, all other weights underflow to 0.
    """
    words = torch.randperm(2 ** min(dim, 20), device=device)[:length_k]
    bits = (words.unsqueeze(1) >> torch.arange(min(dim, 20), device=device)) & 1
    signs = torch.ones(length_k, dim, dtype=dtype, device=device)
    signs[:, : bits.shape[1]] = (2 * bits - 1).to(dtype)
    mask = visible(length_q, length_k, causal, device)
    choice = torch.rand(2, heads_q, length_q, length_k, device=device).masked_fill(~mask, -1.0)
    choice = choice.argmax(3)
    q = signs[choice]
    k = signs.expand(2, heads_k, length_k, dim)
    v = integers(2, heads_k, length_k, dim, low=-99, high=99, dtype=dtype, device=device)
    chosen = v.repeat_interleave(heads_q // heads_k, 1).gather(
        2, choice.unsqueeze(3).expand(-1, -1, -1, dim)
    )
    empty = ~mask.any(1)
    return q, k, v, chosen.masked_fill(empty.unsqueeze(1), 0.0), empty


def selection_cases(device, intensity):
    return cover(
        {
            "lengths": [(1, 1), (1, 200), (127, 129), (129, 127), (200, 113), (128, 256), (70, 200)]
            + [(1024, 1031), (2048, 2048), (1500, 700)] * (device == "cuda"),
            "dim": DIMS,
            "heads": [(2, 2), (4, 2), (3, 1)],
            "causal": CAUSAL,
            "layout": HEAD_LAYOUTS,
            "dtype": [BF16, FP16],
        },
        intensity,
    )


@over(selection_cases)
def test_selection_is_exact(device, case):
    length_q, length_k = case["lengths"]
    dim = case["dim"]
    if dim == 8:
        length_k = min(length_k, 256)  # there are 256 words of 8 signs
    q, k, v, chosen, empty = selecting(
        length_q, length_k, dim, case["causal"], *case["heads"], case["dtype"], device
    )
    out, lse = tk.attention(
        *(heads(x, case["layout"]) for x in (q, k, v)),
        causal=case["causal"],
        scale=100.0,
        return_lse=True,
    )
    assert torch.equal(out, chosen)
    expected = torch.where(empty, -INF, 100.0 * dim).expand_as(lse)
    assert torch.allclose(lse, expected.float(), rtol=1e-6)


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("dim", [64, 128, 192])
@pytest.mark.parametrize("form", ["qkv_bshd", "qkv_bhsd", "kv", "heads_last"])
def test_packed_projections(device, form, dim, causal):
    batch, count, length = 2, 3, 150
    if form == "qkv_bshd":
        packed = normal((batch, length, 3, count, dim), BF16, device)
        q, k, v = packed.permute(2, 0, 3, 1, 4)
    elif form == "qkv_bhsd":
        packed = normal((batch, 3, count, length, dim), BF16, device)
        q, k, v = packed.unbind(1)
    elif form == "kv":
        q = normal((batch, length, count, dim), BF16, device).transpose(1, 2)
        k, v = normal((batch, length, 2, count, dim), BF16, device).permute(2, 0, 3, 1, 4)
    else:
        packed = normal((batch, length, count, 3 * dim), BF16, device).transpose(1, 2)
        q, k, v = packed.chunk(3, dim=3)
    result = tk.attention(q, k, v, causal=causal, return_lse=True)
    assert result[0].stride() == torch.empty_like(q).stride()
    assert_attention(result, q, k, v, causal=causal)


@pytest.mark.parametrize("expanded", ["heads_k", "batch_k", "keys", "batch_q", "heads_q", "rows_q"])
def test_expanded_operands(device, expanded):
    q, k, v = (normal((2, 4, 70, 64), BF16, device) for _ in range(3))
    k, v = {
        "heads_k": (k[:, :1].expand_as(k), v[:, :1].expand_as(v)),
        "batch_k": (k[:1].expand_as(k), v[:1].expand_as(v)),
        "keys": (k[:, :, :1].expand_as(k), v),
    }.get(expanded, (k, v))
    q = {
        "batch_q": q[:1].expand_as(q),
        "heads_q": q[:, :1].expand_as(q),
        "rows_q": q[:, :, :1].expand_as(q),
    }.get(expanded, q)
    result = tk.attention(q, k, v, causal=True, return_lse=True)
    assert_attention(result, q, k, v, causal=True)


@pytest.mark.parametrize(
    "shape", [(0, 2, 2, 5, 7), (2, 0, 2, 5, 7), (2, 0, 0, 5, 7), (2, 2, 2, 0, 0), (2, 4, 2, 0, 7)]
)
def test_nothing_to_compute(device, shape):
    batch, heads_q, heads_k, length_q, length_k = shape
    q = normal((batch, heads_q, length_q, 64), BF16, device).requires_grad_()
    k, v = (normal((batch, heads_k, length_k, 64), BF16, device) for _ in range(2))
    out, lse = tk.attention(q, k, v, causal=True, return_lse=True)
    assert out.shape == q.shape
    assert lse.shape == q.shape[:3]
    out.sum().backward()
    assert q.grad.shape == q.shape


@pytest.mark.parametrize("lengths", [(200, 70), (300, 1), (5, 0), (129, 128)])
@pytest.mark.parametrize("dim", [64, 96, 256])
def test_rows_that_see_nothing(device, dim, lengths):
    length_q, length_k = lengths
    leaves = [
        normal((2, 2, length, dim), BF16, device).requires_grad_()
        for length in (length_q, length_k, length_k)
    ]
    out, lse = tk.attention(*leaves, causal=True, return_lse=True)
    empty = length_q - length_k
    assert bool((out[:, :, :empty] == 0).all())
    assert bool((lse[:, :, :empty] == -INF).all())
    assert bool(torch.isfinite(lse[:, :, empty:]).all())
    (out.float().square().sum() + lse.masked_fill(lse == -INF, 0.0).sum()).backward()
    assert all(bool(torch.isfinite(x.grad).all()) for x in leaves)
    assert bool((leaves[0].grad[:, :, :empty] == 0).all())


def test_alignments(device):
    """With equal lengths they are the same, and `True` is the lower right one."""
    q, k, v = (normal((2, 2, 100, 64), BF16, device) for _ in range(3))
    right = tk.attention(q, k, v, causal="lower_right")
    assert torch.equal(right, tk.attention(q, k, v, causal=True))
    assert torch.equal(right, tk.attention(q, k, v, causal="upper_left"))
    short = q[:, :, :30]
    right = tk.attention(short, k, v, causal="lower_right")
    assert torch.equal(right, tk.attention(short, k, v, causal=True))
    left = tk.attention(short, k, v, causal="upper_left")
    assert_attention(left, short, k[:, :, :30], v[:, :, :30], causal=True)


@pytest.mark.parametrize("lengths", [(100, 100), (100, 37), (37, 100)])
def test_upper_left_is_is_causal(device, lengths):
    q = normal((2, 4, lengths[0], 64), FP16, device)
    k, v = (normal((2, 4, lengths[1], 64), FP16, device) for _ in range(2))
    sdpa = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(
        tk.attention(q, k, v, causal="upper_left"), sdpa, atol=2e-3, rtol=2e-3
    )


@pytest.mark.parametrize("scale", [0.0, 30.0, -30.0, 1e-4])
@pytest.mark.parametrize("causal", CAUSAL)
def test_extreme_scales(device, scale, causal):
    q, k, v = (normal((1, 2, 150, 128), BF16, device) for _ in range(3))
    result = tk.attention(q, k, v, causal=causal, scale=scale, return_lse=True)
    assert all(bool(torch.isfinite(x).all()) for x in result)
    if scale == 0.0:
        counts = visible(150, 150, causal, device).sum(1)
        torch.testing.assert_close(result[1], counts.float().log().expand_as(result[1]))
    if abs(scale) <= 1e-4:
        assert_attention(result, q, k, v, causal=causal, scale=scale)


def test_integer_scale(device):
    q, k, v = (normal((1, 2, 20, 64), BF16, device) for _ in range(3))
    assert torch.equal(tk.attention(q, k, v, scale=1), tk.attention(q, k, v, scale=1.0))


def test_nan_stays_in_its_row(device):
    q, k, v = (normal((2, 2, 140, 64), BF16, device) for _ in range(3))
    q[1, 0, 77, 3] = math.nan
    out, lse = tk.attention(q, k, v, causal=True, return_lse=True)
    assert bool(torch.isnan(out[1, 0, 77]).all())
    assert bool(torch.isnan(lse[1, 0, 77]))
    assert int(torch.isnan(out).sum()) == 64
    assert int(torch.isnan(lse).sum()) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("causal", CAUSAL)
def test_writes_nothing_outside(device, causal, dim):
    q = normal((2, 6, 1031, dim), BF16, device)
    k, v = (normal((2, 3, 777, dim), BF16, device) for _ in range(2))
    assert_guards_intact(lambda: tk.attention(q, k, v, causal=causal, return_lse=True))
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    assert_guards_intact(lambda: tk.attention(q, k, v, causal=causal))


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["packed", "bshd", "bshd_sliced", "sbhd", "sliced"])
@pytest.mark.parametrize("dim", [64, 72, 128])
def test_no_copy_where_strides_will_do(device, dim, layout):
    q, k, v = (heads(normal((2, 8, 2048, dim), BF16, device), layout) for _ in range(3))
    tk.attention(q, k, v)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = tk.attention(q, k, v)
    extra = torch.cuda.max_memory_allocated() - before - out.nbytes
    assert extra < q.nbytes // 2


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.parametrize("shape", [(70000, 8, 16, 256), (3, 2, (1 << 22) + 7, 96)])
def test_more_than_2_31_elements(device, shape):
    batch, count, length, dim = shape
    q = torch.empty(shape, dtype=BF16, device=device).normal_()
    assert q.numel() > 2**31
    k, v = (normal((batch, count, min(length, 16), dim), BF16, device) for _ in range(2))
    out, lse = tk.attention(q, k, v, return_lse=True)
    for last in (slice(-1, None), slice(0, 1)):
        rows = slice(-300, None)
        result = out[last, :, rows], lse[last, :, rows].contiguous()
        assert_attention(result, q[last, :, rows], k[last], v[last])


@pytest.mark.gpu
@pytest.mark.large
def test_keys_of_more_than_2_31_elements(device):
    big = torch.zeros(2, 1, (1 << 24) + 11, 72, dtype=BF16, device=device)
    assert big.numel() > 2**31
    q = normal((2, 1, 3, 72), BF16, device)
    big[1, 0, -1] = 50 * q[1, 0, 0]
    out = tk.attention(q, big, big)
    assert torch.equal(out[1, 0, 0], big[1, 0, -1])


# Gradients


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


def plain_low_lse(q, k, causal, scale):
    """The LSE at the op's precision; rows that see nothing contribute no gradient."""
    k = k.repeat_interleave(q.shape[1] // max(k.shape[1], 1), 1)
    scores = q @ k.mT * (1 / math.sqrt(q.shape[3]) if scale is None else scale)
    mask = visible(q.shape[2], k.shape[2], causal, q.device)
    return scores.masked_fill(~mask, torch.finfo(q.dtype).min).logsumexp(3)


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
        out, lse = reference_attention(q, k, v, causal=causal, return_lse=True)
        grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse)
        expected = torch.autograd.grad((out, lse), (q, k, v), (grad_out, grad_lse))
        with torch.no_grad():
            actual = tk.reference.attention_backward(
                grad_out, grad_lse, q, k, v, out, lse, causal=causal
            )
        for x, e in zip(actual, expected, strict=True):
            torch.testing.assert_close(x, e)


# Wrong calls


def zeros(*shape, dtype=BF16, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


Q, K = zeros(2, 8, 5, 64), zeros(2, 2, 7, 64)
WIDE = zeros(2, 2, 7, 264)

WRONG = {
    "q is a list": (TypeError, "tk.attention: q must be a torch.Tensor, got list", [Q], K, K, {}),
    "k is None": (TypeError, "k must be a torch.Tensor, got NoneType", Q, None, K, {}),
    "v is an array": (TypeError, "v must be a torch.Tensor, got nd", Q, K, K.float().numpy(), {}),
    "q is sparse": (TypeError, "q must be a dense tensor", Q.float().to_sparse(), K, K, {}),
    "float32": (TypeError, "q is torch.float32; supp", Q.float(), K.float(), K.float(), {}),
    "float64": (TypeError, "q is torch.float64", Q.double(), K.double(), K.double(), {}),
    "float8": (TypeError, "q is torch.float8_e4m3fn", Q.to(torch.float8_e4m3fn), K, K, {}),
    "k float16": (TypeError, "k is torch.float16, q is torch.bfloat16", Q, K.half(), K, {}),
    "v float32": (TypeError, "v is torch.float32, q is torch.bfloat16", Q, K, K.float(), {}),
    "device of k": (TypeError, "k is on meta, q is on cpu", Q, K.to("meta"), K, {}),
    "device of v": (TypeError, "v is on meta, q is on cpu", Q, K, K.to("meta"), {}),
    "causal int": (TypeError, "causal must be False, True, 'lower_right'", Q, K, K, {"causal": 1}),
    "causal None": (TypeError, "or 'upper_left', got NoneType", Q, K, K, {"causal": None}),
    "causal tensor": (TypeError, "got Tensor", Q, K, K, {"causal": torch.tensor(True)}),
    "scale tensor": (TypeError, "scale must be a number or None, got", Q, K, K, {"scale": Q}),
    "scale str": (TypeError, "scale must be a number or None, got str", Q, K, K, {"scale": "1"}),
    "by position": (TypeError, "positional", Q, K, K, None),
    "unknown option": (TypeError, "is_causal", Q, K, K, {"is_causal": True}),
    "alignment": (ValueError, "causal is 'left'; it must be", Q, K, K, {"causal": "left"}),
    "scale inf": (ValueError, "scale is inf; it must be finite", Q, K, K, {"scale": INF}),
    "scale nan": (ValueError, "scale is nan; it must be finite", Q, K, K, {"scale": math.nan}),
    "3 dimensions": (ValueError, "q has shape (8, 5, 64), k has", Q[0], K[0], K[0], {}),
    "5 dimensions": (ValueError, "must have 4 dimensions, (B, H, S, D)", Q, K[None], K, {}),
    "v 3 dimensions": (ValueError, "v has (2, 7, 64); they must have 4", Q, K, K[0], {}),
    "batch of k": (ValueError, "q has batch size 2, k has 1, v has 2", Q, K[:1], K, {}),
    "batch of v": (ValueError, "k has 2, v has 1; they must be equal", Q, K, K[:1], {}),
    "head dim 60": (ValueError, "q has head dim 60; it must be a multiple of 8 from 8 to 256",
                    Q[..., :60], K[..., :60], K[..., :60], {}),
    "head dim 264": (ValueError, "q has head dim 264", WIDE, WIDE, WIDE, {}),
    "head dim 0": (ValueError, "q has head dim 0", Q[..., :0], K[..., :0], K[..., :0], {}),
    "head dim of k": (ValueError, "q has head dim 64, k has 32", Q, K[..., :32], K, {}),
    "head dim of v": (ValueError, "k has 64, v has 128; they", Q, K, zeros(2, 2, 7, 128), {}),
    "lengths": (ValueError, "heads of length 7, v has 2 of length 6", Q, K, K[:, :, :6], {}),
    "heads of v": (ValueError, "k has 2 heads of length 7, v has 1 of", Q, K, K[:, :1], {}),
    "heads": (ValueError,
              "tk.attention: k has 3 heads, q has 8; q's heads must be a multiple of k's",
              Q, zeros(2, 3, 7, 64), zeros(2, 3, 7, 64), {}),
    "more heads of k": (ValueError, "k has 8 heads, q has 4", Q[:, :4], Q, Q, {}),
    "no heads of k": (ValueError, "k has 0 heads, q has 8", Q, K[:, :0], K[:, :0], {}),
    "BSHD": (ValueError, "k has 7 heads, q has 5", *(x.transpose(1, 2) for x in (Q, K, K)), {}),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls(device, name):
    error, words, *tensors, options = WRONG[name]
    words = words.replace("on cpu", f"on {torch.empty(0, device=device).device}")
    tensors = [
        x.to(device) if isinstance(x, torch.Tensor) and x.device.type == "cpu" else x
        for x in tensors
    ]
    with pytest.raises(error) as caught:
        if options is None:
            tk.attention(*tensors, True)
        else:
            tk.attention(*tensors, **options)
    assert words in str(caught.value)


def test_wrong_calls_of_the_ops(device):
    ops = torch.ops.thunderkittens
    q, k = Q.to(device), K.to(device)
    for op in (ops.attention_forward, ops.attention):
        for causal in (-1, 3):
            with pytest.raises((ValueError, RuntimeError), match="causal"):
                op(q, k, k, causal)
    lse = torch.zeros(2, 8, 5, device=device)
    with pytest.raises(ValueError, match="lse has shape"):
        ops.attention_backward(q, None, q, k, k, q, lse[:, :7], 0, None, [True] * 3)
    with pytest.raises(ValueError, match="grad_out has shape"):
        ops.attention_backward(k, None, q, k, k, q, lse, 0, None, [True] * 3)


# Properties


@st.composite
def any_call(draw):
    """Operands of random shapes, strides and dtypes, mostly ones that fit together."""
    batch, group, heads_k = (
        draw(st.integers(0, 2)),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 2)),
    )
    length_q, length_k = draw(st.integers(0, 20)), draw(st.integers(0, 20))
    dim = 8 * draw(st.integers(1, 5))
    shapes = [
        [batch, group * heads_k, length_q, dim],
        [batch, heads_k, length_k, dim],
        [batch, heads_k, length_k, dim],
    ]
    if draw(st.integers(0, 2)) == 0:
        target = shapes[draw(st.integers(0, 2))]
        target[draw(st.integers(0, 3))] += draw(st.sampled_from([1, -1, 8, 2]))
        shapes = [[max(n, 0) for n in shape] for shape in shapes]
        if draw(st.integers(0, 3)) == 0:
            target.pop()
    dtype = draw(st.sampled_from([BF16, BF16, BF16, FP16, FP32]))
    dtypes = [draw(st.sampled_from([dtype] * 15 + [FP16])) for _ in range(3)]
    layouts = [draw(st.sampled_from([*HEAD_LAYOUTS, "expanded"])) for _ in range(3)]
    causal = draw(st.sampled_from([0, 0, 1, 1, 2, 2, 3, -1]))
    scale = draw(st.sampled_from([None, None, 0.5, 2, INF]))
    return shapes, dtypes, layouts, causal, scale


def build(call, device):
    shapes, dtypes, layouts, causal, scale = call
    tensors = []
    for shape, dtype, layout in zip(shapes, dtypes, layouts, strict=True):
        x = torch.randn(shape, device=device).to(dtype)
        if layout == "expanded":
            x = x.narrow(1, 0, min(1, x.shape[1])).expand(shape) if x.shape[1] else x
        elif len(shape) == 4:
            x = heads(x, layout)
        tensors.append(x)
    return (*tensors, causal, scale)


def outcome(function, *arguments, **options):
    """What a call does: shape, dtype and strides of the results, or the error."""
    try:
        results = function(*arguments, **options)
    except (TypeError, ValueError) as error:
        return type(error), str(error)
    results = results if isinstance(results, tuple) else (results,)
    return [(x.shape, x.dtype, x.stride() if x.numel() else None, x.device) for x in results]


@given(call=any_call())
def test_fake_agrees(device, call):
    *tensors, causal, scale = build(call, device)
    alignment = {0: False, 1: "lower_right", 2: "upper_left"}.get(causal, "neither")
    for return_lse in (False, True):
        options = {"causal": alignment, "scale": scale, "return_lse": return_lse}
        real = outcome(tk.attention, *tensors, **options)
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(x) for x in tensors]
            fake = outcome(tk.attention, *fakes, **options)
        assert real == fake
        if isinstance(real, list):
            assert real[0] == outcome(torch.empty_like, tensors[0])[0]


@pytest.mark.gpu
@given(call=any_call())
def test_op_guards_itself(device, call):
    """The C++ op refuses what the shape function refuses, and nothing else."""
    *tensors, causal, scale = build(call, device)
    for op in (torch.ops.thunderkittens.attention_forward, torch.ops.thunderkittens.attention):
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(x) for x in tensors]
            expected = outcome(op, *fakes, causal, scale)
        if isinstance(expected, list):
            assert outcome(op, *tensors, causal, scale) == expected
        else:
            with pytest.raises(RuntimeError):
                op(*tensors, causal, scale)


def test_neighbours_are_never_read(device):
    """Every stride and edge at once: a window of a larger tensor of NaN, in every dimension."""
    for dim, length in itertools.product((8, 64, 72, 136, 256), (1, 63, 65)):
        q, k, v = (
            embed(normal((2, 2, length, dim), BF16, device), order=order)
            for order in ((0, 1, 2, 3), (2, 0, 1, 3), (0, 2, 1, 3))
        )
        assert bool(torch.isfinite(tk.attention(q, k, v, causal=True)).all())
