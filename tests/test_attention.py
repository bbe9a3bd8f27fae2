"""`tk.attention`: values, layouts and masks. Its gradient and wrong calls have files of their own;
what holds for every op (streams, graphs, threads, compilation ...) is in test_library.py."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import thunderkittens as tk
from helpers.attention import (
    BF16,
    CAUSAL,
    DIMS,
    EMULATED,
    EMULATED_DIMS,
    FP16,
    HEADS,
    INF,
    LONG,
    MASKS,
    SCORES,
    SHORT,
    assert_attention,
    call_options,
    emulated,
    normal,
    operands,
    visible,
)
from helpers.cover import cover, over
from helpers.guard import assert_guards_intact
from helpers.layouts import HEAD_LAYOUTS, embed, heads
from helpers.numerics import integers
from thunderkittens import _C, info


def cases(device, intensity):
    return cover(
        {
            "lengths": EMULATED if emulated(device) else SHORT + LONG * (device == "cuda"),
            "dim": EMULATED_DIMS if emulated(device) else DIMS,
            "heads": HEADS,
            "mask": MASKS,
            "scores": SCORES,
            "layout_q": HEAD_LAYOUTS,
            "layout_k": HEAD_LAYOUTS,
            "layout_v": HEAD_LAYOUTS,
            "dtype": [BF16, FP16],
            "scale": [None, 0.3, -0.05],
            "lse": [True, False],
        },
        intensity,
    )


def test_the_lengths_reach_every_kernel():
    """Of the kernels that a choice can name, in bf16: the lists serve the tests on a GPU."""
    large, small = info.EXAMPLE_GPU, info.EXAMPLE_GPU | {"shared_bytes_per_block": 99 << 10}
    gpus = [_C.DeviceProperties(**large), _C.DeviceProperties(**large, portable_only=True)]
    gpus.append(_C.DeviceProperties(**small, portable_only=True))
    reached = set()
    for lengths, dims, heads_of, causal, scores in itertools.product(
        LONG, DIMS, HEADS, (0, 1), (None, "softcap", "alibi")
    ):
        sizes = {"batch": 2, "q_heads": heads_of[0], "kv_heads": heads_of[1], "causal": causal}
        sizes |= {"q_length": lengths[0], "k_length": lengths[1]}
        sizes |= {"head_dim": dims[0], "value_dim": dims[1]} | ({scores: True} if scores else {})
        reached |= {_C.choose("attention", sizes, gpu)["kernel"] for gpu in gpus}
    names = [k["name"] for k in _C.kernels() if k["op"] == "attention"]
    of_caches = ("combine", "paged")  # and what runs beside
    assert {n for n in names if "_bf16_" in n and not any(x in n for x in of_caches)} == reached


@over(cases)
def test_accuracy(device, case):
    q, k, v = operands(case, device)
    placed = [heads(x, case[f"layout_{name}"]) for name, x in zip("qkv", (q, k, v), strict=True)]
    options = call_options(case, device)
    result = tk.attention(*placed, **options, return_lse=case["lse"])
    out = result[0] if case["lse"] else result
    if case["dim"][0] == case["dim"][1]:
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
    lengths = [(1, 200), (127, 129), (200, 113), (70, 200)]
    if not emulated(device):
        lengths += [(1, 1), (129, 127), (128, 256)]
    if device == "cuda":
        lengths += [(1024, 1031), (2048, 2048), (1500, 700)]
    return cover(
        {
            "lengths": lengths,
            "dim": [8, 40, 64, 72, 96, 128, 160, 192, 256],
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
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("level", [-3000.0, 3000.0])
def test_scores_far_from_zero(device, dim, causal, level):
    """The first blocks of keys are hidden from some rows, and the others' scores are far off."""
    q, k, v = (normal((1, 2, 300, dim), BF16, device) for _ in range(3))
    q[..., 0], k[..., 0] = 64.0, level / 8
    result = tk.attention(q, k, v, causal=causal, scale=0.125, return_lse=True)
    assert bool(torch.isfinite(result[0]).all())
    assert_attention(result, q, k, v, causal=causal, scale=0.125)


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


def test_neighbours_are_never_read(device):
    """Every stride and edge at once: a window of a larger tensor of NaN, in every dimension."""
    for dim, length in itertools.product((8, 64, 72, 136, 256), (1, 63, 65)):
        q, k, v = (
            embed(normal((2, 2, length, dim), BF16, device), order=order)
            for order in ((0, 1, 2, 3), (2, 0, 1, 3), (0, 2, 1, 3))
        )
        assert bool(torch.isfinite(tk.attention(q, k, v, causal=True)).all())
