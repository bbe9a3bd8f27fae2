"""`tk.gated_delta_rule_decode`: values, states, slots and refusals."""

from __future__ import annotations

import math

import pytest
import torch

import thunderkittens as tk
from helpers.delta_rule import BF16, FP16, operands, some_state
from helpers.layouts import HEAD_LAYOUTS, heads, unaligned
from helpers.numerics import assert_accurate


def placed(state, layout):
    """States as they may lie in memory: in a pool of a cache, transposed, at any address."""
    if layout == "pool":
        pool = torch.full((state.shape[0], 3, *state.shape[1:]), math.nan, dtype=state.dtype)
        pool = pool.to(state.device)
        pool[:, 1] = state
        return pool[:, 1]
    if layout == "transposed":
        return state.mT.contiguous().mT
    if layout == "heads last":
        return state.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    return unaligned(state) if layout == "unaligned" else state.clone()


LAYOUTS = ["packed", "pool", "transposed", "heads last", "unaligned"]


def assert_step(out, state, tensors, before, **options):
    """The step is right: all of it is in float32, with one rounding of the output."""
    indices = options.get("state_indices")
    right_state, near_state = before.double(), before.clone()
    right = tk.reference.gated_delta_rule_decode(
        *(x.double() for x in tensors), right_state, **options
    )
    near = tk.reference.gated_delta_rule_decode(*tensors, near_state, **options)
    assert_accurate(out, right, near, slack=1e-5 * right.abs().mean())
    assert_accurate(state, right_state, near_state, slack=1e-6 * right_state.abs().max())
    if indices is not None:
        untouched = [i for i in range(state.shape[0]) if i not in indices.tolist()]
        assert torch.equal(state[untouched], before[untouched])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("state_dtype", [torch.float32, BF16])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_steps(device, dtype, state_dtype, v_first, layout):
    for length, dims in ((1, (128, 128)), (3, (64, 72)), (8, (96, 256))):
        tensors = operands((2, 2, 4, length, *dims), dtype, device)
        before = some_state((2, 4, *dims), device, v_first, state_dtype)
        state = placed(before, layout)
        out = tk.gated_delta_rule_decode(*tensors, state, state_v_first=v_first)
        assert_step(out, state, tensors, before, state_v_first=v_first)


def test_what_is_made_in_the_kernel(device):
    q, k, v, a, b = operands((2, 2, 4, 2, 64, 40), BF16, device)
    options = {
        "qk_l2norm": True,
        "A_log": torch.randn(4, device=device),
        "dt_bias": torch.randn(4, device=device),
        "beta_sigmoid": True,
        "allow_neg_eigval": True,
        "scale": 0.3,
    }
    tensors = (3 * q, 5 * k, v, a.to(BF16), b.to(BF16))
    before = some_state((2, 4, 64, 40), device)
    state = before.clone()
    out = tk.gated_delta_rule_decode(*tensors, state, **options)
    assert_step(out, state, tensors, before, **options)


@pytest.mark.parametrize("layout", HEAD_LAYOUTS)
def test_layouts(device, layout):
    q, k, v, g, beta = operands((2, 2, 4, 3, 64, 72), BF16, device)
    states = [torch.zeros(2, 4, 64, 72, device=device) for _ in range(2)]
    right = tk.gated_delta_rule_decode(q, k, v, g, beta, states[0])
    q, k, v = (heads(x, layout) for x in (q, k, v))
    assert torch.equal(tk.gated_delta_rule_decode(q, k, v, g, beta, states[1]), right)
    assert torch.equal(*states)


def test_slots(device):
    tensors = operands((4, 1, 2, 2, 64, 64), BF16, device)
    before = some_state((7, 2, 64, 64), device)
    state = before.clone()
    indices = torch.tensor([5, -1, 0, 6], dtype=torch.int32, device=device)
    out = tk.gated_delta_rule_decode(*tensors, state, state_indices=indices)
    assert_step(out, state, tensors, before, state_indices=indices)
    assert not out[1].any()


