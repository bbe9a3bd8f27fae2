"""Gradients of `tk.lolcats`: against float64 autograd, to which the maximum contributes."""

from __future__ import annotations

import pytest
import torch

import thunderkittens as tk
from helpers.lolcats import operands, part, plain, rounding_of_factors
from helpers.numerics import assert_accurate

BF16, FP16 = torch.bfloat16, torch.float16
NAMES = ("q", "k", "v", "q_map", "k_map", "alpha", "beta")
LENGTHS = [1, 63, 64, 65, 127, 128, 129, 1000]


def sizes(device):
    """Those that a CPU takes in time."""
    return LENGTHS if device == "cuda" else LENGTHS[:-1]


def weights_of(out):
    """Numbers that differ from row to row."""
    return torch.cos(torch.arange(out.numel(), device=out.device)).view(out.shape).to(BF16)


def gradients(function, inputs, **options):
    """Of the weighted output, zero where there is none."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = function(*leaves, **options)
    weights = weights_of(out).to(out.dtype)
    grads = torch.autograd.grad(out, leaves, weights, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True)]


def assert_gradients(found, inputs, **options):
    expected = gradients(tk.reference.lolcats, [x.double() for x in inputs], **options)
    rounded = gradients(plain, inputs, **options)
    factor_slack = rounding_of_factors(inputs, weights_of, **options)
    for name, x, y, z in zip(NAMES, found, expected, rounded, strict=True):
        # In the first rows plain PyTorch may be exact by luck.
        slack = torch.finfo(inputs[0].dtype).eps * y.square().mean().sqrt() + 1e-6
        assert_accurate(x, y, z, slack=slack + factor_slack.get(name, 0.0))


@pytest.mark.parametrize(("dim", "features"), [(128, 64), (64, 64), (128, 32), (64, 32)])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_gradients(device, dtype, dim, features):
    for length in sizes(device):
        inputs = operands(2, 4, 2, length, dim, features, dtype, device)
        assert_gradients(gradients(tk.lolcats, inputs), inputs)


def test_the_maximum_is_differentiated(device):
    """Equal keys share the maximum's gradient."""
    inputs = operands(1, 2, 1, 200, 64, 32, BF16, device)
    inputs[1][:, :, 1::2] = inputs[1][:, :, ::2]
    assert_gradients(gradients(tk.lolcats, inputs), inputs)


def large_projections(device="cpu", dtype=BF16):
    """Operands some of whose softmaxes need their maxima subtracted: not those of the last head."""
    inputs = operands(1, 2, 1, 200, 64, 32, dtype, device)
    for x in inputs[3:5]:
        x[0] *= 30
    return inputs


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_large_projections(device, dtype):
    inputs = large_projections(device, dtype)
    assert_gradients(gradients(tk.lolcats, inputs), inputs)


def test_layouts(device):
    inputs = operands(1, 2, 2, 130, 64, 32, BF16, device)
    other = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs[:3]] + inputs[3:]
    for x, y in zip(gradients(tk.lolcats, inputs), gradients(tk.lolcats, other), strict=True):
        assert torch.equal(x, y)


def test_reruns_are_equal(device):
    inputs = operands(1, 4, 2, 300, 64, 32, BF16, device)
    for x, y in zip(*(gradients(tk.lolcats, inputs) for _ in range(2)), strict=True):
        assert torch.equal(x, y)


def test_many_heads(device):
    """More than multiprocessors: blocks of kernels begin while those of the ones before run."""
    heads = 300 if device == "cuda" else 3
    inputs = operands(1, heads, heads, 260, 64, 32, BF16, device)
    expected = gradients(tk.reference.lolcats, [x.double() for x in inputs])
    found = [gradients(tk.lolcats, inputs) for _ in range(4)]
    for x, y in zip(found[0][:5], expected, strict=False):
        assert (x - y).norm() < 1e-2 * y.norm()
    for again in found[1:]:
        for x, y in zip(found[0], again, strict=True):
            assert torch.equal(x, y)


def test_vmap(device):
    """The maps' gradients, too, which are sums over a batch."""
    inputs = [
        torch.stack(x)
        for x in zip(*(operands(1, 2, 1, 70, 64, 32, BF16, device) for _ in "ab"), strict=True)
    ]
    tokens, shared = inputs[:3], [x[0] for x in inputs[3:]]
    backward = torch.ops.thunderkittens.lolcats_backward
    for needs in ([True] * 7, [True] * 3 + [False] * 4):

        def call(grad_out, *tokens, needs=needs):
            out, *_, maxima, denominators = torch.ops.thunderkittens.lolcats(*tokens, *shared)
            rest = (None,) * 5
            return backward(grad_out, *tokens, *shared, out, maxima, denominators, *rest, needs)

        mapped = torch.func.vmap(call)(tokens[0], *tokens)
        for i in range(2):
            single = call(tokens[0][i], *(x[i] for x in tokens))
            for x, y in zip(mapped, single, strict=True):
                assert torch.equal(x[i], y)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (3, 4), (5, 6), (0, 1, 2)])
