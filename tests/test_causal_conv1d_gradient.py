"""The gradient of `tk.causal_conv1d`, also through states, against float64 autograd."""

from __future__ import annotations

import pytest
import torch

import thunderkittens as tk
from helpers.convolution import BF16, FP16, FP32, LAYOUTS, edges, exact, normal, operands, place
from helpers.cover import cover, over
from helpers.numerics import assert_accurate

# Begins on either side of vectors, by one and by two tokens; empty and short sequences.
PACKED = [[5, 0, 1, 2, 11], [64, 3, 70], [1] * 9, [0, 0, 30, 0], [6, 17, 6, 19]]
NAMES = ("x", "weight", "bias", "initial_state")


def cases(device, intensity):
    large = device == "cuda"
    return cover(
        {
            "shape": [(2, 16, 24), (1, 8, 1), (3, 7, 13), (1, 136, 70), (2, 40, 136), (1, 1, 2)]
            + [(1, 4096, 1000), (4, 1536, 2048), (3, 1031, 997)] * large,
            "packed": [None, None, *PACKED],
            "width": [2, 3, 4],
            "dtype": [BF16, FP16, FP32],
            "wide": [False, True],
            "bias": [False, True],
            "activation": [None, "silu"],
            "state": [False, True],
            "layout": list(LAYOUTS),
            "gradient": ["channels", "tokens", "expanded"],
        },
        max(intensity, 2) if device == "cpu" else intensity,
    )


def gradients(function, given, grad_out, grad_state):
    """Of the operands that are there, by their names."""
    leaves = {n: given[n].detach().requires_grad_() for n in NAMES if given.get(n) is not None}
    out, state = function(**{**given, **leaves}, return_state=True)
    found = torch.autograd.grad([out, state], list(leaves.values()), [grad_out, grad_state])
    return dict(zip(leaves, found, strict=True))


@over(cases)
def test_gradients(device, case):
    """The error of a sum over tokens is bounded by what its terms are rounded to."""
    given = operands(case, device)
    x = given["x"]
    if case["gradient"] == "expanded":
        grad_out = normal((1, x.shape[1], 1), case["dtype"], device).expand(x.shape)
    else:
        grad_out = place(normal(x.shape, case["dtype"], device), case["gradient"])
    sequences = len(case["packed"]) if case["packed"] else x.shape[0]
    shape = (sequences, x.shape[1], case["width"] - 1)
    grad_state = normal(shape, case["dtype"], device)
    found = gradients(tk.causal_conv1d, given, grad_out, grad_state)
    wide = (exact(given), grad_out.double(), grad_state.double())
    expected = gradients(tk.reference.causal_conv1d, *wide)
    # The formula at x's precision: activations and gradients rounded, sums in float32.
    rough = {n: y.to(case["dtype"]).double() if n in ("weight", "bias") and y is not None else y
             for n, y in wide[0].items()}  # fmt: skip
    like = gradients(tk.reference.causal_conv1d, rough, *wide[1:])
    tokens = x.shape[0] * x.shape[2]
    for name, y in found.items():
        assert y.shape == given[name].shape
        assert y.dtype == given[name].dtype
        size = expected[name].abs().max() + 1
        terms = tokens if name in ("weight", "bias") else 1
        slack = 16 * torch.finfo(FP32).eps * size * terms**0.5
        assert_accurate(y, expected[name], like[name], slack=slack)
    assert found["x"].stride() == torch.empty_like(x).stride()


@pytest.mark.all_twins
@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("layout", ["channels", "tokens", "unaligned"])
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.emulator
def test_every_kernel_is_exact(width, layout, dtype, portable):
    """Integers add up without an error, in each kernel and over all of its blocks."""
    shape = (2, 24, 1048) if layout == "tokens" else (2, 136, 150)
    x, grad_out = (place(torch.randint(-2, 3, shape).to(dtype), layout) for _ in range(2))
    weight, bias = torch.randint(-2, 3, (shape[1], width)).float(), torch.zeros(shape[1])
    given = {"x": x, "weight": weight, "bias": bias}
    grad_state = torch.zeros(2, shape[1], width - 1, dtype=dtype)
    with tk.emulate("random", seed=width, portable=portable) as run:
        found = gradients(tk.causal_conv1d, given, grad_out, grad_state)
    expected = gradients(tk.reference.causal_conv1d, exact(given), grad_out.double(),
                         grad_state.double())  # fmt: skip
    for name, y in found.items():
        assert torch.equal(y.double(), expected[name]), name
    name = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}[dtype]
    end = "_portable" if portable else ""
    assert run.kernels[1]["kernel"] == f"gradient_{name}_{LAYOUTS[layout]}_{width}{end}"


@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize(
    ("layout", "lanes"),
    [
        *((layout, n) for layout in ("channels", "unaligned") for n in (1, 4, 32, 64, 256)),
        *(("tokens", n) for n in (1, 4, 32)),
    ],
)
@pytest.mark.emulator
def test_how_blocks_cut_the_work(layout, lanes, steps):
    x, grad_out = (place(torch.randint(-2, 3, (1, 72, 184)).half(), layout) for _ in range(2))
    given = {"x": x, "weight": torch.randint(-2, 3, (72, 4)).float(), "bias": torch.ones(72)}
    given["initial_state"] = torch.randint(-2, 3, (4, 72, 3)).half()
    given["cu_seqlens"] = edges([3, 60, 0, 117], "cpu")
    grad_state = torch.randint(-2, 3, (4, 72, 3)).half()
    with tk.emulate("late_mma") as run:
        leaves = {n: given[n].detach().requires_grad_() for n in NAMES}
        out, state = tk.causal_conv1d(**{**given, **leaves}, return_state=True)
        run.config = {"lanes": lanes, "steps": steps}
        found = torch.autograd.grad([out, state], list(leaves.values()), [grad_out, grad_state])
    assert (run.kernels[1]["lanes"], run.kernels[1]["steps"]) == (lanes, steps)
    expected = gradients(tk.reference.causal_conv1d, exact(given), grad_out.double(),
                         grad_state.double())  # fmt: skip
    for name, y in zip(leaves, found, strict=True):
        assert torch.equal(y.double(), expected[name]), name


