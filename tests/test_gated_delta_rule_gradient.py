"""The gradient of `tk.gated_delta_rule`: against autograd of the recurrence in float64."""

from __future__ import annotations

import pytest
import torch

import thunderkittens as tk
from helpers.delta_rule_gradient import (
    BF16,
    FP16,
    NAMES,
    expected,
    gradients,
    operands,
    plain,
    slack,
)
from helpers.numerics import assert_accurate

LENGTHS = [1, 15, 17, 63, 64, 65, 127, 129, 1000]


def assert_gradients(x):
    found, wanted, rounded = gradients(x), expected(x), plain(x)
    assert found.keys() == wanted.keys()
    lucky = slack(x, wanted, rounded)
    for name, y in found.items():
        assert y.dtype == x[name].dtype
        assert_accurate(y, wanted[name], rounded[name], slack=lucky[name])


@pytest.mark.parametrize("length", LENGTHS)
def test_lengths(device, length):
    if device != "cuda" and length > 200:
        length = 200
    assert_gradients(operands(length, device=device))


@pytest.mark.all_twins
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(
    "dims", [(64, 64), (64, 128), (64, 256), (128, 64), (128, 128), (128, 256)]
)
def test_kernels(device, dtype, dims):
    """Each that is compiled."""
    assert_gradients(operands(70, ratio=2, dims=dims, dtype=dtype, device=device))


@pytest.mark.parametrize("dims", [(8, 8), (40, 192), (96, 24), (72, 136)])
def test_padded_dimensions(device, dims):
    assert_gradients(operands(66, dims=dims, device=device))


@pytest.mark.parametrize("ratio", [1, 2, 4, 6])
def test_value_heads(device, ratio):
    """dQ and dK are sums over the value heads of a head."""
    assert_gradients(operands(130, batch=2, heads=2, ratio=ratio, dims=(64, 128), device=device))


@pytest.mark.parametrize(
    "options",
    [
        {"qk_l2norm": True},
        {"qk_l2norm": True, "raw": True, "dims": (128, 64), "ratio": 2},
        {"beta_sigmoid": True, "scale": 0.7},
        {"beta_sigmoid": True, "allow_neg_eigval": True, "raw": True, "qk_l2norm": True},
        {"state_v_first": True, "dims": (64, 128)},
        {"state": False},
    ],
    ids=lambda options: "-".join(options),
)
def test_options(device, options):
    assert_gradients(operands(100, device=device, **options))


@pytest.mark.parametrize(
    "edges",
    [[0, 100], [0, 0, 3, 3, 70, 199], [0, 64, 128, 160], [0, 1, 2, 65, 200]],
    ids=str,
)
def test_packed_sequences(device, edges):
    x = operands(200, edges=edges, ratio=2, raw=True, qk_l2norm=True, device=device)
    assert_gradients(x)
    found = gradients(x)
    for name in ("q", "k", "v", "g", "beta"):
        assert not found[name][:, :, edges[-1] :].any(), name


SEGMENTS = [
    # length, segments, of the operands, policy
    (330, 2, {"ratio": 2, "raw": True, "qk_l2norm": True}, "random"),
    (460, 3, {"dims": (64, 64), "state_v_first": True}, "late_mma"),
    (320, 5, {"dims": (96, 136), "state": False, "dtype": FP16}, "eager"),
    (500, 4, {"batch": 2, "heads": 2, "dims": (40, 192), "decay": 1e-3}, "on_wait"),
    (330, 7, {"keys": "correlated", "beta": 1.0}, "random"),
    (400, 3, {"edges": [0, 0, 3, 70, 390], "ratio": 2, "dims": (128, 64)}, "random"),
    (260, 4, {"edges": [0, 1, 64, 256], "dims": (64, 128), "raw": True}, "late_mma"),
]


@pytest.mark.emulator
@pytest.mark.parametrize(("length", "segments", "options", "policy"), SEGMENTS)
def test_segments(length, segments, options, policy):
    """Of sequences that are cut, some of which are shorter than the segments are many."""
    with tk.emulate(policy, seed=7, config={"segments": segments, "pairs": True}) as run:
        assert_gradients(operands(length, **options))
    assert len(run.kernels) == 1


