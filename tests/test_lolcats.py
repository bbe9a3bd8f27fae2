"""`tk.lolcats`: values, states and refusals, against the reference in float64."""

from __future__ import annotations

import math

import pytest
import torch

import thunderkittens as tk
from helpers.layouts import unaligned
from helpers.lolcats import assert_states_match, error, exact, operands, part, plain
from helpers.numerics import assert_accurate

BF16, FP16 = torch.bfloat16, torch.float16
LENGTHS = [1, 63, 64, 65, 127, 128, 129, 1000, 4096]
LIMIT = {BF16: 5e-3, FP16: 1e-3}


def sizes(device):
    """Those that a CPU takes in time."""
    return LENGTHS if device == "cuda" else LENGTHS[:-2]


def assert_lolcats(out, inputs):
    expected = tk.reference.lolcats(*(x.double() for x in inputs))
    assert_accurate(out, expected, plain(*inputs), slack=2e-3 * expected.abs().mean())


@pytest.mark.parametrize(("dim", "features"), [(128, 64), (64, 64), (128, 32), (64, 32)])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_values(device, dtype, dim, features):
    for length in sizes(device):
        inputs = operands(2, 4, 2, length, dim, features, dtype, device)
        assert_lolcats(tk.lolcats(*inputs), inputs)


@pytest.mark.parametrize("shape", [(1, 1, 1, 300), (1, 3, 3, 449), (5, 8, 1, 130)])
def test_shapes(device, shape):
    inputs = operands(*shape, 128, 64, BF16, device)
    assert_lolcats(tk.lolcats(*inputs), inputs)


def test_the_maximum_is_part_of_the_function(device):
    """A number added to all scores of a row changes its output: the linear part does not follow."""
    q, k, *rest = operands(1, 1, 1, 200, 64, 32, BF16, device)
    q[..., 0], k[..., 0] = 8, 8
    rest[1][:, 0], rest[2][:, 0] = 0, 0  # the features do not see it
    inputs = [q, k, *rest]
    assert_lolcats(tk.lolcats(*inputs), inputs)


def test_large_scores(device):
    q, k, *rest = operands(1, 2, 1, 150, 64, 64, BF16, device)
    inputs = [20 * q, 20 * k, *rest]
    assert_lolcats(tk.lolcats(*inputs), inputs)


def test_half_does_not_overflow(device):
    """Sums beyond what half can hold."""
    inputs = operands(1, 1, 1, 700, 64, 32, FP16, device)
    inputs[2] = (1000 * inputs[2]).abs() + 1000
    inputs[4] = 100 * inputs[4]
    out, expected = tk.lolcats(*inputs), tk.reference.lolcats(*(x.double() for x in inputs))
    assert error(out, expected) < LIMIT[FP16]


def test_layouts(device):
    """Operands are read where they are, or copied."""
    inputs = operands(2, 4, 2, 130, 128, 64, BF16, device)
    expected = tk.lolcats(*inputs)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs[:3]]
    assert torch.equal(tk.lolcats(*strided, *inputs[3:]), expected)
    odd = [torch.cat([x, x[..., :3]], -1)[..., : x.shape[-1]] for x in inputs[:5]]
    assert torch.equal(tk.lolcats(*odd, *inputs[5:]), expected)
    columns = [x.mT.contiguous().mT for x in inputs[:5]]
    assert torch.equal(tk.lolcats(*columns, *inputs[5:]), expected)


def test_heads_of_keys_are_shared(device):
    q, k, v, *rest = operands(1, 6, 2, 150, 64, 64, BF16, device)
    repeated = [x.repeat_interleave(3, 1) for x in (k, v)]
    assert torch.equal(tk.lolcats(q, k, v, *rest), tk.lolcats(q, *repeated, *rest))


def test_reruns_are_equal(device):
    inputs = operands(1, 2, 1, 520, 128, 64, BF16, device)
    first, state = tk.lolcats(*inputs, return_state=True)
    for _ in range(3):
        again, other = tk.lolcats(*inputs, return_state=True)
        assert torch.equal(first, again)
        assert all(torch.equal(x, y) for x, y in zip(state, other, strict=True))


@pytest.mark.parametrize("length", [1, 64, 127, 128, 130, 200, 256])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_final_state(device, dtype, length):
    inputs = operands(2, 2, 1, length, 64, 32, dtype, device)
    out, state = tk.lolcats(*inputs, return_state=True)
    assert isinstance(state, tk.LolcatsState)
    assert torch.equal(out, tk.lolcats(*inputs))
    assert_states_match(state, exact(inputs)[1])


