"""What the tests of attention share: operands, the formula at the op's precision, comparison."""

from __future__ import annotations

import math
import random

import torch

import thunderkittens as tk
from thunderkittens import emulation

from .numerics import assert_accurate

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
INF = math.inf
CAUSAL = [False, True, "upper_left"]
ALL = (-1, -1)

# Head dimension of q and k, and of v.
DIMS = [*((d, d) for d in (8, 40, 64, 72, 96, 128, 136, 192, 256))]
DIMS += [(192, 128), (64, 128), (72, 40), (128, 192), (40, 256)]
HEADS = [(2, 2), (4, 2), (3, 1), (6, 2)]
MASKS = [
    {"causal": False},
    {"causal": True},
    {"causal": "upper_left"},
    {"window_size": (37, 5)},
    {"window_size": (0, 0)},
    {"window_size": (-1, 3)},
    {"window_size": (100, -1)},
    {"causal": True, "window_size": (64, -1)},
    {"causal": "upper_left", "window_size": (15, 7)},
]
# What else becomes of scores; `score_options` makes the tensors.
SCORES = [
    (),
    ("softcap",),
    ("alibi",),
    ("alibi_batch",),
    ("sink",),
    ("softcap", "alibi", "sink"),
    ("alibi_batch", "sink"),
]
SHORT = [  # Sq, Sk
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


def drawn_lengths():
    """Sixteen (Sq, Sk) for a GPU, by a rule with a seed; lengths are log-uniform, 32 to 2048 unless
    said otherwise.

    Each awkward length stands beside a drawn one, as Sq or as Sk. The others are free, equal or
    next to each other, whole tiles, one long sequence, and one query for a long cache.
    """
    draw = random.Random(20)

    def length(least=32, most=2048):
        return round(least * (most / least) ** draw.random())

    beside = [(awkward, length()) for awkward in (0, 1, 7, 127, 129, 1031)]
    pairs = [pair[::-1] if i % 2 else pair for i, pair in enumerate(beside)]
    pairs += [(length(), length()) for _ in range(3)]
    equal = [length() for _ in range(3)]
    pairs += [(n, n + step) for n, step in zip(equal, (0, 1, -1), strict=True)]
    pairs += [(128 * length(1, 16), 128 * length(1, 16)) for _ in range(2)]
    return [*pairs, (length(4096, 4608),) * 2, (1, length(8192, 16384))]


LONG = drawn_lengths()


# On the emulator, which takes seconds for what a GPU does in microseconds.
EMULATED = [(5, 0), (1, 129), (64, 64), (70, 129), (129, 70), (113, 200)]
EMULATED_DIMS = [(40, 40), (64, 64), (96, 96), (128, 128), (192, 192), (256, 256), (192, 128)]
EMULATED_DIMS += [(72, 40), (40, 136)]


def emulated(device):
    """Whether a test's device is the emulator."""
    return type(device) is not str


def gradient_devices(device):
    """Whether there is something to be tested of gradients: the emulator may have no kernel."""
    return not emulated(device) or emulation.has("attention_backward")


def normal(shape, dtype, device):
    return torch.randn(shape, device=device).to(dtype)


def operands(case, device, batch=2):
    (length_q, length_k), (heads_q, heads_k) = case["lengths"], case["heads"]
    dim, value_dim = case["dim"] if isinstance(case["dim"], tuple) else (case["dim"],) * 2
    shapes = [
        (batch, heads_q, length_q, dim),
        (batch, heads_k, length_k, dim),
        (batch, heads_k, length_k, value_dim),
    ]
    return [normal(shape, case["dtype"], device) for shape in shapes]


def score_options(names, heads, batch, device):
    """The options that the names stand for, with values that matter."""
    options = {}
    for name in names:
        if name == "softcap":
            options["softcap"] = 1.5
        elif name == "sink":
            options["sink"] = torch.randn(heads, device=device) + 1
        else:
            shape = (batch, heads) if name == "alibi_batch" else (heads,)
            options["alibi_slopes"] = torch.rand(shape, device=device) / 4
    return options


def call_options(case, device, batch=2):
    """The options of a case: mask, scores, scale."""
    scores = score_options(case.get("scores", ()), case["heads"][0], batch, device)
    return {**case.get("mask", {}), **scores, "scale": case.get("scale")}


# The formula, written down independently of the library.


def visible(length_q, length_k, causal, device, window_size=ALL):
    """Which keys each row sees."""
    rows = torch.arange(length_q, device=device).unsqueeze(1)
    columns = torch.arange(length_k, device=device)
    if causal != "upper_left":
        rows = rows + (length_k - length_q)
    left, right = window_size
    seen = torch.ones(length_q, length_k, dtype=torch.bool, device=device)
    if causal:
        seen &= columns <= rows
    elif right >= 0:
        seen &= columns - rows <= right
    if left >= 0:
        seen &= rows - columns <= left
    return seen


def plain_scores(
    q, k, *, causal=False, window_size=ALL, softcap=0.0, alibi_slopes=None, sink=None, scale=None
):
    """Scores in q's precision, with a column for the sink at the end, and what each row sees."""
    k = k.repeat_interleave(q.shape[1] // max(k.shape[1], 1), 1)
    scores = q @ k.mT * (1 / math.sqrt(q.shape[3]) if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    length_q, length_k = scores.shape[2:]
    if alibi_slopes is not None:
        shift = 0 if causal == "upper_left" else length_k - length_q
        rows = torch.arange(length_q, device=q.device).unsqueeze(1) + shift
        distance = (rows - torch.arange(length_k, device=q.device)).abs()
        scores = scores - (alibi_slopes[..., None, None] * distance).to(scores.dtype)
    mask = visible(length_q, length_k, causal, q.device, window_size)
    if sink is not None:
        column = sink.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], 3)
        mask = torch.nn.functional.pad(mask, (0, 1), value=True)
    return scores, mask


def plain_attention(q, k, v, **options):
    """The formula in plain PyTorch at the op's precision; rows that see nothing are 0."""
    scores, mask = plain_scores(q, k, **options)
    weights = torch.softmax(scores.masked_fill(~mask, -INF), 3).masked_fill(~mask, 0.0)
    v = v.repeat_interleave(q.shape[1] // max(k.shape[1], 1), 1)
    return weights[..., : v.shape[2]] @ v


def plain_lse(q, k, **options):
    scores, mask = plain_scores(q.float(), k.float(), **options)
    return scores.masked_fill(~mask, -INF).logsumexp(3)


def plain_low_lse(q, k, **options):
    """The LSE at the op's precision; rows that see nothing contribute no gradient."""
    scores, mask = plain_scores(q, k, **options)
    return scores.masked_fill(~mask, torch.finfo(q.dtype).min).logsumexp(3)


def double(*tensors):
    return [x.double() for x in tensors]


def assert_attention(result, q, k, v, **options):
    """Compares an output, or a pair of output and LSE, to the definition in float64."""
    out, lse = result if isinstance(result, tuple) else (result, None)
    expected, expected_lse = tk.reference.attention(*double(q, k, v), **options, return_lse=True)
    assert out.dtype == q.dtype
    assert_accurate(out, expected, plain_attention(q, k, v, **options), rows=16)
    if lse is not None:
        assert lse.dtype == FP32
        assert lse.is_contiguous()
        slack = 2**-16 * torch.clamp(expected_lse.abs().nan_to_num(posinf=0.0), min=1.0)
        assert_accurate(lse, expected_lse, plain_lse(q, k, **options), slack=slack)


def gradients(function, leaves, loss, grad_out, grad_lse):
    """Gradients of `loss`, which is "out", "lse" or "both", with respect to what requires them."""
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


def sink_noise(q, k, v, grad_out, **options):
    """What rounding the output costs the sink's gradient, -sum(exp(sink - lse) * rowsum(out *
    grad_out)): the root of the sum of squares of what is rounded, twice."""
    out, lse = tk.reference.attention(*double(q, k, v), **options, return_lse=True)
    weights = torch.exp(options["sink"].double().unsqueeze(1) - lse)
    squares = weights.square() * (out * grad_out.double()).square().sum(3)
    return 2 * torch.finfo(q.dtype).eps * squares.sum((0, 2)).sqrt()


def assert_gradients(actual, expected, plain, *, noise=0.0):
    """The rule of accuracy, for gradients of some of q, k, v and (a vector, with `sink_noise`) the
    sink."""
    for x, e, p in zip(actual, expected, plain, strict=True):
        if e is None:
            assert x is None or bool((x == 0).all())
            continue
        assert x.shape == e.shape
        # What rounding the weights and their gradients to the op's precision costs, and what is
        # left of dP - delta where they cancel: there the plain formula may be exact by luck.
        eps = torch.finfo(p.dtype).eps
        slack = eps * e.abs().max() + 1e-4 if e.numel() else 0.0
        assert_accurate(x, e, p, slack=slack + noise if e.dim() == 1 else slack)
