"""`tk.causal_conv1d`: values against the reference in float64, states, packed sequences, layouts;
wrong calls. Gradients are tested in test_causal_conv1d_gradient.py."""

from __future__ import annotations

import itertools

import pytest
import torch

import thunderkittens as tk
from helpers.convolution import (
    BF16,
    FP16,
    FP32,
    LAYOUTS,
    edges,
    exact,
    normal,
    operands,
    place,
    plain,
)
from helpers.cover import cover, over
from helpers.guard import assert_guards_intact
from helpers.numerics import assert_accurate
from thunderkittens import _C, emulation

H200 = _C.DeviceProperties(
    sm_count=132, shared_bytes_per_block=232448, l2_bytes=50 << 20, major=9, minor=0
)

# Begins on either side of vectors, by one and by two tokens; empty and short sequences.
PACKED = [[5, 0, 1, 2, 11], [64, 3, 70], [1] * 9, [0, 0, 30, 0], [6, 17, 6, 19]]


def cases(device, intensity):
    large = device == "cuda"
    return cover(
        {
            "shape": [(2, 16, 24), (1, 8, 1), (3, 7, 13), (1, 264, 70), (2, 40, 136), (1, 1, 2)]
            + [(1, 8192, 1000), (8, 1536, 2048), (3, 1031, 997)] * large,
            "packed": [None, None, *PACKED],
            "width": [2, 3, 4],
            "dtype": [BF16, FP16, FP32],
            "wide": [False, True],
            "bias": [False, True],
            "activation": [None, "silu"],
            "state": [False, True],
            "layout": list(LAYOUTS),
        },
        max(intensity, 2) if device == "cpu" else intensity,
    )


@over(cases)
def test_accuracy(device, case):
    given = operands(case, device)
    out, state = tk.causal_conv1d(**given, return_state=True)
    expected, last = tk.reference.causal_conv1d(**exact(given), return_state=True)
    assert out.stride() == torch.empty_like(given["x"]).stride()
    assert out.dtype == state.dtype == case["dtype"]
    # Sums of at most five products in float32, in another order.
    terms = exact(given)
    terms = {n: x.abs() if isinstance(x, torch.Tensor) and n != "cu_seqlens" else x
             for n, x in terms.items()}  # fmt: skip
    size = tk.reference.causal_conv1d(**{**terms, "activation": None})
    inputs = given["x"], given["weight"], given["bias"]
    like = plain(*inputs, given["activation"])
    wide = [None if x is None else x.double() for x in inputs]
    like64 = plain(*wide, given["activation"])
    if not case["state"] and case["packed"] is None:
        rule = like
    else:  # of which PyTorch's convolution knows nothing: as far off as it is without them
        rule = expected + (like.double() - like64).abs().max()
    assert_accurate(out, expected, rule, slack=8 * torch.finfo(FP32).eps * (1 + size))
    assert torch.equal(state.double(), last)


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("layout", ["channels", "tokens", "unaligned"])
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.emulator
def test_every_kernel_is_exact(width, layout, dtype, portable):
    """Integers add up without an error, in each kernel."""
    shape = (2, 24, 2072) if layout == "tokens" else (2, 264, 75)
    x = place(torch.randint(-3, 4, shape).to(dtype), layout)
    weight = torch.randint(-3, 4, (shape[1], width)).to(dtype)
    bias = torch.randint(-3, 4, (shape[1],)).to(dtype)
    with tk.emulate("random", seed=width, portable=portable) as run:
        out = tk.causal_conv1d(x, weight, bias)
    assert torch.equal(out, tk.reference.causal_conv1d(x, weight, bias))
    name = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}[dtype]
    end = "_portable" if portable else ""
    assert run.kernels[0]["kernel"] == f"forward_{name}_{LAYOUTS[layout]}_{width}{end}"


