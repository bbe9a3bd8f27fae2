"""The portable kernels of `tk.ssd` and `tk.linear_attention` and of their gradients, on the
emulator: every instance under its policies, segments and splits, and which GPU gets them. Values,
options and layouts are those of the ops' suites, on the back end "portable"."""

from __future__ import annotations

import math

import pytest
import torch

import thunderkittens as tk
from helpers.recurrent import assert_ssd, normal, ssd_call, wide
from helpers.recurrent_gradient import assert_ssd_gradients, outside_of
from test_portable import GPUS, device
from thunderkittens import _C
from thunderkittens.emulation import POLICIES

pytestmark = pytest.mark.emulator
BF16, FP16 = torch.bfloat16, torch.float16
NAMES = {BF16: "bf16", FP16: "fp16"}

# Length, columns and keys, groups, segments.
FORWARD = [
    (130, (64, 128), 2, 1),
    (200, (72, 104), 1, 2),
    (270, (64, 64), 1, 5),
    (63, (40, 24), 4, 1),
]


def with_policies(cases):
    """Each with every policy; at the lowest intensity with one of them."""
    return [
        pytest.param(*case, policy, marks=pytest.mark.intensity(1 if i == j else 2))
        for i, case in enumerate(cases)
        for j, policy in enumerate(POLICIES)
    ]


def padded(keys: int) -> int:
    return 64 if keys <= 64 else 128


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(("length", "dims", "groups", "segments", "policy"), with_policies(FORWARD))
def test_forward(length, dims, groups, segments, dtype, policy):
    operands, options = ssd_call((1, 4, length), dims, groups=groups, dtype=dtype, skip="column")
    with tk.emulate(
        policy, seed=length, portable=True, config={"segments": segments}, replay=segments > 1
    ) as run:
        found = tk.ssd(*operands, **options, return_state=True)
    name = f"forward_{NAMES[dtype]}_keys{padded(dims[1])}_portable"
    assert [x["kernel"] for x in run.kernels] == [name]
    assert_ssd(found, operands, options)


@pytest.mark.parametrize("bounds", [[0, 0, 64, 65, 200, 200], [5, 100, 180]])
@pytest.mark.parametrize("keys", [64, 128])
def test_packed_sequences_in_segments(keys, bounds):
    """Where a sequence is shorter than there are segments, some have no tokens."""
    length = bounds[-1] + 3 * (bounds[0] > 0)
    operands, options = ssd_call((1, 4, length), (40, keys), groups=2, cu_seqlens=bounds)
    with tk.emulate("random", seed=keys, portable=True, config={"segments": 3}):
        found = tk.ssd(*operands, **options, return_state=True)
    assert_ssd(found, operands, options)
    assert bool((found[0][:, :, : bounds[0]] == 0).all())
    assert bool((found[0][:, :, bounds[-1] :] == 0).all())


@pytest.mark.parametrize("column", [0, 5, 63])
def test_a_state_beyond_half(column):
    """A column of the state that half cannot hold: a warp's part of the state is scaled."""
    operands, options = ssd_call((1, 1, 200), (64, 64), dtype=FP16, gate=False, skip="")
    operands[3] *= 2.0**-3
    operands[2] *= 0
    options["initial_state"][..., column] = 3e6
    options["initial_state"][..., :column] *= 1e-3
    operands[4][..., column] *= 2.0**-12
    with tk.emulate("late_mma", portable=True):
        found = tk.ssd(*operands, **options, return_state=True)
    expected = tk.reference.ssd(
        *map(wide, operands), **{k: wide(x) for k, x in options.items()}, return_state=True
    )
    for a, b in zip(found, expected, strict=True):
        error = (a.double() - b).square().mean().sqrt()
        assert float(error / b.square().mean().sqrt()) < 3e-3


def test_integers_are_exact():
    """Small integers without decay: every sum has the bits of the reference."""
    x, C = (torch.randint(-2, 3, (1, 2, 150, 64)).to(BF16) for _ in "xC")
    B = torch.randint(-1, 2, (1, 2, 150, 64)).to(BF16)
    dt, A = torch.ones(1, 2, 150), torch.zeros(2)
    x, C = x * (torch.rand(x.shape) < 0.1), C * (torch.rand(C.shape) < 0.1)
    with tk.emulate("random", portable=True):
        found = tk.ssd(x, dt, A, B, C, return_state=True)
    expected = tk.reference.ssd(*map(wide, (x, dt, A, B, C)), return_state=True)
    assert torch.equal(found[1].double(), expected[1])
    assert torch.equal(found[0], expected[0].to(BF16))


