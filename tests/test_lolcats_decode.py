"""`tk.lolcats_decode`: teacher-forced decoding is prefill; different lengths; refusals."""

from __future__ import annotations

import pytest
import torch

import thunderkittens as tk
from helpers.lolcats import assert_states_match, error, exact, operands, part

BF16, FP16 = torch.bfloat16, torch.float16
LIMIT = {BF16: 5e-3, FP16: 1e-3}


def decode(inputs, state, begin, end):
    outs = [tk.lolcats_decode(*part(inputs, i, i + 1), state) for i in range(begin, end)]
    return torch.cat(outs, 2)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(("dim", "features"), [(128, 64), (64, 32)])
def test_from_the_first_token(device, dtype, dim, features):
    length = 200 if device == "cuda" else 6
    inputs = operands(2, 4, 2, length, dim, features, dtype, device)
    expected, end = exact(inputs)
    state = tk.reference.empty_state(2, 4, 2, dim, features, dtype=dtype, device=device)
    assert error(decode(inputs, state, 0, length), expected) < LIMIT[dtype]
    assert_states_match(state, end)


@pytest.mark.parametrize("prompt", [1, 63, 64, 100, 128, 190])
def test_after_a_prompt(device, prompt):
    length = 200 if device == "cuda" else prompt + 5
    inputs = operands(1, 2, 1, length, 64, 64, BF16, device)
    expected, end = exact(inputs)
    _, state = tk.lolcats(*part(inputs, 0, prompt), return_state=True)
    out = decode(inputs, state, prompt, length)
    assert error(out, expected[:, :, prompt:]) < LIMIT[BF16]
    assert_states_match(state, end)


def mixed(device, lengths, dim=64, features=32, more=70):
    """Sequences of different lengths: operands of all tokens, and their states together."""
    inputs = operands(len(lengths), 2, 1, max(lengths) + more, dim, features, BF16, device)
    states = []
    for b, length in enumerate(lengths):
        one = [x[b : b + 1] for x in inputs[:3]] + inputs[3:]
        states.append(tk.reference.lolcats(*part(one, 0, length), return_state=True)[1])
    return inputs, tk.LolcatsState(*(torch.cat(x) for x in zip(*states, strict=True)))


def test_different_lengths(device):
    lengths, more = [1, 64, 126, 130], 70 if device == "cuda" else 4
    inputs, state = mixed(device, lengths, more=more)
    outs = []
    for i in range(more):
        tokens = [
            torch.cat([x[b : b + 1, :, n + i : n + i + 1] for b, n in enumerate(lengths)])
            for x in inputs[:3]
        ]
        outs.append(tk.lolcats_decode(*tokens, *inputs[3:], state))
    out = torch.cat(outs, 2)
    assert state.lengths.tolist() == [n + more for n in lengths]
    for b, n in enumerate(lengths):
        one = [x[b : b + 1, :, : n + more] for x in inputs[:3]] + inputs[3:]
        expected, end = exact(one)
        assert error(out[b : b + 1], expected[:, :, n:]) < LIMIT[BF16]
        assert_states_match(tk.LolcatsState(*(x[b : b + 1] for x in state)), end)


def test_prefill_goes_on(device):
    """Prefill, decode, prefill."""
    inputs = operands(1, 2, 1, 260, 64, 32, BF16, device)
    expected, end = exact(inputs)
    first, state = tk.lolcats(*part(inputs, 0, 130), return_state=True)
    second = decode(inputs, state, 130, 140)
    third, state = tk.lolcats(*part(inputs, 140), initial_state=state, return_state=True)
    assert error(torch.cat([first, second, third], 2), expected) < LIMIT[BF16]
    assert_states_match(state, end)


def test_registration(device):
    inputs = operands(2, 2, 1, 1, 64, 32, BF16, device)
    state = mixed(device, [127, 5])[1]
    op = torch.ops.thunderkittens.lolcats_decode.default
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(op, (*inputs, *state), test_utils=tests)


def test_compiled(device):
    inputs, state = mixed(device, [127, 5])
    one = part(inputs, 0, 1)
    other = tk.LolcatsState(*(x.clone() for x in state))
    expected = tk.lolcats_decode(*one, state)
    backend = "inductor" if device == "cuda" else "aot_eager"
    out = torch.compile(tk.lolcats_decode, fullgraph=True, backend=backend)(*one, other)
    assert torch.equal(out, expected)
    assert all(torch.equal(x, y) for x, y in zip(state, other, strict=True))


def test_graph():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    inputs, state = mixed("cuda", [127, 5])
    one = part(inputs, 0, 1)
    other = tk.LolcatsState(*(x.clone() for x in state))
    tk.lolcats_decode(*one, tk.LolcatsState(*(x.clone() for x in state)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tk.lolcats_decode(*one, other)
    for _ in range(3):
        graph.replay()
        assert torch.equal(out, tk.lolcats_decode(*one, state))
    assert all(torch.equal(x, y) for x, y in zip(state, other, strict=True))


def test_wrong_calls():
    inputs, state = mixed("cpu", [3, 5])
    one = part(inputs, 0, 1)
    with pytest.raises(ValueError, match="q has 2 tokens; it must have one"):
        tk.lolcats_decode(*part(inputs, 0, 2), state)
    with pytest.raises(TypeError, match="must be a LolcatsState"):
        tk.lolcats_decode(*one, state[:3])
    with pytest.raises(TypeError, match="must be a LolcatsState"):
        tk.lolcats_decode(*one, None)
    with pytest.raises(ValueError, match="must be contiguous"):
        tk.lolcats_decode(*one, state._replace(numerator=state.numerator.mT.contiguous().mT))
    with pytest.raises(RuntimeError, match="no gradient"):
        tk.lolcats_decode(one[0].requires_grad_(), *one[1:], state)


# The kernels on the emulator, those for Hopper and the portable ones.


@pytest.mark.all_twins
@pytest.mark.emulator
@pytest.mark.parametrize(("dim", "features"), [(128, 64), (64, 64), (128, 32), (64, 32)])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("portable", [False, True])
def test_emulated(portable, dtype, dim, features):
    """The steps around a block's end, at which sums are written."""
    inputs = operands(2, 2, 1, 195, dim, features, dtype)
    expected, end = exact(inputs)
    state = tk.lolcats(*part(inputs, 0, 190), return_state=True)[1]
    with tk.emulate(portable=portable) as run:
        out = decode(inputs, state, 190, 195)
    name = f"decode_{'bf16' if dtype == BF16 else 'fp16'}_d{dim}_f{features}"
    assert {x["kernel"] for x in run.kernels} == {name + "_portable" * portable}
    assert error(out, expected[:, :, 190:]) < LIMIT[dtype]
    assert_states_match(state, end)


@pytest.mark.emulator
@pytest.mark.parametrize("portable", [False, True])
def test_emulated_lengths(portable):
    inputs, state = mixed("cpu", [0, 1, 63, 127])
    expected_state = tk.LolcatsState(*(x.clone() for x in state))
    one = part(inputs, 0, 1)
    expected = tk.lolcats_decode(*one, expected_state)
    with tk.emulate("random", portable=portable):
        out = tk.lolcats_decode(*one, state)
    assert error(out, expected) < LIMIT[BF16]
    assert_states_match(state, expected_state)