def test_some_gradients(device, wanted):
    inputs = operands(1, 2, 1, 130, 64, 32, BF16, device)
    everything = gradients(tk.lolcats, inputs)
    leaves = [x.detach().requires_grad_(i in wanted) for i, x in enumerate(inputs)]
    out = tk.lolcats(*leaves)
    weights = torch.cos(torch.arange(out.numel(), device=device)).view(out.shape).to(BF16)
    found = torch.autograd.grad(out, [leaves[i] for i in wanted], weights)
    for i, x in zip(wanted, found, strict=True):
        assert torch.equal(x, everything[i]), NAMES[i]


def test_a_state_is_a_constant(device):
    before = operands(1, 2, 1, 200, 64, 32, BF16, device)
    _, state = tk.lolcats(*before, return_state=True)
    after = [*operands(1, 2, 1, 70, 64, 32, BF16, device)[:3], *before[3:]]
    found = gradients(tk.lolcats, after, initial_state=state)
    assert_gradients(found, after, initial_state=state)
    leaves = [x.requires_grad_() for x in before]
    _, end = tk.lolcats(*leaves, return_state=True)
    with pytest.raises(RuntimeError, match="returned state"):
        end.numerator.sum().backward()


def test_double_backward_is_refused(device):
    leaves = [x.requires_grad_() for x in operands(1, 1, 1, 5, 64, 32, BF16, device)]
    grad = torch.autograd.grad(tk.lolcats(*leaves).sum(), leaves[0], create_graph=True)[0]
    with pytest.raises(RuntimeError, match="double backward"):
        grad.sum().backward()


EMULATED = [
    (1, 128, 64, 1, "eager"),
    (64, 64, 32, 1, "late_mma"),
    (150, 128, 64, 1, "on_wait"),
    (260, 64, 64, 3, "random"),
    (150, 128, 32, 2, "on_wait"),
    (128, 64, 32, 1, "late_mma"),
    (192, 128, 64, 2, "on_wait"),
    # As many segments as are added without a scan.
    (230, 64, 32, 4, "random"),
    (1280, 64, 32, 2, "late_mma"),
]


@pytest.mark.emulator
@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(("length", "dim", "features", "segments", "policy"), EMULATED)
def test_emulated(portable, dtype, length, dim, features, segments, policy):
    lines = (2, 4, 2) if length <= 64 else (1, 2, 1)
    inputs = operands(*lines, length, dim, features, dtype)
    with tk.emulate(policy, portable=portable, config={"segments": segments}):
        found = gradients(tk.lolcats, inputs)
    assert_gradients(found, inputs)


@pytest.mark.emulator
@pytest.mark.all_twins
@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("features", [32, 64])
def test_every_kernel(portable, dtype, dim, features):
    inputs = operands(1, 2, 1, 130, dim, features, dtype)
    with tk.emulate("late_mma", seed=dim, portable=portable, config={"segments": 2}):
        found = gradients(tk.lolcats, inputs)
    assert_gradients(found, inputs)


@pytest.mark.emulator
@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("policy", ["on_wait", "late_mma"])
def test_emulated_without_groups(portable, policy):
    """Each head with keys of its own, whose gradients go to memory by TMA."""
    inputs = operands(1, 2, 2, 230, 64, 32, BF16)
    with tk.emulate(policy, portable=portable, config={"segments": 2}):
        found = gradients(tk.lolcats, inputs)
    assert_gradients(found, inputs)


@pytest.mark.emulator
@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(
    ("before", "length", "kv_heads", "segments", "policy"),
    [
        (200, 70, 1, 1, "on_wait"),
        (64, 230, 2, 2, "late_mma"),
        (63, 130, 2, 1, "random"),
        (300, 150, 1, 2, "eager"),
    ],
)
def test_emulated_from_a_state(portable, before, length, kv_heads, segments, policy, dtype):
    """The cached rows before the first query are no keys of the call: they get no gradient."""
    inputs = operands(1, 2, kv_heads, before + length, 64, 32, dtype)
    _, state = tk.reference.lolcats(*part(inputs, 0, before), return_state=True)
    after = part(inputs, before)
    with tk.emulate(policy, portable=portable, config={"segments": segments}):
        found = gradients(tk.lolcats, after, initial_state=state)
    assert_gradients(found, after, initial_state=state)


@pytest.mark.emulator
@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (3,), (4,), (5, 6), (0, 3), (1, 2, 4)])
def test_emulated_some_gradients(portable, wanted):
    """Of each operand apart: the same bits, and nothing else is computed or stored."""
    inputs = operands(1, 2, 1, 130, 64, 32)
    with tk.emulate("random", portable=portable, config={"segments": 2}):
        everything = gradients(tk.lolcats, inputs)
        leaves = [x.detach().requires_grad_(i in wanted) for i, x in enumerate(inputs)]
        out = tk.lolcats(*leaves)
        weights = weights_of(out).to(out.dtype)
        found = torch.autograd.grad(out, [leaves[i] for i in wanted], weights)
    for i, x in zip(wanted, found, strict=True):
        assert torch.equal(x, everything[i]), NAMES[i]


@pytest.mark.emulator
@pytest.mark.parametrize("portable", [False, True])
def test_emulated_large_projections(portable):
    inputs = large_projections()
    with tk.emulate("on_wait", portable=portable):
        found = gradients(tk.lolcats, inputs)
    assert_gradients(found, inputs)