# Columns and keys, groups, segments, splits.
GRADIENT = [
    ((64, 128), 1, 1, 2),
    ((128, 64), 1, 3, 4),
    ((72, 120), 2, 2, 1),
    ((40, 64), 2, 1, 1),
]


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(
    ("dims", "groups", "segments", "splits", "policy"), with_policies(GRADIENT)
)
def test_gradient(dims, groups, segments, splits, dtype, policy):
    """Also with several steps of a block, of slices and of heads."""
    operands, options = ssd_call((1, 4, 140), dims, groups=groups, dtype=dtype, gate=False)
    outside = outside_of(operands, options, 0)
    leaves = [x.requires_grad_() for x in operands]
    with tk.emulate(policy, portable=True):
        results = tk.ssd(*leaves, **options, return_state=True)
    forced = {"segments": segments, "splits": splits}
    with tk.emulate(policy, seed=segments, portable=True, config=forced) as run:
        found = torch.autograd.grad(results, leaves, outside)
    name = f"chunks_{NAMES[dtype]}_keys{padded(dims[1])}_portable"
    assert run.kernels[-1]["kernel"] == name
    operands = [x.detach() for x in operands]
    assert_ssd_gradients(dict(enumerate(found)), operands, options, outside)


def test_nothing_that_is_not_a_number_goes_from_one_sequence_to_another():
    operands = [normal((1, 2, 150, 64), BF16) for _ in "qkv"]
    cu_seqlens = torch.tensor([0, 70, 150], dtype=torch.int32)
    decay = -torch.rand(2)

    def run():
        with tk.emulate("late_mma", portable=True, config={"segments": 2}):
            return tk.linear_attention(
                *operands, decay=decay, cu_seqlens=cu_seqlens, return_state=True
            )

    expected = run()
    for x in operands:
        x[:, :, 70:] = math.nan
    found = run()
    assert torch.equal(found[0][:, :, :70], expected[0][:, :, :70])
    assert torch.equal(found[1][0], expected[1][0])


PROBLEM = {"dtype": "bf16", "batch": 1, "groups": 1, "key_dim": 128, "value_dim": 64}


@pytest.mark.parametrize("name", GPUS)
@pytest.mark.parametrize("op", ["ssd", "ssd_backward"])
def test_choice(op, name):
    """Every GPU but Hopper's gets portable kernels, and as many segments as fill it."""
    gpu = device(name)
    few = _C.choose(op, PROBLEM | {"heads": 4, "length": 8192}, gpu)
    many = _C.choose(op, PROBLEM | {"heads": 1024, "length": 8192, "batch": 4}, gpu)
    assert few["segments"] > many["segments"] == 1
    assert few["portable"] == few["kernel"].endswith("_portable") == (name != "H100")


def test_what_the_kernels_need(monkeypatch):
    """Their shared memory fits GPUs of 99 KB; less than that is refused, with what is needed."""
    operands, options = ssd_call((1, 1, 10), (64, 64), gate=False)
    outside = outside_of(operands, options, 0)
    leaves = [x.requires_grad_() for x in operands]

    def bytes_of(op):
        sizes = (x["shared_bytes"] for x in _C.kernels() if x["op"] == op and x["arch"] == 80)
        return max(sizes)

    def refused(most):
        monkeypatch.setenv("THUNDERKITTENS_SHARED_BYTES", str(most - 1))
        words = f"need {most} bytes of shared memory per block, this GPU has {most - 1}"
        return pytest.raises((RuntimeError, ValueError), match=words)

    assert bytes_of("ssd") < bytes_of("ssd_backward") <= 99 << 10
    with tk.emulate(portable=True), refused(bytes_of("ssd")):
        tk.ssd(*leaves, **options)
    monkeypatch.setenv("THUNDERKITTENS_SHARED_BYTES", str(99 << 10))
    with tk.emulate(portable=True):
        results = tk.ssd(*leaves, **options, return_state=True)
    with tk.emulate(portable=True), refused(bytes_of("ssd_backward")):
        torch.autograd.grad(results, leaves, outside)