def test_a_sequence_token_by_token(device):
    tensors = operands((2, 1, 2, 70, 64, 64), BF16, device)
    out, end = tk.reference.gated_delta_rule(*(x.double() for x in tensors), return_state=True)
    state = torch.zeros(2, 2, 64, 64, device=device)
    steps = [
        tk.gated_delta_rule_decode(*(x[:, :, i : i + 5] for x in tensors), state)
        for i in range(0, 70, 5)
    ]
    assert float((torch.cat(steps, 2).double() - out).norm() / out.norm()) < 3e-3
    torch.testing.assert_close(state.double(), end, rtol=1e-4, atol=1e-5)


def test_no_sequences(device):
    state = torch.ones(0, 4, 64, 64, device=device)
    tensors = operands((0, 2, 4, 1, 64, 64), BF16, device)
    assert tk.gated_delta_rule_decode(*tensors, state).shape == (0, 4, 1, 64)


def test_integers_are_exact(device):
    """A key that was written reads its value; writing it again with beta 1 exchanges that."""
    k = torch.zeros(1, 1, 2, 64, dtype=BF16, device=device)
    k[..., 3] = 1
    v = torch.randint(-100, 100, (1, 1, 2, 72), device=device).to(BF16)
    numbers = torch.zeros(1, 1, 2, device=device)
    state = torch.full((1, 1, 64, 72), 7.0, device=device)
    out = tk.gated_delta_rule_decode(k, k, v, numbers, numbers + 1, state, scale=1.0)
    assert torch.equal(out, v)
    assert torch.equal(state[0, 0, 3], v[0, 0, 1].float())
    assert bool((state[0, 0, 4:] == 7).all())


Q, K = torch.zeros(2, 2, 3, 1, 64, dtype=BF16)
V = torch.zeros(2, 6, 1, 72, dtype=BF16)
G = torch.zeros(2, 6, 1)
S = torch.zeros(2, 6, 64, 72)
SLOTS = torch.tensor([0, 1], dtype=torch.int32)
MANY = [x.repeat(1, 1, 9, *(1,) * (x.dim() - 3)) for x in (Q, K, V, G, G)]
WRONG = {
    "no tensor": (([1], K, V, G, G, S), {}, TypeError, "q must be a torch.Tensor"),
    "float32": ((Q.float(), K.float(), V.float(), G, G, S), {}, TypeError, "torch.float32"),
    "mixed": ((Q, K.half(), V, G, G, S), {}, TypeError, "k is torch.float16"),
    "device": ((Q, K.to("meta"), V, G, G, S), {}, TypeError, "one device"),
    "3-D": ((Q[0], K[0], V[0], G, G, S), {}, ValueError, "4 dimensions"),
    "k": ((Q, K[:1], V, G, G, S), {}, ValueError, "k has shape"),
    "v": ((Q, K, V[:1], G, G, S), {}, ValueError, "v has shape"),
    "heads": ((Q, K, V[:, :4], G, G, S), {}, ValueError, "v has 4 heads"),
    "keys": ((Q[..., :60], K[..., :60], V, G, G, S), {}, ValueError, "q has 60 columns"),
    "columns": ((Q, K, V[..., :60], G, G, S), {}, ValueError, "v has 60 columns"),
    "g": ((Q, K, V, G[:, :3], G, S), {}, ValueError, "g has shape"),
    "g's dtype": ((Q, K, V, G.double(), G, S), {}, TypeError, "g is torch.float64"),
    "beta": ((Q, K, V, G, G[:1], S), {}, ValueError, "beta has shape"),
    "tokens": ((*MANY, S), {}, ValueError, "q has 9 tokens"),
    "no tokens": ((*(x[:, :, :0] for x in MANY), S), {}, ValueError, "q has 0 tokens"),
    "no state": ((Q, K, V, G, G, None), {}, TypeError, "state must be a dense tensor"),
    "state's dtype": ((Q, K, V, G, G, S.half()), {}, TypeError, "state is torch.float16"),
    "state's shape": ((Q, K, V, G, G, S[:1]), {}, ValueError, "state has shape"),
    "state's order": ((Q, K, V, G, G, S), {"state_v_first": True}, ValueError, "state has shape"),
    "slots": ((Q, K, V, G, G, S), {"state_indices": SLOTS.long()}, TypeError, "int32"),
    "slots' count": ((Q, K, V, G, G, S), {"state_indices": SLOTS[:1]}, ValueError,
                     "state_indices has shape"),
    "slots' device": ((Q, K, V, G, G, S), {"state_indices": SLOTS.to("meta")}, TypeError,
                      "state_indices is on meta"),
    "twice": ((Q, K, V, G, G, S), {"state_indices": SLOTS * 0}, ValueError, "different numbers"),
    "no slot": ((Q, K, V, G, G, S), {"state_indices": SLOTS + 1}, ValueError, "different numbers"),
    "expanded": ((Q, K, V, G, G, S[:1].expand_as(S)), {}, ValueError, "state"),
    "A_log": ((Q, K, V, G, G, S), {"A_log": torch.zeros(3)}, ValueError, "A_log has shape"),
    "dt_bias": ((Q, K, V, G, G, S), {"dt_bias": torch.zeros(6)}, ValueError, "without A_log"),
    "doubled": ((Q, K, V, G, G, S), {"allow_neg_eigval": True}, ValueError, "beta_sigmoid"),
    "gradient": ((Q, K, V, G.clone().requires_grad_(), G, S), {}, RuntimeError, "no gradient"),
}  # fmt: skip