@pytest.mark.parametrize("split", [1, 63, 64, 65, 100, 127, 128, 129, 192, 249])
def test_a_sequence_in_parts(device, split):
    inputs = operands(1, 4, 2, 250, 128, 64, BF16, device)
    whole, end = exact(inputs)
    first, state = tk.lolcats(*part(inputs, 0, split), return_state=True)
    second, state = tk.lolcats(*part(inputs, split), initial_state=state, return_state=True)
    assert error(torch.cat([first, second], 2), whole) < LIMIT[BF16]
    assert_states_match(state, end)


def test_many_parts(device):
    inputs = operands(1, 2, 2, 250, 64, 32, BF16, device)
    whole, end = exact(inputs)
    state, outs, at = None, [], 0
    for length in (3, 61, 1, 70, 40, 75):
        out, state = tk.lolcats(
            *part(inputs, at, at + length), initial_state=state, return_state=True
        )
        outs.append(out)
        at += length
    assert error(torch.cat(outs, 2), whole) < LIMIT[BF16]
    assert_states_match(state, end)


def test_state_at_any_address(device):
    """A state may be part of another tensor, and begin where no 16 bytes do."""
    inputs = operands(1, 2, 1, 200, 64, 32, BF16, device)
    _, state = tk.lolcats(*part(inputs, 0, 100), return_state=True)
    results = []
    for place in (torch.Tensor.clone, unaligned):
        before = tk.LolcatsState(*map(place, state[:4]), state.lengths)
        leaves = [x.detach().requires_grad_() for x in part(inputs, 100)]
        out, after = tk.lolcats(*leaves, initial_state=before, return_state=True)
        results.append([out, *after[:2], *torch.autograd.grad(out.sum(), leaves)])
    for x, y in zip(*results, strict=True):
        assert torch.equal(x, y)


def test_sequences_of_different_lengths(device):
    """A state whose sequences have different lengths goes on as each of them would alone."""
    lengths, more = [5, 64, 130, 201], 90
    inputs = operands(4, 2, 1, 201 + more, 64, 64, BF16, device)
    alone = []
    for b, length in enumerate(lengths):
        one = [x[b : b + 1] for x in inputs[:3]] + inputs[3:]
        alone.append((one, tk.lolcats(*part(one, 0, length), return_state=True)[1]))
    together = tk.LolcatsState(*(torch.cat(x) for x in zip(*(s for _, s in alone), strict=True)))
    tokens = [
        torch.cat([x[b : b + 1, :, n : n + more] for b, n in enumerate(lengths)])
        for x in inputs[:3]
    ]
    out, state = tk.lolcats(*tokens, *inputs[3:], initial_state=together, return_state=True)
    for b, (one, before) in enumerate(alone):
        expected, after = tk.lolcats(
            *part(one, lengths[b], lengths[b] + more), initial_state=before, return_state=True
        )
        assert error(out[b : b + 1], expected) < LIMIT[BF16]
        assert_states_match(tk.LolcatsState(*(x[b : b + 1] for x in state)), after)


def test_hedgehog(device):
    inputs = operands(2, 2, 1, 256, 128, 64, BF16, device)
    o, kv_state, k_state = tk.hedgehog(*inputs)
    assert torch.equal(o, tk.lolcats(*inputs))
    phi = tk.reference.lolcats_features(
        inputs[1].double().repeat_interleave(2, 1), inputs[4].double()
    )[:, :, :192]
    values = inputs[2].double().repeat_interleave(2, 1)[:, :, :192]
    assert error(kv_state, phi.mT @ values) < 4e-3
    assert k_state.shape == (2, 2, 1, 128)
    assert error(k_state, phi.sum(2, keepdim=True)) < 4e-3


@pytest.mark.parametrize("shape", [(0, 2, 1, 5), (2, 0, 0, 5), (2, 2, 1, 0)])
def test_nothing_to_compute(device, shape):
    inputs = operands(*shape, 64, 32, BF16, device)
    state = tk.reference.empty_state(*shape[:3], 64, 32, device=device)
    out, after = tk.lolcats(*inputs, initial_state=state, return_state=True)
    assert out.shape == inputs[0].shape
    if shape[3] == 0:
        assert all(torch.equal(x, y) for x, y in zip(state, after, strict=True))


def test_compiled(device):
    inputs = operands(1, 2, 1, 130, 64, 32, BF16, device)
    expected, state = tk.lolcats(*inputs, return_state=True)
    backend = "inductor" if device == "cuda" else "aot_eager"
    compiled = torch.compile(
        lambda *x: tk.lolcats(*x, return_state=True), fullgraph=True, backend=backend
    )
    out, other = compiled(*inputs)
    assert torch.equal(out, expected)
    assert all(torch.equal(x, y) for x, y in zip(state, other, strict=True))