def test_long_sequence_of_one_head(device):
    """On a GPU it is cut into segments."""
    assert_gradients(operands(4096 if device == "cuda" else 100, dims=(128, 64), device=device))


def test_packed_sequences_are_each_alone(device):
    """Bits of a sequence do not depend on what is beside it."""
    edges = [0, 70, 134]
    x = operands(134, edges=edges, ratio=2, device=device)
    found = gradients(x)
    for n in range(2):
        rows = slice(edges[n], edges[n + 1])
        alone = {
            name: y[:, :, rows] if name in ("q", "k", "v", "g", "beta", "grad_out") else y
            for name, y in x.items()
        }
        for name in ("initial_state", "grad_state"):
            alone[name] = x[name][n : n + 1]
        alone["cu_seqlens"] = None
        for name, y in gradients(alone).items():
            part = found[name][n : n + 1] if name == "initial_state" else found[name][:, :, rows]
            assert torch.equal(y, part), name


@pytest.mark.parametrize(
    ("keys", "beta", "double"),
    [("equal", 1.0, False), ("correlated", 1.0, False), ("correlated", 2.0, True)],
)
def test_repeated_keys(device, keys, beta, double):
    """The inverse of a chunk is bounded there, but powers of its matrix are not."""
    assert_gradients(operands(130, keys=keys, beta=beta, device=device))
    if double:
        options = {"beta_sigmoid": True, "allow_neg_eigval": True}
        assert_gradients(operands(130, keys=keys, device=device, **options))


@pytest.mark.parametrize("decay", [0.0, 1e-3, 8.0, 300.0])
def test_decays(device, decay):
    assert_gradients(operands(130, decay=decay, device=device))


def test_tokens_that_forget(device):
    """A decay of minus infinity: nothing before the token has a gradient behind it."""
    x = operands(130, device=device)
    x["g"][..., 100] = -torch.inf
    x["grad_out"][:, :, :100] = 0
    found = gradients(x)
    for name, y in found.items():
        assert bool(torch.isfinite(y).all()), name
    assert not found["initial_state"].any()
    for name in ("q", "k", "v", "beta"):
        assert not found[name][:, :, :100].any(), name
    finite = dict(x, g=x["g"].clamp(min=-200.0))
    for name, y in gradients(finite).items():
        # Of the sum within the chunk autograd of the reference leaves what is rounded.
        if name != "g" or runs_kernels(device):
            assert torch.equal(y, found[name]), name


def runs_kernels(device):
    return device == "cuda" or tk.emulation.active()


def test_layouts(device):
    x = operands(70, batch=2, ratio=2, dims=(64, 64), device=device)
    other = dict(x)
    for name in ("q", "k", "v", "g", "beta", "grad_out"):
        other[name] = x[name].transpose(1, 2).contiguous().transpose(1, 2)
    for name in ("initial_state", "grad_state"):
        other[name] = x[name].mT.contiguous().mT
    odd = dict(x)  # rows that TMA cannot read
    for name in ("q", "v", "grad_out"):
        odd[name] = torch.nn.functional.pad(x[name], (0, 1))[..., :-1]
    if not runs_kernels(device):
        assert_gradients(other)
        return
    expected = gradients(x)
    for changed in (other, odd):
        for name, y in gradients(changed).items():
            assert torch.equal(y, expected[name]), name


def test_expanded_gradient(device):
    """That of a sum, say."""
    x = operands(70, ratio=2, dims=(64, 64), device=device)
    x["grad_out"] = x["grad_out"][:, :, :1, :1].expand_as(x["grad_out"])
    assert_gradients(x)


@pytest.mark.parametrize("needed", range(8))
def test_some_gradients(device, needed):
    x = operands(70, raw=True, qk_l2norm=True, beta_sigmoid=True, device=device)
    everything = gradients(x)
    found = gradients(x, [i == needed for i in range(8)])
    assert list(found) == [NAMES[needed]]
    assert torch.equal(found[NAMES[needed]], everything[NAMES[needed]])


@pytest.mark.parametrize("policy", ["on_wait", "late_mma", "eager", "random"])
def test_policies(policy):
    x = operands(200, heads=2, ratio=2, dims=(64, 128), edges=[0, 70, 198], raw=True)
    with tk.emulate("on_wait"):
        expected = gradients(x)
    for pairs in (False, True):
        with tk.emulate(policy, seed=3, config={"pairs": pairs}):
            for name, y in gradients(x).items():
                assert torch.equal(y, expected[name]), name