@pytest.mark.parametrize(("args", "options", "error", "words"), WRONG.values(), ids=WRONG)
def test_wrong_calls(args, options, error, words):
    with pytest.raises(error, match=words):
        tk.gated_delta_rule_decode(*args, **options)


def test_transforms_are_refused():
    with pytest.raises(RuntimeError, match=r"torch\.func"):
        torch.func.vmap(lambda q: tk.gated_delta_rule_decode(q, K, V, G, G, S))(Q.unsqueeze(0))


# The kernels on the emulator, those for Hopper and the portable ones.

EMULATED = [
    ((2, 1, 2, 1, 128, 128), "packed"),
    ((1, 2, 4, 3, 64, 72), "pool"),
    ((2, 1, 1, 8, 96, 40), "transposed"),
    ((1, 1, 2, 2, 8, 136), "heads last"),
]


@pytest.mark.all_twins
@pytest.mark.emulator
@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("state_dtype", [torch.float32, BF16])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_emulated(dtype, state_dtype, v_first, portable):
    for shape, layout in EMULATED:
        q, k, v, g, beta = tensors = operands(shape, dtype)
        before = some_state((shape[0], shape[2], *shape[4:]), "cpu", v_first, state_dtype)
        state = placed(before, layout)
        q, k, v = heads(q, "bshd"), heads(k, "sliced"), heads(v, "bshd")
        with tk.emulate(portable=portable) as run:
            out = tk.gated_delta_rule_decode(q, k, v, g, beta, state, state_v_first=v_first)
        assert_step(out, state, tensors, before, state_v_first=v_first)
        inner = "keys" if v_first != (layout == "transposed") else "values"
        name = f"decode_{'bf16' if dtype == BF16 else 'fp16'}_"
        name += f"{'fp32' if state_dtype == torch.float32 else 'bf16'}_{inner}_inner"
        assert [x["kernel"] for x in run.kernels] == [name + "_portable" * portable]


@pytest.mark.emulator
@pytest.mark.parametrize("portable", [False, True])
def test_emulated_slots_and_gates(portable):
    q, k, v, a, b = operands((4, 1, 2, 2, 64, 40), BF16)
    tensors = (3 * q, 5 * k, v, a.to(BF16), b.to(BF16))
    before = some_state((6, 2, 64, 40))
    state = before.clone()
    options = {
        "state_indices": torch.tensor([5, -1, 0, 2], dtype=torch.int32),
        "qk_l2norm": True,
        "A_log": torch.randn(2),
        "beta_sigmoid": True,
    }
    with tk.emulate("random", portable=portable):
        out = tk.gated_delta_rule_decode(*tensors, state, **options)
    assert_step(out, state, tensors, before, **options)