def test_registration(device):
    inputs = operands(1, 2, 1, 70, 64, 32, BF16, device)
    state = tk.lolcats(*inputs, return_state=True)[1]
    tests = ("test_schema", "test_faketensor")
    op = torch.ops.thunderkittens.lolcats_forward.default
    torch.library.opcheck(op, (*inputs, *state, True), test_utils=tests)
    torch.library.opcheck(op, tuple(inputs), test_utils=tests)


def test_graph():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    inputs = operands(1, 2, 1, 1000, 128, 64, BF16, "cuda")
    tk.lolcats(*inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tk.lolcats(*inputs)
    inputs[0].normal_()
    graph.replay()
    assert torch.equal(out, tk.lolcats(*inputs))


OPERANDS = operands(1, 2, 1, 5, 64, 32)
STATE = tuple(tk.reference.empty_state(1, 2, 1, 64, 32))


def changed(index, x):
    return [*OPERANDS[:index], x, *OPERANDS[index + 1 :]]


def state_with(index, x):
    return {"initial_state": (*STATE[:index], x, *STATE[index + 1 :])}


WRONG = {
    "no tensor": (changed(0, [1]), {}, TypeError, "q must be a torch.Tensor"),
    "float32": ([x.float() for x in OPERANDS], {}, TypeError, "torch.float32"),
    "mixed": (changed(3, OPERANDS[3].half()), {}, TypeError, "q_map is torch.float16"),
    "device": (changed(1, OPERANDS[1].to("meta")), {}, TypeError, "one device"),
    "3-D": (changed(0, OPERANDS[0][0]), {}, ValueError, "4 dimensions"),
    "head dimension": ([x[..., :32] for x in OPERANDS[:3]] + OPERANDS[3:], {}, ValueError,
                       "head dimension 32"),
    "k's length": (changed(1, OPERANDS[1][:, :, :4]), {}, ValueError, "k has shape"),
    "heads": (operands(1, 3, 2, 5, 64, 32), {}, ValueError, "multiple"),
    "v": (changed(2, OPERANDS[2][:, :, :4]), {}, ValueError, "v has shape"),
    "q_map": (changed(3, OPERANDS[3][:1]), {}, ValueError, "q_map has shape"),
    "features": (changed(3, OPERANDS[3][..., :16]), {}, ValueError, "F 32 or 64"),
    "k_map": (changed(4, OPERANDS[4][..., :16]), {}, ValueError, "k_map has shape"),
    "alpha's dtype": (changed(5, OPERANDS[5].half()), {}, TypeError, "alpha is torch.float16"),
    "beta's shape": (changed(6, OPERANDS[6][:1]), {}, ValueError, "beta has shape"),
    "state": (OPERANDS, {"initial_state": STATE[0]}, TypeError, "must be a LolcatsState"),
    "state's parts": (OPERANDS, {"initial_state": STATE[:2]}, TypeError, "must be a LolcatsState"),
    "numerator": (OPERANDS, state_with(0, STATE[0].half()), TypeError, "numerator is"),
    "denominator": (OPERANDS, state_with(1, None), TypeError, "denominator must be"),
    "keys": (OPERANDS, state_with(2, STATE[2][:, :, :64]), ValueError, "keys has shape"),
    "lengths": (OPERANDS, state_with(4, STATE[4].long()), TypeError, "lengths is torch.int64"),
}  # fmt: skip


@pytest.mark.parametrize(("args", "options", "error", "words"), WRONG.values(), ids=WRONG)
def test_wrong_calls(args, options, error, words):
    with pytest.raises(error, match=words):
        tk.lolcats(*args, **options)


def test_features_add_up():
    phi = tk.reference.lolcats_features(torch.randn(1, 2, 9, 64), torch.randn(2, 64, 32))
    torch.testing.assert_close(phi.unflatten(-1, (2, 32)).sum(-1), torch.ones(1, 2, 9, 2))
    assert math.isclose(float(phi.sum()), 36, rel_tol=1e-5)


# The kernels on the emulator, those for Hopper and the portable ones.

EMULATED = [
    (1, 128, 64, 0, 1, "eager"),
    (64, 64, 32, 0, 1, "late_mma"),
    (200, 128, 64, 0, 1, "on_wait"),
    (260, 64, 64, 0, 3, "random"),
    (150, 128, 32, 100, 2, "on_wait"),
    (300, 128, 64, 90, 5, "on_wait"),
    (70, 64, 32, 20, 1, "random"),
    (130, 64, 64, 200, 1, "late_mma"),
    # Whole chunks, of which the last two stay in the caches.
    (128, 64, 32, 0, 1, "on_wait"),
    (192, 128, 64, 0, 1, "late_mma"),
    (128, 128, 64, 64, 1, "on_wait"),
    (64, 64, 64, 128, 1, "late_mma"),
    (192, 64, 32, 192, 2, "on_wait"),
    # Segments of ten chunks, so that every ring wraps twice.
    (1280, 64, 32, 0, 2, "late_mma"),
    # As many segments as are added without a scan.
    (230, 64, 32, 30, 4, "random"),
]


@pytest.mark.emulator
@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(("length", "dim", "features", "before", "segments", "policy"), EMULATED)
def test_emulated(portable, dtype, length, dim, features, before, segments, policy):
    lines = (2, 4, 2) if length <= 70 else (1, 2, 1)
    inputs = operands(*lines, before + length, dim, features, dtype)
    whole, end = exact(inputs)
    initial = None
    if before:
        _, initial = tk.reference.lolcats(*part(inputs, 0, before), return_state=True)
    with tk.emulate(policy, portable=portable, config={"segments": segments}) as run:
        out, state = tk.lolcats(*part(inputs, before), initial_state=initial, return_state=True)
    name = f"forward_{'bf16' if dtype == BF16 else 'fp16'}_d{dim}_f{features}"
    assert [x["kernel"] for x in run.kernels] == [name + "_portable" * portable]
    assert error(out, whole[:, :, before:]) < LIMIT[dtype]
    assert_states_match(state, end)


@pytest.mark.emulator
@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("segments", [1, 2])
def test_emulated_half_does_not_overflow(portable, segments):
    """Sums of many large values are scaled before they are rounded to be an operand."""
    inputs = operands(1, 2, 1, 330, 64, 32, FP16)
    inputs[2] = (2e4 + 100 * inputs[2].float()).to(FP16)
    whole, end = exact(inputs)
    assert end.numerator.amax() > torch.finfo(FP16).max
    with tk.emulate("random", portable=portable, config={"segments": segments}):
        out, _ = tk.lolcats(*inputs, return_state=True)
    assert error(out, whole) < LIMIT[FP16]


@pytest.mark.emulator
@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("segments", [1, 2])
def test_emulated_batch(portable, segments):
    """Every head of every sequence has its own keys, caches and state; lengths differ."""
    before, length = [70, 130], 60
    inputs = operands(2, 4, 2, max(before) + length, 64, 32)
    alone, states = [], []
    for b, n in enumerate(before):
        one = [x[b : b + 1] for x in inputs[:3]] + inputs[3:]
        alone.append(exact(part(one, 0, n + length)))
        states.append(tk.reference.lolcats(*part(one, 0, n), return_state=True)[1])
    together = tk.LolcatsState(*(torch.cat(x) for x in zip(*states, strict=True)))
    tokens = [
        torch.cat([x[b : b + 1, :, n : n + length] for b, n in enumerate(before)])
        for x in inputs[:3]
    ]
    with tk.emulate("late_mma", portable=portable, config={"segments": segments}):
        out, state = tk.lolcats(*tokens, *inputs[3:], initial_state=together, return_state=True)
    for b, (n, (whole, end)) in enumerate(zip(before, alone, strict=True)):
        assert error(out[b : b + 1], whole[:, :, n:]) < LIMIT[BF16]
        assert_states_match(tk.LolcatsState(*(x[b : b + 1] for x in state)), end)


@pytest.mark.emulator
@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("lengths", [(64, 64, 64, 64), (128, 64, 1, 63), (192, 128, 65), (1, 191)])
def test_emulated_parts(portable, lengths):
    """The state of one call is that of the next, at the ends of chunks and beside them."""
    inputs = operands(1, 2, 1, sum(lengths), 64, 32)
    whole, end = exact(inputs)
    state, outs, at = None, [], 0
    for number, length in enumerate(lengths):
        with tk.emulate(("on_wait", "late_mma")[number % 2], portable=portable):
            out, state = tk.lolcats(
                *part(inputs, at, at + length), initial_state=state, return_state=True
            )
        outs.append(out)
        at += length
    assert error(torch.cat(outs, 2), whole) < LIMIT[BF16]
    assert_states_match(state, end)


@pytest.mark.emulator
@pytest.mark.parametrize("portable", [False, True])
def test_emulated_rows(portable):
    """What the gradient is given of the rows."""
    inputs = operands(1, 2, 1, 140, 64, 32)
    _, rows, _ = tk.reference.lolcats_rows(*(x.double() for x in inputs))
    with tk.emulate(portable=portable):
        results = torch.ops.thunderkittens.lolcats(*inputs)
    torch.testing.assert_close(results[6].double(), rows.maxima, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(results[7].double(), rows.denominators, rtol=5e-3, atol=1e-4)