@pytest.mark.parametrize(("dims", "dtype"), [((128, 128), BF16), ((128, 256), FP16)])
def test_reruns_are_equal(device, dims, dtype):
    """Many runs on a GPU: a tile that is filled too early shows in few of them."""
    x = operands(200, heads=2, ratio=2, dims=dims, dtype=dtype, raw=True, device=device)
    first = gradients(x)
    for _ in range(200 if device == "cuda" else 1):
        for name, y in gradients(x).items():
            assert torch.equal(y, first[name]), name


def test_states_of_bf16(device):
    x = operands(70, dims=(64, 128), device=device)
    for name in ("initial_state", "grad_state"):
        x[name] = x[name].to(BF16)
    assert_gradients(x)


def test_gates_of_bf16(device):
    x = operands(70, dims=(64, 128), device=device)
    x["g"], x["beta"] = x["g"].to(BF16), x["beta"].to(BF16)
    assert_gradients(x)


@pytest.mark.parametrize("shape", [(0, 1, 5), (1, 0, 5), (2, 1, 0)])
def test_nothing(device, shape):
    batch, heads, length = shape
    x = operands(length, batch=batch, heads=heads, dims=(64, 64), raw=True, device=device)
    found = gradients(x)
    for name, y in found.items():
        assert y.shape == x[name].shape
        if name != "initial_state":
            assert not y.any()
    assert torch.equal(found["initial_state"], x["grad_state"])


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("grad_out", lambda x: x[:, :, 1:]),
        ("grad_out", lambda x: x[..., :32]),
        ("grad_state", lambda x: x[:, :, :32]),
        ("grad_state", lambda x: x[0]),
        ("k", lambda x: x[..., :32]),
        ("g", lambda x: x[..., 1:]),
        ("beta", lambda x: x[:, :1]),
        ("initial_state", lambda x: x[:, :, :32]),
        ("A_log", lambda x: x[:1]),
    ],
)
def test_wrong_shapes(device, name, change):
    """The op itself is called: on a GPU its errors are PyTorch's, of the C++."""
    x = operands(20, heads=2, dims=(64, 64), raw=True, device=device)
    error = RuntimeError if device == "cuda" else ValueError
    with pytest.raises(error, match=f"{name} (has|must have) shape"):
        gradients({**x, name: change(x[name])})


@pytest.mark.parametrize("name", ["A_log", "initial_state", "g"])
def test_wrong_dtypes(device, name):
    x = operands(20, dims=(64, 64), raw=True, device=device)
    error = RuntimeError if device == "cuda" else TypeError
    with pytest.raises(error, match=f"{name} (is|must be .* got) torch.float64"):
        gradients({**x, name: x[name].double()})


def test_it_is_differentiated_once(device):
    x = operands(20, dims=(64, 64), device=device)
    tensors = [x[n].requires_grad_() for n in ("q", "k", "v", "g", "beta")]
    out = tk.gated_delta_rule(*tensors)
    (grad,) = torch.autograd.grad(out.sum(), tensors[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        grad.sum().backward()


def test_through_the_op(device):
    """The op that records gradients, and what flows into it: outputs and states, or one of them."""
    x = operands(70, dims=(64, 64), raw=True, device=device)
    names = [n for n in NAMES if x[n] is not None]
    leaves = {n: x[n].detach().requires_grad_() for n in names}
    out, state = tk.gated_delta_rule(**leaves, return_state=True)
    roots, grads = [out, state], [x["grad_out"], x["grad_state"]]
    for which, zero in (
        (slice(0, 2), None),
        (slice(0, 1), "grad_state"),
        (slice(1, 2), "grad_out"),
    ):
        found = torch.autograd.grad(
            roots[which], list(leaves.values()), grads[which], retain_graph=True
        )
        inflow = dict(x) if zero is None else dict(x, **{zero: torch.zeros_like(x[zero])})
        for name, y in zip(names, found, strict=True):
            assert torch.equal(y, gradients(inflow)[name]), name
