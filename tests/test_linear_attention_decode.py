"""`tk.linear_attention_decode`: values and states against the reference in float64, and against
prefill."""

from __future__ import annotations

import pytest
import torch

import thunderkittens as tk
from helpers.recurrent import assert_state_and_out, normal, wide

BF16, FP16 = torch.bfloat16, torch.float16


def step_call(shape, dims, *, key_heads=1, dtype=BF16, state_dtype=torch.float32, v_first=False,
              slots=None, device="cpu"):  # fmt: skip
    (batch, heads, tokens), (keys, columns) = shape, dims
    q, k = (normal((batch, key_heads, tokens, keys), dtype, device) for _ in "qk")
    v = normal((batch, heads, tokens, columns), dtype, device)
    options = {
        "decay": -torch.rand(heads, device=device),
        "g": -torch.rand(batch, heads, tokens, device=device),
        "state_v_first": v_first,
    }
    order = (columns, keys) if v_first else (keys, columns)
    state = normal((slots or batch, heads, *order), device=device).to(state_dtype)
    return [q, k, v], options, state


def assert_step(found, operands, state, before, options):
    """By the project's rule, against the formula with the same roundings of operands and state."""
    exact, close = before.double(), before.clone()
    named = {name: wide(x) for name, x in options.items()}
    expected = tk.reference.linear_attention_decode(*map(wide, operands), exact, **named)
    rounded = tk.reference.linear_attention_decode(*operands, close, **options)
    assert_state_and_out((found, state), (expected, exact), (rounded, close))


@pytest.mark.parametrize("dims", [(128, 128), (64, 64), (40, 72), (8, 256)])
@pytest.mark.parametrize("tokens", [1, 3, 8])
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_values(device, dtype, v_first, tokens, dims):
    for state_dtype in (torch.float32, dtype):
        operands, options, state = step_call(
            (2, 4, tokens), dims, key_heads=2, dtype=dtype, state_dtype=state_dtype,
            v_first=v_first, device=device,
        )  # fmt: skip
        before = state.clone()
        found = tk.linear_attention_decode(*operands, state, **options)
        assert_step(found, operands, state, before, options)


@pytest.mark.parametrize("gates", [(), ("decay",), ("g",)])
@pytest.mark.parametrize("scale", [None, 1.0, -2.0])
def test_gates_and_scale(device, scale, gates):
    operands, options, state = step_call((2, 2, 2), (64, 40), device=device)
    options = {name: options[name] for name in gates}
    options["scale"] = scale
    before = state.clone()
    found = tk.linear_attention_decode(*operands, state, **options)
    assert_step(found, operands, state, before, options)


def test_slots(device):
    operands, options, state = step_call((3, 2, 1), (64, 40), slots=6, device=device)
    options["state_indices"] = torch.tensor([2, -1, 5], dtype=torch.int32, device=device)
    before = state.clone()
    found = tk.linear_attention_decode(*operands, state, **options)
    assert_step(found, operands, state, before, options)
    assert torch.equal(state[[0, 1, 3, 4]], before[[0, 1, 3, 4]])


@pytest.mark.parametrize("v_first", [False, True])
def test_decoding_equals_prefill(device, v_first):
    q, k = (normal((2, 2, 90, 64), BF16, device) for _ in "qk")
    v, g = normal((2, 4, 90, 40), BF16, device), -torch.rand(2, 4, 90, device=device) / 8
    options = {"state_v_first": v_first}
    whole, end = tk.linear_attention(q, k, v, g=g, **options, return_state=True)
    first = slice(0, 80)
    _, state = tk.linear_attention(
        *(x[:, :, first] for x in (q, k, v)), g=g[:, :, first], **options, return_state=True
    )
    steps = []
    for begin in range(80, 90, 5):
        part = [x[:, :, begin : begin + 5] for x in (q, k, v, g)]
        steps.append(tk.linear_attention_decode(*part[:3], state, g=part[3], **options))
    for a, b in ((torch.cat(steps, 2), whole[:, :, 80:]), (state, end)):
        error = (a.double() - b.double()).square().mean().sqrt()
        assert float(error / b.double().square().mean().sqrt()) < 6e-3


def test_nothing_to_compute(device):
    operands, options, state = step_call((0, 2, 1), (64, 40), device=device)
    assert tk.linear_attention_decode(*operands, state, **options).shape == (0, 2, 1, 40)


def test_refusals(device):
    (q, k, v), options, state = step_call((2, 2, 1), (64, 40), device=device)
    with pytest.raises(RuntimeError, match="has no gradient"):
        tk.linear_attention_decode(q, k, v, state.requires_grad_(), **options)
    state = state.detach()
    with pytest.raises(ValueError, match="overlaps"):
        tk.linear_attention_decode(q, k, v, state, **{**options, "decay": state[0, 0, 0, :2]})


