"""`tk.ssd_decode`: values and states against the reference in float64, and against prefill."""

from __future__ import annotations

import math

import pytest
import torch

import thunderkittens as tk
from helpers.recurrent import assert_state_and_out, normal, ssd_call, wide

BF16, FP16 = torch.bfloat16, torch.float16


def step_call(batch, heads, tokens, dims, *, dtype=BF16, state_dtype=torch.float32, slots=None,
              device="cpu", **kinds):  # fmt: skip
    operands, options = ssd_call(
        (batch, heads, tokens), dims, dtype=dtype, device=device, state=False, **kinds
    )
    state = normal((slots or batch, heads, *dims), device=device).to(state_dtype)
    return operands, options, state


def assert_step(found, operands, state, before, options):
    """By the project's rule, against the formula with the same roundings of operands and state."""
    named = {name: wide(x) for name, x in options.items()}
    exact = before.double()
    expected = tk.reference.ssd_decode(*map(wide, operands), exact, **named)
    close = before.clone()
    rounded = tk.reference.ssd_decode(*operands, close, **options)
    assert_state_and_out((found, state), (expected, exact), (rounded, close))


@pytest.mark.parametrize("dims", [(64, 128), (64, 64), (72, 40), (256, 8)])
@pytest.mark.parametrize("tokens", [1, 3, 8])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_values(device, dtype, tokens, dims):
    for state_dtype in (torch.float32, dtype):
        operands, options, state = step_call(
            2, 4, tokens, dims, dtype=dtype, state_dtype=state_dtype, groups=2, skip="column",
            device=device,
        )  # fmt: skip
        before = state.clone()
        found = tk.ssd_decode(*operands, state, **options)
        assert_step(found, operands, state, before, options)


def slots_of(numbers, device):
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def test_slots(device):
    """Of a pool; sequences without a slot get zeros, and other slots stay as they are."""
    operands, options, state = step_call(4, 2, 2, (64, 64), slots=7, device=device)
    options["state_indices"] = slots_of([5, -1, 0, 3], device)
    before = state.clone()
    found = tk.ssd_decode(*operands, state, **options)
    assert_step(found, operands, state, before, options)
    assert bool((found[1] == 0).all())
    assert torch.equal(state[[1, 2, 4, 6]], before[[1, 2, 4, 6]])


def test_decoding_equals_prefill(device):
    operands, options = ssd_call((2, 3, 90), (64, 64), device=device, state=False)
    z = options.pop("z")
    whole, end = tk.ssd(*operands, **options, z=z, return_state=True)
    x, dt, A, B, C = operands

    def part(begin, stop):
        rows = slice(begin, stop)
        return [x[:, :, rows], dt[:, :, rows], A, B[:, :, rows], C[:, :, rows]]

    _, state = tk.ssd(*part(0, 70), **options, return_state=True)
    steps, begin = [], 70
    for count in (1, 8, 4, 1, 6):
        rows = slice(begin, begin + count)
        steps.append(tk.ssd_decode(*part(begin, begin + count), state, **options, z=z[:, :, rows]))
        begin += count
    for a, b in ((torch.cat(steps, 2), whole[:, :, 70:]), (state, end)):
        error = (a.double() - b.double()).square().mean().sqrt()
        assert float(error / b.double().square().mean().sqrt()) < 6e-3


@pytest.mark.parametrize("where", ["transposed", "sliced", "unaligned"])
def test_state_in_any_layout(device, where):
    """In place or copied there and back: the same bits."""
    operands, options, state = step_call(2, 4, 1, (64, 64), device=device)
    expected = state.clone()
    out = tk.ssd_decode(*operands, expected, **options)
    if where == "transposed":
        moved = state.mT.contiguous().mT
    elif where == "sliced":
        moved = torch.zeros(5, 4, 64, 80, device=device)[::2, :, :, 8:72][:2]
        moved.copy_(state)
    else:
        moved = torch.zeros(state.numel() + 1, device=device)[1:].view(state.shape)
        moved.copy_(state)
    found = tk.ssd_decode(*operands, moved, **options)
    torch.testing.assert_close(found, out, rtol=2**-7, atol=1e-2)
    torch.testing.assert_close(moved, expected)


def test_operands_in_any_layout(device):
    """A token of a model's (B, T, H, P)."""
    operands, options, state = step_call(2, 4, 2, (64, 64), groups=2, device=device)
    x, dt, A, B, C = operands
    moved = [y.transpose(1, 2).contiguous().transpose(1, 2) for y in (x, dt, B, C)]
    other = state.clone()
    expected = tk.ssd_decode(*operands, state, **options)
    found = tk.ssd_decode(moved[0], moved[1], A, *moved[2:], other, **options)
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-2)
    torch.testing.assert_close(other, state)


@pytest.mark.parametrize("shape", [(0, 2), (2, 0)])
def test_nothing_to_compute(device, shape):
    operands, options, state = step_call(
        *shape, 1, (64, 64), device=device, groups=min(1, shape[1])
    )
    assert tk.ssd_decode(*operands, state, **options).shape == operands[0].shape


def test_refusals(device):
    operands, options, state = step_call(2, 2, 1, (64, 64), device=device)
    with pytest.raises(ValueError, match="place of its own"):
        tk.ssd_decode(*operands, state[:1].expand_as(state), **options)
    with pytest.raises(RuntimeError, match="has no gradient"):
        tk.ssd_decode(operands[0].requires_grad_(), *operands[1:], state, **options)
    with pytest.raises(RuntimeError, match="transforms"):
        torch.func.vmap(lambda x: tk.ssd_decode(x, *operands[1:], state))(
            operands[0].detach()[None]
        )


