"""Gradients of `tk.ssd` and `tk.linear_attention`: of all inputs and of states, against float64
autograd of the references."""

from __future__ import annotations

import math

import pytest
import torch

import thunderkittens as tk
from helpers.cover import alternate
from helpers.layouts import HEAD_LAYOUTS, heads, spread
from helpers.recurrent import GROUPS_AND_SHAPES, normal, ssd_call
from helpers.recurrent_gradient import (
    assert_linear_gradients,
    assert_ssd_gradients,
    gradients,
    outside_of,
)
from thunderkittens import _C, emulation
from thunderkittens.reference._recurrent_backward import linear_attention_backward, ssd_backward

BF16, FP16 = torch.bfloat16, torch.float16
LENGTHS = [1, 15, 17, 63, 64, 65, 127, 129, 200]
POLICIES = ("on_wait", "late_mma", "eager", "random")


def linear_call(shape, dims, *, heads_of_q=1, dtype=BF16, device="cpu", cu_seqlens=None):
    (batch, count, length), (columns, keys) = shape, dims
    q, k = (normal((batch, heads_of_q, length, keys), dtype, device) for _ in "qk")
    v = normal((batch, count, length, columns), dtype, device)
    options = {
        "decay": -torch.rand(count, device=device) / 4,
        "g": -torch.rand(batch, count, length, device=device) / 4,
    }
    states = batch
    if cu_seqlens is not None:
        options["cu_seqlens"] = torch.tensor(cu_seqlens, dtype=torch.int32, device=device)
        states = len(cu_seqlens) - 1
    options["initial_state"] = normal((states, count, keys, columns), device=device)
    return [q, k, v], options


def ssd_gradients(operands, options, wanted=None):
    outside = outside_of(operands, options, 0)
    return gradients(tk.ssd, operands, options, outside, wanted), outside


def linear_gradients(operands, options, wanted=None):
    outside = outside_of(operands, options, 2, options.get("state_v_first", False))
    return gradients(tk.linear_attention, operands, options, outside, wanted), outside


def check_ssd(operands, options):
    found, outside = ssd_gradients(operands, options)
    assert_ssd_gradients(found, operands, options, outside)


def check_linear(operands, options):
    found, outside = linear_gradients(operands, options)
    assert_linear_gradients(found, operands, options, outside)


@pytest.mark.all_twins
@alternate(("dims", "dtype"), [(64, 128), (64, 64), (128, 64), (128, 128)], [BF16, FP16])
def test_ssd(device, dtype, dims):
    for length in LENGTHS:
        check_ssd(*ssd_call((1, 2, length), dims, dtype=dtype, device=device))


@alternate(("dims", "dtype"), [(64, 64), (128, 128)], [BF16, FP16])
def test_linear_attention(device, dtype, dims):
    for length in LENGTHS:
        check_linear(*linear_call((1, 1, length), dims, dtype=dtype, device=device))


@pytest.mark.parametrize(("groups", "dims"), GROUPS_AND_SHAPES)
def test_groups_and_shapes(device, groups, dims):
    check_ssd(*ssd_call((2, 4, 70), dims, groups=groups, device=device))
    check_linear(*linear_call((2, 4, 70), dims, heads_of_q=groups, device=device))


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("skip", ["", "head", "column"])
@pytest.mark.parametrize("state", [False, True])
def test_options(device, state, skip, gate):
    check_ssd(
        *ssd_call((1, 4, 100), (40, 64), groups=2, device=device, gate=gate, skip=skip, state=state)
    )


@pytest.mark.parametrize("softplus", [False, True])
@pytest.mark.parametrize("limit", [(0.0, math.inf), (0.01, 0.1)])
def test_step_sizes(device, limit, softplus):
    operands, options = ssd_call((1, 4, 100), (64, 64), device=device)
    options.update(dt_softplus=softplus, dt_limit=limit)
    if not softplus:
        operands[1] = operands[1].abs() / 8
        options["dt_bias"] = options["dt_bias"].abs() / 8
    check_ssd(operands, options)