@pytest.mark.parametrize("layout", ["channels", "tokens", "spread"])
@pytest.mark.parametrize("needs", [(0,), (1,), (2,), (3,), (1, 2), (0, 3)])
def test_only_what_is_needed(device, needs, layout):
    """What is left out changes nothing of the rest."""
    given = operands(
        {"shape": (2, 16, 40), "width": 4, "dtype": BF16, "wide": True, "bias": True,
         "activation": "silu", "state": True, "layout": layout}, device,
    )  # fmt: skip
    grad_out, grad_state = normal((2, 16, 40), BF16, device), normal((2, 16, 3), BF16, device)
    every = gradients(tk.causal_conv1d, given, grad_out, grad_state)
    leaves = {NAMES[i]: given[NAMES[i]].detach().requires_grad_() for i in needs}
    out, state = tk.causal_conv1d(**{**given, **leaves}, return_state=True)
    found = torch.autograd.grad([out, state], list(leaves.values()), [grad_out, grad_state])
    for name, y in zip(leaves, found, strict=True):
        assert torch.equal(y, every[name])


@pytest.mark.parametrize("layout", ["channels", "tokens", "spread"])
def test_padding_leaves_no_trace(device, layout):
    """NaN behind the last sequence, in x and in the gradient, reaches nothing."""
    x, grad_out = (normal((1, 16, 32), BF16, device) for _ in range(2))
    x[..., 21:] = grad_out[..., 21:] = torch.nan
    given = {
        "x": place(x, layout),
        "weight": normal((16, 4), FP32, device),
        "bias": normal((16,), FP32, device),
        "cu_seqlens": edges([9, 12], device),
        "activation": "silu",
    }
    grad_state = normal((2, 16, 3), BF16, device)
    for name, y in gradients(tk.causal_conv1d, given, place(grad_out, layout), grad_state).items():
        assert not bool(y.isnan().any()), name
        assert name != "x" or bool((y[..., 21:] == 0).all())


def test_of_one_result_alone(device):
    x, weight = normal((2, 16, 24), BF16, device).requires_grad_(), normal((16, 4), BF16, device)
    out, state = tk.causal_conv1d(x, weight, return_state=True)
    (through_state,) = torch.autograd.grad(state.sum(), x, retain_graph=True)
    expected = torch.zeros_like(x)
    expected[..., -3:] = 1
    assert torch.equal(through_state, expected)
    (through_out,) = torch.autograd.grad(out[..., :1].sum(), x)
    assert torch.equal(through_out[..., 0], weight[:, 3].detach().expand(2, 16))
    assert bool((through_out[..., 1:] == 0).all())


@pytest.mark.parametrize("shape", [(0, 8, 16), (2, 8, 0), (2, 0, 16)])
def test_nothing_to_compute(device, shape):
    given = {
        "x": normal(shape, BF16, device),
        "weight": normal((shape[1], 4), BF16, device),
        "bias": normal((shape[1],), FP32, device),
        "initial_state": normal((shape[0], shape[1], 3), BF16, device),
    }
    grad_state = normal((shape[0], shape[1], 3), BF16, device)
    found = gradients(tk.causal_conv1d, given, torch.zeros_like(given["x"]), grad_state)
    assert found["x"].shape == shape
    assert bool((found["weight"] == 0).all())
    assert bool((found["bias"] == 0).all())
    if shape[2] == 0:
        assert torch.equal(found["initial_state"], grad_state)


def test_empty_sequences_pass_the_gradient_of_their_state(device):
    given = {
        "x": normal((1, 16, 8), BF16, device),
        "weight": normal((16, 4), BF16, device),
        "initial_state": normal((3, 16, 3), BF16, device),
        "cu_seqlens": edges([0, 8, 0], device),
    }
    grad_state = normal((3, 16, 3), BF16, device)
    found = gradients(tk.causal_conv1d, given, torch.zeros_like(given["x"]), grad_state)
    assert torch.equal(found["initial_state"][::2], grad_state[::2])
    assert bool((found["initial_state"][1] == 0).all())


@pytest.mark.parametrize("layout", ["channels", "tokens"])
def test_reruns_are_bit_equal(device, layout):
    x = place(normal((3, 40, 136), BF16, device), layout)
    given = {"x": x, "weight": normal((40, 4), BF16, device), "bias": normal((40,), BF16, device)}
    grad_out, grad_state = normal(x.shape, BF16, device), normal((3, 40, 3), BF16, device)
    runs = [gradients(tk.causal_conv1d, given, grad_out, grad_state) for _ in range(4)]
    for run in runs[1:]:
        assert all(torch.equal(run[n], runs[0][n]) for n in run)


def test_no_double_backward():
    x = torch.randn(1, 8, 8).bfloat16().requires_grad_()
    (gradient,) = torch.autograd.grad(
        tk.causal_conv1d(x, torch.randn(8, 4), activation="silu").float().square().sum(), x,
        create_graph=True,
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="double backward"):
        gradient.sum().backward()