X, DT, A = torch.zeros(2, 4, 1, 16, dtype=BF16), torch.zeros(2, 4, 1), torch.zeros(4)
B = torch.zeros(2, 2, 1, 8, dtype=BF16)
STATE = torch.zeros(2, 4, 16, 8)
INDICES = torch.zeros(2, dtype=torch.int32)
LONG = [y.expand(2, y.shape[1], 9, *y.shape[3:]) for y in (X, DT, B)]
ARGS = (X, DT, A, B, B, STATE)
WRONG = {
    "no tensor": ((1, DT, A, B, B, STATE), {}, TypeError, "x must be a torch.Tensor"),
    "float32": ((X.float(), DT, A, B.float(), B.float(), STATE), {}, TypeError, "torch.float32"),
    "mixed": ((X, DT, A, B.half(), B, STATE), {}, TypeError, "B is torch.float16"),
    "device": ((X, DT, A, B.to("meta"), B, STATE), {}, TypeError, "one device"),
    "dimensions": ((X[0], DT, A, B, B, STATE), {}, ValueError, "4 dimensions"),
    "batch": ((X, DT, A, B[:1], B[:1], STATE), {}, ValueError, "B has shape"),
    "C": ((X, DT, A, B, B[:, :1], STATE), {}, ValueError, "C has shape"),
    "heads": ((X[:, :3], DT[:, :3], A[:3], B, B, STATE), {}, ValueError, "multiple of B's"),
    "dt": ((X, DT[:1], A, B, B, STATE), {}, ValueError, "dt has shape"),
    "A": ((X, DT, A[:2], B, B, STATE), {}, ValueError, "A has shape"),
    "D": (ARGS, {"D": A[:1]}, ValueError, "D has shape"),
    "z": (ARGS, {"z": X[:1]}, ValueError, "z has shape"),
    "bias": (ARGS, {"dt_bias": A[:1]}, ValueError, "dt_bias has shape"),
    "softplus": (ARGS, {"dt_softplus": None}, TypeError, "dt_softplus must be a bool"),
    "limit": (ARGS, {"dt_limit": (2, 1)}, ValueError, "dt_limit is"),
    "limit nan": (ARGS, {"dt_limit": (math.nan, 1)}, ValueError, "dt_limit is"),
    "state": ((*ARGS[:5], None), {}, TypeError, "the state must be a dense tensor"),
    "state's dtype": ((*ARGS[:5], STATE.half()), {}, TypeError, "the state is torch.float16"),
    "state's shape": ((*ARGS[:5], STATE.mT), {}, ValueError, "the state has shape"),
    "state's slots": ((*ARGS[:5], STATE[:1]), {}, ValueError, "the state has shape"),
    "state's device": ((*ARGS[:5], STATE.to("meta")), {}, TypeError, "the state is on meta"),
    "indices": (ARGS, {"state_indices": INDICES[:1]}, ValueError, "state_indices has 1 elements"),
    "indices' dtype": (ARGS, {"state_indices": INDICES.long()}, TypeError, "torch.int64"),
    "indices' shape": (ARGS, {"state_indices": INDICES[None]}, ValueError, "contiguous vector"),
    "tokens": ((LONG[0], LONG[1], A, LONG[2], LONG[2], STATE), {}, ValueError, "9 tokens"),
}  # fmt: skip


@pytest.mark.parametrize(("args", "options", "error", "words"), WRONG.values(), ids=WRONG)
def test_wrong_calls(args, options, error, words):
    with pytest.raises(error, match=words):
        tk.ssd_decode(*args, **options)


# The kernels on the emulator: every instance with rows along the keys.


@pytest.mark.all_twins
@pytest.mark.emulator
@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("wide_state", [False, True])
@pytest.mark.parametrize(("dims", "tokens"), [((64, 128), 1), ((72, 40), 3), ((8, 104), 8)])
def test_emulated(dims, tokens, wide_state, dtype, portable):
    operands, options, state = step_call(
        3, 4, tokens, dims, dtype=dtype, slots=5, groups=2, skip="column",
        state_dtype=torch.float32 if wide_state else dtype,
    )  # fmt: skip
    options["state_indices"] = slots_of([4, -1, 1], "cpu")
    before = state.clone()
    with tk.emulate("random", portable=portable) as run:
        found = tk.ssd_decode(*operands, state, **options)
    name = f"decode_{'bf16' if dtype == BF16 else 'fp16'}_state{32 if wide_state else 16}"
    columns = 64 if dims[1] <= 64 else 128
    assert run.kernels[0]["kernel"] == f"{name}_keys{columns}" + "_portable" * portable
    assert_step(found, operands, state, before, options)


@pytest.mark.emulator
def test_emulated_slot_beyond_the_pool():
    """It counts as none: nothing is read or written outside the states."""
    operands, options, state = step_call(2, 2, 1, (64, 64), slots=3)
    options["state_indices"] = slots_of([3, 2], "cpu")
    before = state.clone()
    with tk.emulate():
        found = tk.ssd_decode(*operands, state, **options)
    assert bool((found[0] == 0).all())
    assert torch.equal(state[:2], before[:2])
    assert not torch.equal(state[2], before[2])


@pytest.mark.emulator
@pytest.mark.parametrize("where", ["transposed", "sliced", "unaligned"])
def test_emulated_state_in_any_layout(where):
    with tk.emulate():
        test_state_in_any_layout("cpu", where)