@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize(
    ("layout", "lanes"),
    [
        *((layout, n) for layout in ("channels", "unaligned") for n in (1, 2, 8, 32, 128, 256)),
        *(("tokens", n) for n in (1, 2, 8, 32)),
    ],
)
@pytest.mark.emulator
def test_how_blocks_cut_the_work(layout, lanes, steps):
    """However threads are laid over channels and tokens, and whatever a thread goes along."""
    x = place(torch.randint(-3, 4, (1, 272, 144)).bfloat16(), layout)
    weight = torch.randint(-3, 4, (272, 4)).bfloat16()
    given = {"initial_state": torch.randint(-3, 4, (4, 272, 3)).bfloat16(),
             "cu_seqlens": edges([3, 60, 0, 80], "cpu")}  # fmt: skip
    for options in ({}, given):
        with tk.emulate("late_mma", config={"lanes": lanes, "steps": steps}) as run:
            out, state = tk.causal_conv1d(x, weight, **options, return_state=True)
        assert (run.kernels[0]["lanes"], run.kernels[0]["steps"]) == (lanes, steps)
        expected = tk.reference.causal_conv1d(x, weight, **options, return_state=True)
        assert torch.equal(out, expected[0])
        assert torch.equal(state, expected[1])


@pytest.mark.parametrize("layout", ["channels", "tokens", "any"])
@pytest.mark.parametrize("op", ["causal_conv1d", "causal_conv1d_backward"])
def test_runs_are_as_long_as_the_device_is_full(op, layout):
    """Short ones where there is little to do; lanes of a warp unless a dimension is short."""
    steps = []
    for batch, length in ((1, 256), (1, 8192), (64, 8192)):
        problem = {"batch": batch, "channels": 8192, "length": length, "layout": layout}
        found = _C.choose(op, problem, H200)
        assert found["lanes"] == 32
        steps.append(found["steps"])
    assert steps == sorted(steps)
    assert steps[0] < steps[2]
    few = _C.choose(op, {"channels": 16, "length": 16, "layout": layout}, H200)
    assert few["lanes"] < 32


@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("cut", [0, 1, 2, 3, 7, 8, 9, 16, 39, 40])
def test_split_anywhere(device, cut, layout):
    """A sequence in two calls has the same bits as in one."""
    x, weight = normal((2, 16, 40), BF16, device), normal((16, 4), BF16, device)
    options = {"bias": normal((16,), FP32, device), "activation": "silu"}
    whole, end = tk.causal_conv1d(place(x, layout), weight, **options, return_state=True)
    first, state = tk.causal_conv1d(place(x[..., :cut], layout), weight, **options,
                                    return_state=True)  # fmt: skip
    second, last = tk.causal_conv1d(place(x[..., cut:], layout), weight, **options,
                                    initial_state=state, return_state=True)  # fmt: skip
    assert torch.equal(torch.cat([first, second], -1), whole)
    assert torch.equal(last, end)


@pytest.mark.parametrize("lengths", PACKED)
@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("with_state", [False, True])
def test_packed_sequences_are_separate(device, layout, lengths, with_state):
    """Whatever lies behind the last one is not read, and 0 in the output."""
    channels, total = 16, sum(lengths)
    tail = 8 - total % 8
    x = normal((1, channels, total + tail), FP16, device)
    x[..., total:] = torch.nan
    weight, bias = normal((channels, 4), FP32, device), normal((channels,), FP16, device)
    states = normal((len(lengths), channels, 3), FP16, device) if with_state else None
    out, last = tk.causal_conv1d(
        place(x, layout), weight, bias, activation="silu", initial_state=states,
        cu_seqlens=edges(lengths, device), return_state=True,
    )  # fmt: skip
    begin = 0
    for i, n in enumerate(lengths):
        alone, end = tk.causal_conv1d(
            place(x[..., begin : begin + n], layout), weight, bias, activation="silu",
            initial_state=None if states is None else states[i : i + 1], return_state=True,
        )  # fmt: skip
        assert torch.equal(out[..., begin : begin + n], alone)
        assert torch.equal(last[i : i + 1], end)
        begin += n
    assert bool((out[..., total:] == 0).all())


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_taps_reach_no_farther(device, layout):
    """An infinity shows in as many outputs as there are taps, and in no other channel."""
    for width, at in itertools.product((2, 3, 4), (0, 5, 13)):
        x = torch.ones(1, 16, 24, device=device, dtype=BF16)
        x[0, 3, at] = torch.inf
        out = tk.causal_conv1d(place(x, layout), torch.ones(16, width, device=device))
        found = torch.isinf(out).nonzero()[:, 1:].tolist()
        assert found == [[3, t] for t in range(at, at + width)]
        assert not bool(out.isnan().any())


