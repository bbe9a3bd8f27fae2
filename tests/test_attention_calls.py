"""Wrong calls of `tk.attention`, and the agreement of its eager checks, its fake and its C++ op."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import thunderkittens as tk
from helpers.attention import BF16, FP16, FP32, INF
from helpers.layouts import HEAD_LAYOUTS, heads


def zeros(*shape, dtype=BF16, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


Q, K = zeros(2, 8, 5, 64), zeros(2, 2, 7, 64)
WIDE = zeros(2, 2, 7, 264)

WRONG = {
    "q is a list": (TypeError, "tk.attention: q must be a torch.Tensor, got list", [Q], K, K, {}),
    "k is None": (TypeError, "k must be a torch.Tensor, got NoneType", Q, None, K, {}),
    "v is an array": (TypeError, "v must be a torch.Tensor, got nd", Q, K, K.float().numpy(), {}),
    "q is sparse": (TypeError, "q must be a dense tensor", Q.float().to_sparse(), K, K, {}),
    "q is nested": (TypeError, "tk.attention: q must be a dense tensor, got a nested one",
                    torch.nested.nested_tensor([Q[0, 0]]), K, K, {}),
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
    "unknown option": (TypeError, "unexpected keyword argument 'mask'", Q, K, K, {"mask": None}),
    "is_causal": (TypeError, "causal='upper_left' is what", Q, K, K, {"is_causal": True}),
    "attn_mask": (TypeError, "'attn_mask'; arbitrary masks are not supported: torch.nn.functional."
                  "scaled_dot_product_attention", Q, K, K, {"attn_mask": None}),
    "dropout_p": (TypeError, "dropout is not supported; torch.nn", Q, K, K, {"dropout_p": 0.1}),
    "score_mod": (TypeError, "flex_attention takes masks", Q, K, K, {"score_mod": len}),
    "enable_gqa": (TypeError, "k and v may have fewer heads", Q, K, K, {"enable_gqa": True}),
    "softmax_scale": (TypeError, "it is called scale here", Q, K, K, {"softmax_scale": 1.0}),
    "window int": (TypeError, "window_size must be a pair of integers (left, right), got 7",
                   Q, K, K, {"window_size": 7}),
    "window of three": (TypeError, "got (1, 2, 3)", Q, K, K, {"window_size": (1, 2, 3)}),
    "window float": (TypeError, "got (1.0, 2)", Q, K, K, {"window_size": (1.0, 2)}),
    "window None": (TypeError, "got (None, 0)", Q, K, K, {"window_size": (None, 0)}),
    "window -2": (ValueError, "window_size is (-2, 0); left and right must be at least 0, or -1",
                  Q, K, K, {"window_size": (-2, 0)}),
    "softcap None": (TypeError, "softcap must be a number, got NoneType", Q, K, K,
                     {"softcap": None}),
    "softcap < 0": (ValueError, "softcap is -1.0; it must be finite and", Q, K, K,
                    {"softcap": -1.0}),
    "softcap inf": (ValueError, "softcap is inf", Q, K, K, {"softcap": INF}),
    "softcap nan": (ValueError, "softcap is nan", Q, K, K, {"softcap": math.nan}),
    "softcap 1e300": (ValueError, "softcap is 1e+300; in torch.bfloat16 it must be 0 (none) or "
                      "from 9.31323e-10 to 1.26765e+30", Q, K, K, {"softcap": 1e300}),
    "softcap 1e-30": (ValueError, "softcap is 1e-30", Q, K, K, {"softcap": 1e-30}),
    "softcap of half": (ValueError, "softcap is 1000000.0; in torch.float16 it must be 0 (none) or "
                        "from 9.31323e-10 to 2048", Q.half(), K.half(), K.half(),
                        {"softcap": 1e6}),
    "slopes list": (TypeError, "alibi_slopes must be a torch.Tensor or None, got list", Q, K, K,
                    {"alibi_slopes": [0.5] * 8}),
    "slopes dtype": (TypeError, "alibi_slopes is torch.bfloat16; it must be torch.float32",
                     Q, K, K, {"alibi_slopes": zeros(8)}),
    "slopes device": (TypeError, "alibi_slopes is on meta, q is on cpu", Q, K, K,
                      {"alibi_slopes": zeros(8, dtype=FP32, device="meta")}),
    "slopes per head of k": (ValueError, "alibi_slopes has shape (2,); it must be (8,) or (2, 8)",
                             Q, K, K, {"alibi_slopes": zeros(2, dtype=FP32)}),
    "slopes of a batch": (ValueError, "alibi_slopes has shape (3, 8)", Q, K, K,
                          {"alibi_slopes": zeros(3, 8, dtype=FP32)}),
    "slopes scalar": (ValueError, "alibi_slopes has shape ()", Q, K, K,
                      {"alibi_slopes": zeros(dtype=FP32)}),
    "slopes 3 dimensions": (ValueError, "alibi_slopes has shape (1, 2, 8)", Q, K, K,
                            {"alibi_slopes": zeros(1, 2, 8, dtype=FP32)}),
    "sink number": (TypeError, "sink must be a torch.Tensor or None, got float", Q, K, K,
                    {"sink": 0.5}),
    "sink dtype": (TypeError, "sink is torch.float16; it must be torch.float32 or torch.bfloat16",
                   Q, K, K, {"sink": zeros(8, dtype=FP16)}),
    "sink device": (TypeError, "sink is on meta", Q, K, K,
                    {"sink": zeros(8, dtype=FP32, device="meta")}),
    "sink shape": (ValueError, "sink has shape (2, 8); it must be (8,), a logit per head of q",
                   Q, K, K, {"sink": zeros(2, 8, dtype=FP32)}),
    "deterministic": (TypeError, "deterministic must be True, False or None, got int", Q, K, K,
                      {"deterministic": 1}),
    "alignment": (ValueError, "causal is 'left'; it must be", Q, K, K, {"causal": "left"}),
    "scale inf": (ValueError, "scale is inf; it must be finite", Q, K, K, {"scale": INF}),
    "scale 1e39": (ValueError, "scale is 1e+39; it must be finite in float32", Q, K, K,
                   {"scale": 1e39}),
    "scale 10**400": (ValueError, "it must be finite in float32", Q, K, K, {"scale": 10**400}),
    "scale with slopes": (ValueError, "scale is 1e-20; with alibi_slopes it must be 0, or at least",
                          Q, K, K, {"scale": 1e-20, "alibi_slopes": zeros(8, dtype=FP32)}),
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
    "head dim of k": (ValueError, "q has head dim 64, k has 32; they must be equal",
                      Q, K[..., :32], K, {}),
    "head dim of v": (ValueError, "v has head dim 60; it must be a multiple of 8 from 8 to 256",
                      Q, K, K[..., :60], {}),
    "head dim of v 264": (ValueError, "v has head dim 264", Q, K, WIDE, {}),
    "head dim of v 0": (ValueError, "v has head dim 0", Q, K, K[..., :0], {}),
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
            options = {
                name: x.to(device) if isinstance(x, torch.Tensor) and x.device.type == "cpu" else x
                for name, x in options.items()
            }
            tk.attention(*tensors, **options)
    assert words in str(caught.value)


def test_slopes_have_no_gradient(device):
    q, k = Q.to(device), K.to(device)
    slopes = torch.ones(8, device=device, requires_grad=True)
    with pytest.raises(ValueError, match=r"alibi_slopes requires a gradient.*detach"):
        tk.attention(q, k, k, alibi_slopes=slopes)
    with torch.no_grad():
        tk.attention(q, k, k, alibi_slopes=slopes)
    out, _ = torch.ops.thunderkittens.attention(q, k, k, alibi_slopes=slopes)
    with pytest.raises(RuntimeError, match="gradient of alibi_slopes is not computed"):
        out.sum().backward()


def test_wrong_calls_of_the_ops(device):
    ops = torch.ops.thunderkittens
    q, k = Q.to(device), K.to(device)
    for op in (ops.attention_forward, ops.attention):
        for name in ("alibi_slopes", "sink"):
            with pytest.raises((ValueError, RuntimeError), match="adjacent"):
                op(q, k, k, **{name: torch.zeros(16, device=device)[::2]})
    for op in (ops.attention_forward, ops.attention):
        for causal in (-1, 3):
            with pytest.raises((ValueError, RuntimeError), match="causal"):
                op(q, k, k, causal)
    lse = torch.zeros(2, 8, 5, device=device)
    with pytest.raises((ValueError, RuntimeError), match="lse"):
        ops.attention_backward(q, None, q, k, k, q, lse[:, :7])
    with pytest.raises((ValueError, RuntimeError), match="grad_out"):
        ops.attention_backward(k, None, q, k, k, q, lse)


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
    value_dim = draw(st.sampled_from([dim, dim, 8, 24, 64]))
    shapes = [
        [batch, group * heads_k, length_q, dim],
        [batch, heads_k, length_k, dim],
        [batch, heads_k, length_k, value_dim],
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
    heads_q = group * heads_k
    options = {
        "causal": draw(st.sampled_from([0, 0, 1, 1, 2, 2, 3, -1])),
        "scale": draw(st.sampled_from([None, None, 0.5, 2, INF, 1e-20])),
        "window": (draw(st.sampled_from([-1, -1, 0, 7])), draw(st.sampled_from([-1, -1, 0, 3]))),
        "softcap": draw(st.sampled_from([0.0, 0.0, 0.0, 5.0, 5.0, -1.0, 1e5, 1e-20])),
        "slopes": draw(
            st.sampled_from([None, None, (heads_q,), (batch, heads_q), (heads_q + 1,), (3, 2, 1)])
        ),
        "sink": draw(st.sampled_from([None, None, (heads_q,), (heads_q, 1), (heads_q + 2,)])),
    }
    return shapes, dtypes, layouts, options


def build(call, device):
    shapes, dtypes, layouts, options = call
    tensors = []
    for shape, dtype, layout in zip(shapes, dtypes, layouts, strict=True):
        x = torch.randn(shape, device=device).to(dtype)
        if layout == "expanded":
            x = x.narrow(1, 0, min(1, x.shape[1])).expand(shape) if x.shape[1] else x
        elif len(shape) == 4:
            x = heads(x, layout)
        tensors.append(x)
    slopes, sink = (
        None if options[name] is None else torch.randn(options[name], device=device)
        for name in ("slopes", "sink")
    )
    return tensors, slopes, sink


def outcome(function, *arguments, **options):
    """What a call does: shape, dtype and strides of the results, or the error."""
    try:
        results = function(*arguments, **options)
    except (TypeError, ValueError) as error:
        return type(error), str(error)
    results = results if isinstance(results, tuple) else (results,)
    return [(x.shape, x.dtype, strides(x), x.device) for x in results]


def strides(x):
    """Those that mean something: PyTorch's own `empty_like` and its fake differ in the others."""
    return [s for s, n in zip(x.stride(), x.shape, strict=True) if n > 1] if x.numel() else None