@pytest.mark.parametrize("given", ["decay", "g", "state_v_first", "scale", "nothing"])
def test_options_of_linear_attention(device, given):
    operands, options = linear_call((1, 2, 90), (24, 64), device=device)
    initial = options.pop("initial_state")
    if given in options:
        options = {given: options[given]}
    elif given == "nothing":
        options = {}
    elif given == "scale":
        options |= {"scale": 0.7}
    else:
        options |= {"state_v_first": True, "initial_state": initial.mT.contiguous()}
    check_linear(operands, options)


def test_strong_decays(device):
    """Also a reset, a log decay of -inf, through which nothing flows."""
    operands, options = linear_call((1, 2, 150), (64, 64), device=device)
    options["g"][:, 0] = -100
    options["g"][:, 1, 70] = -math.inf
    found, outside = linear_gradients(operands, options, (0, 1, 2, "initial_state"))
    assert_linear_gradients(found, operands, options, outside)
    whole = linear_gradients(operands, options)[0]
    assert float(whole["g"][0, 1, 70]) == 0
    assert all(bool(x.isfinite().all()) for x in whole.values())


@pytest.mark.parametrize("dims", [(64, 128), (64, 64)])
def test_large_states_in_half(device, dims):
    """States, and gradients of states, that half has no numbers for, of gradients that it has."""
    operands, options = linear_call((1, 2, 150), dims, dtype=FP16, device=device)
    for x in operands[1:]:
        x *= 1e-3
    options["initial_state"] *= 1e5
    options["g"] /= 16
    outside = outside_of(operands, options, 2, False)
    outside = (outside[0] * 1e-3, outside[1] * 1e5)
    found = gradients(tk.linear_attention, operands, options, outside)
    assert_linear_gradients(found, operands, options, outside)


PACKED = [[0, 130], [0, 0, 64, 65, 200, 200], [5, 100, 180]]


@pytest.mark.parametrize("bounds", PACKED)
def test_packed_sequences(device, bounds):
    """Also tokens before the first sequence and behind the last, whose gradients are 0."""
    length = bounds[-1] + 3 * (bounds[0] > 0)
    shape, how = (1, 4, length), {"device": device, "cu_seqlens": bounds}
    operands, options = ssd_call(shape, (64, 128), groups=2, skip="column", **how)
    found, outside = ssd_gradients(operands, options)
    assert_ssd_gradients(found, operands, options, outside)
    for name in (0, 1, 3, 4):
        assert not bool(found[name][:, :, : bounds[0]].any())
        assert not bool(found[name][:, :, bounds[-1] :].any())
    check_linear(*linear_call(shape, (72, 40), heads_of_q=2, **how))


def test_a_sequence_does_not_see_its_neighbours(device):
    operands, options = linear_call((1, 2, 150), (64, 64), device=device, cu_seqlens=[0, 70, 150])
    outside = outside_of(operands, options, 2, False)
    expected = gradients(tk.linear_attention, operands, options, outside)
    for x in (*operands, outside[0]):
        x[:, :, 70:] = math.nan
    found = gradients(tk.linear_attention, operands, options, outside)
    for name in (0, 1, 2, "g"):
        assert torch.equal(found[name][:, :, :70], expected[name][:, :, :70])
    assert torch.equal(found["initial_state"][0], expected["initial_state"][0])


@pytest.mark.parametrize("layout", HEAD_LAYOUTS)
def test_layouts(device, layout):
    operands, options = ssd_call((2, 4, 70), (64, 64), groups=2, device=device)
    outside = outside_of(operands, options, 0)
    expected = gradients(tk.ssd, operands, options, outside)
    x, dt, A, B, C = operands
    moved = [heads(x, layout), spread(dt), spread(A), heads(B, layout), heads(C, layout)]
    changed = {**options, "z": heads(options["z"], layout)}
    changed["initial_state"] = options["initial_state"].mT.contiguous().mT
    given = (heads(outside[0], layout), outside[1].mT.contiguous().mT)
    exact = device == "cuda" or tk.emulation.active()  # plain PyTorch sums in another order
    for name, x in gradients(tk.ssd, moved, changed, given).items():
        bound = 0.0 if exact else 1e-3 if x.dtype == torch.float32 else 2e-2
        torch.testing.assert_close(x, expected[name], rtol=bound, atol=bound)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (3, 4), ("D", "z"), ("initial_state",)])