def test_silu_of_large_numbers(device):
    x = torch.tensor([-1e4, -200.0, -88.0, -1.0, 0.0, 1.0, 200.0, 1e4], device=device)
    weight = torch.tensor([[0.0, 1.0]], device=device)
    for dtype in (BF16, FP16, FP32):
        out = tk.causal_conv1d(x.to(dtype).view(1, 1, 8), weight, activation="silu")
        expected = torch.nn.functional.silu(x.to(dtype).double()).view(1, 1, 8)
        torch.testing.assert_close(out.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-30)


@pytest.mark.parametrize(
    "shape", [(0, 8, 16), (2, 0, 16), (2, 8, 0), (0, 0, 0), (1, 1, 1), (2, 3, 5)]
)
@pytest.mark.parametrize("layout", ["channels", "tokens"])
def test_sizes(device, shape, layout):
    x = (
        place(normal(shape, BF16, device), layout)
        if 0 not in shape
        else normal(shape, BF16, device)
    )
    weight = normal((shape[1], 4), BF16, device)
    states = normal((shape[0], shape[1], 3), BF16, device)
    out, last = tk.causal_conv1d(x, weight, initial_state=states, return_state=True)
    expected = tk.reference.causal_conv1d(x, weight, initial_state=states, return_state=True)
    torch.testing.assert_close(out, expected[0])
    assert torch.equal(last, expected[1])


def test_no_sequences(device):
    x, weight = normal((1, 8, 16), BF16, device), normal((8, 4), BF16, device)
    out, state = tk.causal_conv1d(x, weight, cu_seqlens=edges([], device), return_state=True)
    assert state.shape == (0, 8, 3)
    assert bool((out == 0).all())