def test_operands_between_the_rows_of_a_state(device):
    """Their addresses meet, but no element is shared."""
    (q, k, v), options, state = step_call((2, 2, 1), (64, 40), device=device)
    memory = torch.zeros(*state.shape[:3], 44, device=device)
    among, gate = memory[..., :40], memory[:, :, :1, 42]
    among.copy_(state)
    gate.fill_(-0.25)
    out = tk.linear_attention_decode(q, k, v, among, **{**options, "g": gate})
    expected = tk.linear_attention_decode(q, k, v, state, **{**options, "g": gate.clone()})
    assert torch.equal(out, expected)
    assert torch.equal(among, state)
    assert torch.equal(gate, torch.full_like(gate, -0.25))


Q, V = torch.zeros(2, 2, 1, 8, dtype=BF16), torch.zeros(2, 4, 1, 16, dtype=BF16)
STATE, INDICES = torch.zeros(2, 4, 8, 16), torch.zeros(2, dtype=torch.int32)
ARGS = (Q, Q, V, STATE)
WRONG = {
    "no tensor": ((1, Q, V, STATE), {}, TypeError, "q must be a torch.Tensor"),
    "float32": ((Q.float(), Q.float(), V.float(), STATE), {}, TypeError, "torch.float32"),
    "mixed": ((Q, Q, V.half(), STATE), {}, TypeError, "v is torch.float16"),
    "sparse": ((Q, Q.to_sparse(), V, STATE), {}, TypeError, "dense"),
    "device": ((Q, Q, V.to("meta"), STATE), {}, TypeError, "one device"),
    "dimensions": ((Q[0], Q[0], V, STATE), {}, ValueError, "4 dimensions"),
    "k": ((Q, Q[..., :4], V, STATE), {}, ValueError, "k has shape"),
    "batch": ((Q[:1], Q[:1], V, STATE), {}, ValueError, "v has shape"),
    "tokens": ((Q, Q, V.expand(2, 4, 2, 16), STATE), {}, ValueError, "v has shape"),
    "heads": ((Q, Q, V[:, :3], STATE), {}, ValueError, "multiple of q's"),
    "columns": ((Q, Q, V[..., :12], STATE), {}, ValueError, "12 columns"),
    "keys": ((Q[..., :4], Q[..., :4], V, STATE), {}, ValueError, "4 columns"),
    "decay": (ARGS, {"decay": torch.zeros(3)}, ValueError, "decay has shape"),
    "decay's dtype": (ARGS, {"decay": torch.zeros(4).half()}, TypeError, "decay is"),
    "g": (ARGS, {"g": torch.zeros(2, 4, 2)}, ValueError, "g has shape"),
    "scale": (ARGS, {"scale": float("inf")}, ValueError, "scale is inf"),
    "order": (ARGS, {"state_v_first": True}, ValueError, "the state has shape"),
    "order's type": (ARGS, {"state_v_first": 1}, TypeError, "state_v_first must be a bool"),
    "state": ((*ARGS[:3], [1]), {}, TypeError, "the state must be a dense tensor"),
    "state's dtype": ((*ARGS[:3], STATE.half()), {}, TypeError, "the state is torch.float16"),
    "state's slots": ((*ARGS[:3], STATE[:1]), {}, ValueError, "the state has shape"),
    "indices": (ARGS, {"state_indices": INDICES[:1]}, ValueError, "state_indices has 1 elements"),
    "indices' dtype": (ARGS, {"state_indices": INDICES.long()}, TypeError, "torch.int64"),
    "no tokens": ((Q[:, :, :0], Q[:, :, :0], V[:, :, :0], STATE), {}, ValueError, "0 tokens"),
}  # fmt: skip


@pytest.mark.parametrize(("args", "options", "error", "words"), WRONG.values(), ids=WRONG)
def test_wrong_calls(args, options, error, words):
    with pytest.raises(error, match=words):
        tk.linear_attention_decode(*args, **options)


# The kernels on the emulator: every instance with rows along the values.


@pytest.mark.all_twins
@pytest.mark.emulator
@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("wide_state", [False, True])
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize(("dims", "tokens"), [((128, 128), 1), ((40, 72), 3)])
def test_emulated(dims, tokens, v_first, wide_state, dtype, portable):
    operands, options, state = step_call(
        (2, 4, tokens), dims, key_heads=2, dtype=dtype, v_first=v_first,
        state_dtype=torch.float32 if wide_state else dtype,
    )  # fmt: skip
    before = state.clone()
    with tk.emulate("random", portable=portable):
        found = tk.linear_attention_decode(*operands, state, **options)
    assert_step(found, operands, state, before, options)