def test_some_gradients(device, wanted):
    operands, options = ssd_call((1, 2, 70), (64, 64), device=device)
    outside = outside_of(operands, options, 0)
    everything = gradients(tk.ssd, operands, options, outside)
    for name, x in gradients(tk.ssd, operands, options, outside, wanted).items():
        assert torch.equal(x, everything[name])


def test_numbers_in_the_dtype_of_x(device):
    operands, options = ssd_call((2, 4, 70), (64, 64), device=device)
    options |= {name: options[name].to(BF16) for name in ("D", "dt_bias")}
    operands[1:3] = [x.to(BF16) for x in operands[1:3]]
    found = ssd_gradients(operands, options)[0]
    assert {found[name].dtype for name in (0, 1, 2, 3, 4, "D", "z", "dt_bias")} == {BF16}
    assert all(bool(x.isfinite().all()) for x in found.values())


def test_reruns_have_the_same_bits(device):
    operands, options = ssd_call((1, 4, 150), (64, 64), groups=2, device=device)
    outside = outside_of(operands, options, 0)
    first = gradients(tk.ssd, operands, options, outside)
    for name, x in gradients(tk.ssd, operands, options, outside).items():
        assert torch.equal(x, first[name])


@pytest.mark.parametrize("shape", [(0, 2, 5), (2, 2, 0)])
def test_nothing_to_compute(device, shape):
    operands, options = linear_call(shape, (64, 64), device=device)
    found, outside = linear_gradients(operands, options)
    assert torch.equal(found["initial_state"], outside[1])
    assert all(found[i].shape == operands[i].shape for i in range(3))


@pytest.mark.parametrize("op", ["ssd", "linear_attention"])
def test_double_backward_is_refused(device, op):
    if op == "ssd":
        operands, options = ssd_call((1, 1, 5), (64, 64), device=device)
    else:
        operands, options = linear_call((1, 1, 5), (64, 64), device=device)
    x = operands[0].requires_grad_()
    out = getattr(tk, op)(*operands, **options)
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        grad.sum().backward()