def faked(tensors):
    """A mode and the tensors as its fakes; None stays."""
    mode = FakeTensorMode()
    return mode, [None if x is None else mode.from_tensor(x) for x in tensors]


@given(call=any_call())
def test_fake_agrees(device, call):
    tensors, slopes, sink = build(call, device)
    options = call[3]
    alignment = {0: False, 1: "lower_right", 2: "upper_left"}.get(options["causal"], "neither")
    for return_lse in (False, True):
        named = {
            "causal": alignment,
            "scale": options["scale"],
            "window_size": options["window"],
            "softcap": options["softcap"],
            "return_lse": return_lse,
        }
        real = outcome(tk.attention, *tensors, **named, alibi_slopes=slopes, sink=sink)
        mode, fakes = faked([*tensors, slopes, sink])
        with mode:
            fake = outcome(tk.attention, *fakes[:3], **named, alibi_slopes=fakes[3], sink=fakes[4])
        assert real == fake
        if isinstance(real, list) and tensors[0].shape[3] == tensors[2].shape[3]:
            assert real[0] == outcome(torch.empty_like, tensors[0])[0]


@pytest.mark.gpu
@given(call=any_call())
def test_op_guards_itself(device, call):
    """The C++ op refuses what the shape function refuses, and nothing else."""
    tensors, slopes, sink = build(call, device)
    options = call[3]
    middle = (options["causal"], options["scale"], *options["window"], options["softcap"])
    for op in (torch.ops.thunderkittens.attention_forward, torch.ops.thunderkittens.attention):
        mode, fakes = faked([*tensors, slopes, sink])
        with mode:
            expected = outcome(op, *fakes[:3], *middle, *fakes[3:])
        if isinstance(expected, list):
            assert outcome(op, *tensors, *middle, slopes, sink) == expected
        else:
            with pytest.raises(RuntimeError):
                op(*tensors, *middle, slopes, sink)
