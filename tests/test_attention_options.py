"""Windows, softcap, ALiBi, sinks, and values of another head dimension: what they mean, at their
extremes and together. How accurate they are over all shapes is tested in test_attention.py and
test_attention_gradient.py."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import thunderkittens as tk
from helpers.attention import (
    BF16,
    CAUSAL,
    DIMS,
    FP16,
    INF,
    MASKS,
    SCORES,
    assert_attention,
    assert_gradients,
    gradients,
    normal,
    plain_attention,
    plain_low_lse,
    plain_lse,
    score_options,
    sink_noise,
)


def small(device, length_q=70, length_k=100, dim=64, value_dim=None, heads=(4, 2), dtype=BF16):
    shapes = [
        (2, heads[0], length_q, dim),
        (2, heads[1], length_k, dim),
        (2, heads[1], length_k, value_dim or dim),
    ]
    return [normal(shape, dtype, device) for shape in shapes]


# The definition


def by_hand(q, k, v, *, causal, window_size, softcap, alibi_slopes, sink, scale):
    """Output and LSE of one row after the other, one key after the other."""
    batch, heads, length_q, _ = q.shape
    length_k, group = k.shape[2], heads // k.shape[1]
    out = torch.zeros(batch, heads, length_q, v.shape[3], dtype=torch.float64)
    lse = torch.full((batch, heads, length_q), -INF, dtype=torch.float64)
    left, right = window_size
    for b in range(batch):
        for h in range(heads):
            for i in range(length_q):
                diagonal = i if causal == "upper_left" else i + length_k - length_q
                total, row = 0.0, torch.zeros(v.shape[3], dtype=torch.float64)
                for j in range(length_k):
                    ahead = j - diagonal
                    if (left >= 0 and -ahead > left) or (causal and ahead > 0):
                        continue
                    if not causal and right >= 0 and ahead > right:
                        continue
                    score = scale * float(q[b, h, i] @ k[b, h // group, j])
                    if softcap:
                        score = softcap * math.tanh(score / softcap)
                    if alibi_slopes is not None:
                        slopes = alibi_slopes if alibi_slopes.dim() == 1 else alibi_slopes[b]
                        score -= float(slopes[h]) * abs(ahead)
                    total += math.exp(score)
                    row += math.exp(score) * v[b, h // group, j]
                if sink is not None:
                    total += math.exp(float(sink[h]))
                if total:
                    out[b, h, i], lse[b, h, i] = row / total, math.log(total)
    return out, lse


@pytest.mark.parametrize("scores", SCORES, ids="-".join)
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_reference_is_the_definition(mask, scores):
    for length_q, length_k in ((5, 7), (7, 4)):
        q, k, v = (
            torch.randn(shape, dtype=torch.float64)
            for shape in ((2, 4, length_q, 8), (2, 2, length_k, 8), (2, 2, length_k, 3))
        )
        options = {"causal": False, "window_size": (-1, -1), "softcap": 0.0, "scale": 0.4}
        options |= {"alibi_slopes": None, "sink": None, **mask}
        options |= score_options(scores, 4, 2, "cpu")
        result = tk.reference.attention(q, k, v, **options, return_lse=True)
        for x, y in zip(result, by_hand(q, k, v, **options), strict=True):
            torch.testing.assert_close(x, y)


@pytest.mark.parametrize("scores", SCORES, ids="-".join)
def test_reference_gradient(scores):
    """Of the formula, by differences."""
    shapes = ((1, 2, 5, 4), (1, 1, 6, 4), (1, 1, 6, 3))
    q, k, v = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes)
    options = score_options(scores, 2, 1, "cpu")
    sink = options.pop("sink", torch.zeros(2)).double().requires_grad_()

    def function(q, k, v, sink):
        return tk.reference.attention(
            q, k, v, causal=True, window_size=(3, -1), sink=sink, **options, return_lse=True
        )

    assert torch.autograd.gradcheck(function, (q, k, v, sink))


# Windows


@pytest.mark.parametrize("lengths", [(100, 100), (70, 100), (100, 70)])
@pytest.mark.parametrize("dim", [64, 128])
def test_windows_and_causal_masks(device, dim, lengths):
    q, k, v = small(device, *lengths, dim=dim)
    causal = tk.attention(q, k, v, causal=True).float()
    for options in (
        {"window_size": (-1, 0)},
        {"window_size": (200, 0)},
        {"causal": True, "window_size": (1 << 20, 3)},
        {"causal": True, "window_size": (-1, 0)},
    ):
        torch.testing.assert_close(
            tk.attention(q, k, v, **options).float(), causal, atol=2e-2, rtol=0
        )
    full = tk.attention(q, k, v).float()
    wide = tk.attention(q, k, v, window_size=(1 << 40, 1 << 40)).float()
    torch.testing.assert_close(wide, full, atol=2e-2, rtol=0)


@pytest.mark.parametrize("lengths", [(100, 100), (64, 200)])
def test_window_of_one_key(device, lengths):
    """Every row sees its diagonal alone, so that it is a row of v, bit by bit."""
    q, k, v = small(device, *lengths)
    out, lse = tk.attention(q, k, v, window_size=(0, 0), return_lse=True)
    diagonal = slice(lengths[1] - lengths[0], None)
    assert torch.equal(out, v.repeat_interleave(2, 1)[:, :, diagonal])
    scores = (q.float() * k.repeat_interleave(2, 1)[:, :, diagonal].float()).sum(3) / 8
    torch.testing.assert_close(lse, scores, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize(
    ("lengths", "options", "empty"),
    [
        ((200, 70), {"window_size": (5, 5)}, slice(0, 125)),
        ((200, 70), {"causal": "upper_left", "window_size": (3, -1)}, slice(73, 200)),
        ((130, 5), {"causal": "upper_left", "window_size": (0, 0)}, slice(5, 130)),
        ((9, 0), {"window_size": (1, 1)}, slice(0, 9)),
    ],
)
@pytest.mark.parametrize("dim", [64, 128])
def test_rows_that_see_nothing(device, dim, lengths, options, empty, with_sink):
    q, k, v = (x.requires_grad_() for x in small(device, *lengths, dim=dim))
    sink = torch.randn(4, device=device).requires_grad_() if with_sink else None
    out, lse = tk.attention(q, k, v, **options, sink=sink, return_lse=True)
    assert bool((out[:, :, empty] == 0).all())
    expected = torch.full((4, 1), -INF, device=device) if sink is None else sink.unsqueeze(1)
    rows = lse[:, :, empty]
    torch.testing.assert_close(rows, expected.expand_as(rows))
    detached = [None if x is None else x.detach() for x in (out, lse, q, k, v, sink)]
    assert_attention(tuple(detached[:2]), *detached[2:5], **options, sink=detached[5])
    (out.float().square().sum() + lse.masked_fill(lse == -INF, 0.0).sum()).backward()
    assert all(bool(torch.isfinite(x.grad).all()) for x in (q, k, v))
    assert bool((q.grad[:, :, empty] == 0).all())
    if sink is not None:
        assert bool(torch.isfinite(sink.grad).all())


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dim", [64, 128, 192])
def test_gradient_of_an_infinite_lse(device, dim, deterministic):
    """What a loss of the LSE makes of a row that sees nothing is nobody's gradient, infinite or
    NaN as it may be."""
    q, k, v = (x.requires_grad_() for x in small(device, 100, 70, dim=dim))
    results = []
    for nothing in (0.0, -INF, math.nan):
        out, lse = tk.attention(q, k, v, causal=True, deterministic=deterministic, return_lse=True)
        grad_lse = torch.cos(lse).masked_fill(lse == -INF, nothing)
        results.append(torch.autograd.grad([out, lse], [q, k, v], [out.detach(), grad_lse]))
    for other in results[1:]:
        for x, y in zip(results[0], other, strict=True):
            assert bool(torch.isfinite(y).all())
            torch.testing.assert_close(x, y, atol=1e-2, rtol=1e-2)


# Softcap


def test_softcap_at_its_extremes(device):
    q, k, v = small(device)
    plain = tk.attention(q, k, v)
    torch.testing.assert_close(tk.attention(q, k, v, softcap=1e6), plain, atol=2e-2, rtol=2e-2)
    assert torch.equal(tk.attention(q, k, v, softcap=0), plain)
    # Scores that are far beyond the cap: tanh is 1 or -1.
    result = tk.attention(q, k, v, softcap=2.0, scale=1e6, return_lse=True)
    signs = torch.sign(q.float() @ k.repeat_interleave(2, 1).float().mT)
    torch.testing.assert_close(result[1], (2.0 * signs).logsumexp(3), atol=1e-3, rtol=1e-3)
    assert bool(torch.isfinite(result[0]).all())


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("dim", [64, 128])
def test_softcap_of_scores_of_any_size(device, dtype, dim):
    """tanh has another form where the scores of a block of keys are small against the cap."""
    torch.manual_seed(dim)
    q, k, v = (torch.randn(1, 2, n, dim, device=device).to(dtype) for n in (130, 520, 520))
    for cap, scale in ((40.0, 1.0), (20.0, 1.0), (8.0, 1.0), (40.0, 6.0), (5.0, 20.0)):
        options = {"softcap": cap, "scale": scale / dim**0.5}
        assert_attention(tk.attention(q, k, v, **options, return_lse=True), q, k, v, **options)
    # The sizes of one call: rows that grow, behind small ones, and keys that all rows avoid.
    factor = torch.linspace(-3, 3, 520, device=device).exp()[:, None]
    aligned = (q[:, :, :1] * factor.where(factor < 9, -factor)).to(dtype)
    for keys in ((k * factor).to(dtype), (k * factor.flip(0)).to(dtype), aligned):
        options = {"softcap": 20.0, "causal": True}
        assert_attention(
            tk.attention(q, keys, v, **options, return_lse=True), q, keys, v, **options
        )
    # One key outweighs all others, with a logit below and above where another form takes over.
    q[..., 0] = 4.0
    for logit in (2.0, 3.0, 4.0, 4.3, 4.4, 4.5, 5.0, 8.0):
        keys = k / 16
        keys[..., 0] = 0.0
        keys[:, :, 300, 0] = logit * dim**0.5 / 4
        options = {"softcap": 20.0}
        assert_attention(
            tk.attention(q, keys, v, **options, return_lse=True), q, keys, v, **options
        )


# ALiBi


@pytest.mark.parametrize("causal", CAUSAL)
def test_steep_slopes_leave_the_diagonal(device, causal):
    q, k, v = small(device, 70, 100)
    slopes = torch.full((4,), 1e4, device=device)
    out = tk.attention(q, k, v, causal=causal, alibi_slopes=slopes)
    first = 0 if causal == "upper_left" else 30
    assert torch.equal(out, v.repeat_interleave(2, 1)[:, :, first : first + 70])


def test_slopes_of_a_batch_and_strides(device):
    q, k, v = small(device)
    slopes = torch.rand(4, device=device)
    expected = tk.attention(q, k, v, alibi_slopes=slopes)
    for same in (
        slopes.expand(2, 4),
        slopes.repeat(2, 1),
        slopes.repeat_interleave(2)[::2],
        slopes.repeat(2, 1).t().contiguous().t(),
    ):
        assert torch.equal(tk.attention(q, k, v, alibi_slopes=same), expected)
    of_nobody = torch.rand(0, 8, device=device)[:, ::2]
    assert tk.attention(q[:0], k[:0], v[:0], alibi_slopes=of_nobody).shape == (0, *q.shape[1:])


# Sinks


def test_sinks_at_their_extremes(device):
    q, k, v = small(device)
    plain, plain_logs = tk.attention(q, k, v, return_lse=True)
    out, lse = tk.attention(
        q, k, v, sink=torch.tensor([-INF, -1e4, 1e4, 80.0], device=device), return_lse=True
    )
    torch.testing.assert_close(out[:, :2], plain[:, :2], atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse[:, :2], plain_logs[:, :2])
    assert bool((out[:, 2] == 0).all())
    assert bool((lse[:, 2] == 1e4).all())
    torch.testing.assert_close(lse[:, 3], torch.full_like(lse[:, 3], 80.0))


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_sink_is_a_parameter(device, dtype):
    q, k, v = small(device)
    sink = torch.nn.Parameter(torch.randn(4, device=device).to(dtype))
    out = tk.attention(q, k, v, sink=sink)
    assert torch.equal(out, tk.attention(q, k, v, sink=sink.detach().float()))
    out.sum().backward()
    assert sink.grad.dtype == dtype
    assert bool((sink.grad != 0).any())


# All together


@st.composite
def any_problem(draw):
    length = st.one_of(st.integers(0, 20), st.integers(40, 80), st.integers(120, 140))
    dim, value_dim = draw(st.sampled_from(DIMS))
    kv_heads, group, batch = (
        draw(st.integers(1, 2)),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 2)),
    )
    side = st.sampled_from([-1, 0, 1, 10, 63, 64, 65, 200])
    return {
        "shape": (batch, kv_heads * group, kv_heads, draw(length), draw(length), dim, value_dim),
        "dtype": draw(st.sampled_from([BF16, FP16])),
        "options": {
            "causal": draw(st.sampled_from(CAUSAL)),
            "window_size": (draw(side), draw(side)),
            "scale": draw(st.sampled_from([None, 0.2, -0.1])),
        },
        "scores": [
            name
            for names in (("softcap",), ("alibi", "alibi_batch"), ("sink",))
            if (name := draw(st.sampled_from(["", *names])))
        ],
        "needs": [draw(st.booleans()) for _ in range(4)],
        "seed": draw(st.integers(0, 1000)),
    }


@given(problem=any_problem())
def test_any_problem(device, problem):
    """Output, LSE and gradients of what hypothesis thinks of."""
    torch.manual_seed(problem["seed"])
    batch, heads, kv_heads, length_q, length_k, dim, value_dim = problem["shape"]
    q = normal((batch, heads, length_q, dim), problem["dtype"], device)
    k = normal((batch, kv_heads, length_k, dim), problem["dtype"], device)
    v = normal((batch, kv_heads, length_k, value_dim), problem["dtype"], device)
    options = {**problem["options"], **score_options(problem["scores"], heads, batch, device)}
    assert_attention(tk.attention(q, k, v, **options, return_lse=True), q, k, v, **options)

    sink = options.pop("sink", None)
    tensors = [q, k, v] + ([] if sink is None else [sink])
    needs = problem["needs"][: len(tensors)]
    if not any(needs[:2] + needs[3:]):
        needs[0] = True
    grad_out = normal((batch, heads, length_q, value_dim), problem["dtype"], device)
    grad_lse = torch.randn(batch, heads, length_q, device=device)
    grad_lse[plain_lse(q, k, sink=sink, **options) == -INF] = 0

    def run(function, convert=lambda x: x):
        leaves = [
            convert(x).detach().requires_grad_(need) for x, need in zip(tensors, needs, strict=True)
        ]
        call = lambda q, k, v, sink=None: function(q, k, v, sink=sink, **options)  # noqa: E731
        return gradients(call, leaves, "both", grad_out, grad_lse)

    actual = run(lambda *x, **o: tk.attention(*x, **o, return_lse=True))
    expected = run(
        lambda *x, **o: tk.reference.attention(*x, **o, return_lse=True), torch.Tensor.double
    )
    plain = run(lambda q, k, v, **o: (plain_attention(q, k, v, **o), plain_low_lse(q, k, **o)))
    noise = 0.0 if sink is None else sink_noise(q, k, v, grad_out, sink=sink, **options)
    assert_gradients(actual, expected, plain, noise=noise)


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("dim", "value_dim"), DIMS)
def test_100_reruns(device, dim, value_dim, deterministic):
    """The forward pass always gives the same bits, the gradient where it is asked to."""
    torch.use_deterministic_algorithms(False)
    leaves = [x.requires_grad_() for x in small(device, 515, 640, dim, value_dim, heads=(6, 2))]
    options = {"causal": True, **score_options(("softcap", "sink"), 6, 2, device)}
    leaves.append(options.pop("sink").requires_grad_())
    grad_out = normal((2, 6, 515, value_dim), BF16, device)

    def results():
        out = tk.attention(
            *leaves[:3], sink=leaves[3], **options, deterministic=deterministic or None
        )
        return [out, *torch.autograd.grad(out, leaves, grad_out)]

    first = results()
    for _ in range(99):
        again = results()
        for x, y in zip(first, again, strict=True):
            if deterministic or x is first[0]:
                assert torch.equal(x, y)
            else:
                torch.testing.assert_close(x, y, atol=0.05, rtol=0.05)


def test_deterministic_algorithms_are_followed(device):
    """What reaches the op of the gradient, with and without torch's own switch."""
    seen = []

    class Spy(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func._schema.name == "thunderkittens::attention_backward":
                # Trailing arguments that have their default value may be missing.
                seen.append(bool(args[14]) if len(args) > 14 else False)
            return func(*args, **(kwargs or {}))

    q, k, v = (x.requires_grad_() for x in small(device, 20, 20))
    for switch, option in ((True, None), (False, None), (False, True), (True, False)):
        torch.use_deterministic_algorithms(switch)
        out = tk.attention(q, k, v, deterministic=option).sum()
        with Spy():
            out.backward()
    assert seen == [True, False, True, False]