def test_references():
    """The references' gradients are those of autograd."""
    wide = {"dtype": torch.float64}
    operands, options = ssd_call((2, 4, 130), (8, 16), groups=2, skip="column", **wide)
    operands = [x.double() for x in operands]
    options = {n: x.double() if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    operands[2][0] = -2000  # log decays at the bound
    outside = [x.double() for x in outside_of(operands, options, 0)]
    expected = gradients(tk.reference.ssd, operands, options, outside)
    found = ssd_backward(*outside, *operands, **options)
    names = (0, 1, 2, 3, 4, "D", "z", "dt_bias", "initial_state")
    for name, x in zip(names, found, strict=True):
        torch.testing.assert_close(x, expected[name], rtol=1e-9, atol=1e-9)
    operands, options = linear_call((1, 2, 150), (8, 16), cu_seqlens=[2, 70, 140], **wide)
    options |= {"decay": options["decay"].double(), "g": options["g"].double()}
    options["initial_state"] = options["initial_state"].double()
    outside = [x.double() for x in outside_of(operands, options, 2, False)]
    expected = gradients(tk.reference.linear_attention, operands, options, outside)
    found = linear_attention_backward(*outside, *operands, **options)
    for name, x in zip((0, 1, 2, "decay", "g", "initial_state"), found, strict=True):
        torch.testing.assert_close(x, expected[name], rtol=1e-9, atol=1e-9)


def test_choice():
    """Few heads are cut along the sequence, and few chunks by heads; many of both are not."""
    device = _C.DeviceProperties(
        sm_count=132, shared_bytes_per_block=232448, l2_bytes=50 << 20, major=9, minor=0
    )

    def choice(batch, heads, groups, length, **more):
        problem = {"dtype": "bf16", "batch": batch, "heads": heads, "groups": groups} | more
        return _C.choose("ssd_backward", problem | {"length": length}, device)

    assert choice(1, 2, 2, 8192)["segments"] > 8
    assert choice(1, 1, 1, 64)["segments"] == 1
    assert choice(16, 80, 1, 4096)["segments"] == 1
    assert 1 < choice(1, 80, 1, 1024)["splits"] <= 80
    assert choice(1, 128, 1, 65536)["splits"] == 1
    assert choice(1, 16, 16, 128)["splits"] == 1  # of one head
    assert choice(1, 4, 4, 64, key_dim=40)["key_dim"] == 64
    assert choice(1, 4, 4, 64, key_dim=72)["key_dim"] == 128
    assert choice(1, 2, 2, 8192, sequences=128)["segments"] == 1


@pytest.mark.emulator
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("keys", [64, 128])
@pytest.mark.parametrize(("segments", "splits"), [(1, 2), (2, 1), (3, 4)])
def test_emulated_segments_and_splits(dtype, keys, segments, splits):
    policy = POLICIES[(segments + splits + keys // 64) % 4]
    operands, options = ssd_call((1, 4, 200), (64, keys), dtype=dtype, gate=False)
    outside = outside_of(operands, options, 0)
    with tk.emulate(policy):
        leaves = [x.requires_grad_() for x in operands]
        results = tk.ssd(*leaves, **options, return_state=True)
    with tk.emulate(policy, sm_count=3, config={"segments": segments, "splits": splits}) as run:
        found = torch.autograd.grad(results, leaves, outside)
    assert run.kernels[-1]["kernel"].startswith("chunks_")
    operands = [x.detach() for x in operands]
    assert_ssd_gradients(dict(enumerate(found)), operands, options, outside)


@pytest.mark.emulator
@pytest.mark.parametrize("needed", [False, True])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("op", ["ssd", "linear_attention"])
def test_emulated_results_are_those_of_the_fake(monkeypatch, op, given, needed):
    """Also of operands that are absent, and of those that want no gradient: what PyTorch's opcheck
    compares on a GPU. On a CPU results are copied into what the fake makes."""
    if op == "ssd":
        operands, options = ssd_call((1, 2, 5), (64, 64))
        names, rest = ("x", "dt", "A", "B", "C"), (None, False, 0.0, None)
        optional = ("D", "z", "dt_bias", "initial_state")
    else:
        operands, options = linear_call((1, 2, 5), (64, 64))
        names, rest = ("q", "k", "v"), (None, None, False)
        optional = ("decay", "g", "initial_state")
    arguments = (*operands, *(options[x] if given else None for x in optional))
    grad_out = torch.zeros_like(operands[names.index("x" if op == "ssd" else "v")])
    found, run = {}, emulation.run

    def recorded(*args, **kwargs):
        found.update(run(*args, **kwargs))
        return found

    monkeypatch.setattr(emulation, "run", recorded)
    backward = getattr(torch.ops.thunderkittens, f"{op}_backward")
    with tk.emulate():
        expected = backward(grad_out, None, *arguments, *rest, [needed] * len(arguments))
    for name, of_fake in zip((*names, *optional), expected, strict=True):
        of_kernel = found[f"grad_{name}"]
        assert (of_kernel.dtype, of_kernel.shape) == (of_fake.dtype, of_fake.shape), name


@pytest.mark.emulator
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dims", [(64, 128), (128, 64)])
def test_emulated_policies(policy, dims):
    """Blocks that go over several tiles, with their rings around more than once."""
    operands, options = ssd_call((1, 4, 140), dims, groups=2)
    with tk.emulate(policy, seed=3, sm_count=1):
        check_ssd(operands, options)