@pytest.mark.parametrize("strided", ["weight", "bias", "state", "cu_seqlens"])
def test_strides_of_the_others(device, strided):
    given = {
        "weight": normal((16, 4), BF16, device),
        "bias": normal((16,), BF16, device),
        "initial_state": normal((3, 16, 3), BF16, device),
        "cu_seqlens": edges([5, 7, 12], device),
    }
    x = normal((1, 16, 24), BF16, device)
    expected = tk.causal_conv1d(x, **given)
    name = "initial_state" if strided == "state" else strided
    big = given[name].new_zeros((2, *given[name].shape))
    big[1] = given[name]
    given[name] = big.movedim(0, -1).contiguous()[..., 1]
    assert torch.equal(tk.causal_conv1d(x, **given), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_nothing_else_is_written(device, layout):
    x = place(normal((2, 512, 2048), BF16, device), layout)
    weight = normal((512, 4), BF16, device)
    assert_guards_intact(lambda: tk.causal_conv1d(x, weight, activation="silu"))


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.parametrize("layout", ["channels", "tokens", "unaligned"])
def test_more_than_2_to_the_31_elements(device, layout):
    x = torch.empty((2, 1 << 14, (1 << 16) + 64), device=device, dtype=BF16)
    x.normal_()
    x = place(x, layout)
    weight = normal((1 << 14, 4), BF16, device)
    out = tk.causal_conv1d(x, weight)
    part = slice(-40, None)
    expected = tk.reference.causal_conv1d(x[1:, part, -64:], weight[part])
    torch.testing.assert_close(out[1:, part, -61:], expected[..., 3:])


@pytest.mark.emulator
def test_edges_that_do_not_fit_are_harmless():
    """Kernels read cumulative lengths that nobody has checked, and stay within their operands."""
    x, weight = torch.randn(1, 8, 24).bfloat16(), torch.randn(8, 4).bfloat16()
    for values in ([0, 30, 90], [5, 3, 24], [-7, 12], [24, 0, 24], [0, 0, -1]):
        bad = torch.tensor(values, dtype=torch.int32)
        arrays = {"x": x, "weight": weight, "cu_seqlens": bad}
        for portable in (False, True):
            with tk.emulate(portable=portable):
                found = emulation.run("causal_conv1d", arrays, return_state=True)
                emulation.run("causal_conv1d_backward", {**arrays, "grad_out": x})
        assert found["out"].shape == x.shape


X, W, B = torch.zeros(2, 8, 16, dtype=BF16), torch.zeros(8, 4, dtype=BF16), torch.zeros(8)
S, E = torch.zeros(2, 8, 3, dtype=BF16), torch.tensor([0, 16], dtype=torch.int32)
WRONG = {
    "no tensor": (([1], W), {}, TypeError, "x must be a torch.Tensor"),
    "sparse": ((X.to_sparse(), W), {}, TypeError, "x must be a dense tensor"),
    "float64": ((X.double(), W.double()), {}, TypeError, "x is torch.float64"),
    "integers": ((X.int(), W), {}, TypeError, "x is torch.int32"),
    "2-D": ((X[0], W), {}, ValueError, "3 dimensions"),
    "no weight": ((X, None), {}, TypeError, "weight must be a torch.Tensor"),
    "weight's dtype": ((X, W.half()), {}, TypeError, "weight is torch.float16"),
    "weight's dims": ((X, W.unsqueeze(1)), {}, ValueError, "weight has shape"),
    "one tap": ((X, W[:, :1]), {}, ValueError, "2 to 4 taps"),
    "five taps": ((X, torch.zeros(8, 5)), {}, ValueError, "2 to 4 taps"),
    "channels": ((X, W[:4]), {}, ValueError, "weight has 4 channels, x has 8"),
    "weight's device": ((X, W.to("meta")), {}, TypeError, "weight is on meta"),
    "bias's kind": ((X, W, 1.0), {}, TypeError, "bias must be a torch.Tensor"),
    "bias's shape": ((X, W, B[:4]), {}, ValueError, "bias has shape"),
    "bias's dtype": ((X, W, B.double()), {}, TypeError, "bias is torch.float64"),
    "bias's device": ((X, W, B.to("meta")), {}, TypeError, "bias is on meta"),
    "activation": ((X, W), {"activation": "gelu"}, ValueError, "activation is 'gelu'"),
    "activation's kind": ((X, W), {"activation": True}, TypeError, "activation must be"),
    "state's kind": ((X, W), {"initial_state": 0}, TypeError, "initial_state must be"),
    "state's dtype": ((X, W), {"initial_state": S.float()}, TypeError, "initial_state is"),
    "state's shape": ((X, W), {"initial_state": S[..., :2]}, ValueError, "initial_state has shape"),
    "state's batch": ((X, W), {"initial_state": S[:1]}, ValueError, "initial_state has shape"),
    "state's device": ((X, W), {"initial_state": S.to("meta")}, TypeError, "on meta"),
    "edges' kind": ((X[:1], W), {"cu_seqlens": [0, 16]}, TypeError, "cu_seqlens must be"),
    "edges' dtype": ((X[:1], W), {"cu_seqlens": E.long()}, TypeError, "torch.int32"),
    "edges' device": ((X[:1], W), {"cu_seqlens": E.to("meta")}, TypeError, "on meta"),
    "edges' dims": ((X[:1], W), {"cu_seqlens": E[None]}, ValueError, "cu_seqlens has shape"),
    "no edges": ((X[:1], W), {"cu_seqlens": E[:0]}, ValueError, "cu_seqlens has shape"),
    "batch of packed": ((X, W), {"cu_seqlens": E}, ValueError, "batch of 2"),
    "edges that decrease": ((X[:1], W), {"cu_seqlens": E.flip(0)}, ValueError, "must start with 0"),
    "edges too far": ((X[:1], W), {"cu_seqlens": E * 2}, ValueError, "16 tokens"),
}  # fmt: skip


@pytest.mark.parametrize(("args", "options", "error", "words"), WRONG.values(), ids=WRONG)
def test_wrong_calls(args, options, error, words):
    with pytest.raises(error, match=words):
        tk.causal_conv1d(*args, **options)
    leaf = [x.clone().requires_grad_() if x is X else x for x in args]
    with pytest.raises(error, match=words):
        tk.causal_conv1d(*leaf, **options)
