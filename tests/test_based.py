"""`tk.based`: values, states, gradients and refusals, against the reference in float64."""

from __future__ import annotations

import math

import pytest
import torch

import thunderkittens as tk
from helpers.layouts import HEAD_LAYOUTS, heads, unaligned
from helpers.numerics import assert_accurate

BF16, FP16 = torch.bfloat16, torch.float16
LENGTHS = [1, 63, 64, 65, 127, 128, 129, 1000, 4096]


def normal(shape, dtype, device):
    return torch.randn(shape, device=device).to(dtype)


def operands(shape, columns, dtype, device):
    batch, count, length = shape
    return [normal((batch, count, length, d), dtype, device) for d in (16, 16, columns)]


def some_state(shape, columns, device):
    """That of 100 tokens."""
    _, k, v = operands((*shape[:2], 100), columns, BF16, device)
    phi = tk.reference.based_features(k.float())
    return tk.BasedState(phi.mT @ v.float(), phi.sum(2))


def wide(state):
    return None if state is None else tk.BasedState(*(x.double() for x in state))


def plain(q, k, v, *, normalize=False, initial_state=None):
    """The formula with operands of products rounded to the op's precision."""
    dtype = q.dtype
    scores = (q @ k.mT).float() / 4
    weights = (1 + scores + scores * scores / 2).tril()
    out, total = (weights.to(dtype) @ v).float(), weights.sum(-1)
    if initial_state is not None:
        phi = tk.reference.based_features(q.float())
        out = out + (phi.to(dtype) @ initial_state.numerator.to(dtype)).float()
        total = total + (phi * initial_state.denominator.unsqueeze(2)).sum(-1)
    if normalize:
        out = out / total.unsqueeze(-1)
    return out.to(dtype)


def assert_based(out, q, k, v, **options):
    expected = tk.reference.based(
        q.double(), k.double(), v.double(),
        **{**options, "initial_state": wide(options.get("initial_state"))},
    )  # fmt: skip
    assert_accurate(out, expected, plain(q, k, v, **options), slack=2e-3 * expected.abs().mean())


def sizes(device):
    """Those that a CPU takes in time."""
    return LENGTHS if device == "cuda" else LENGTHS[:-1]


@pytest.mark.parametrize("columns", [64, 112, 128])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_values(device, dtype, normalize, columns):
    for length in sizes(device):
        q, k, v = operands((2, 3, length), columns, dtype, device)
        out = tk.based(q, k, v, normalize=normalize)
        assert_based(out, q, k, v, normalize=normalize)


@pytest.mark.parametrize("columns", [8, 72, 256])
@pytest.mark.parametrize("shape", [(1, 1, 300), (1, 2, 2049), (9, 33, 65)])
def test_shapes(device, shape, columns):
    q, k, v = operands(shape, columns, BF16, device)
    assert_based(tk.based(q, k, v), q, k, v)


@pytest.mark.parametrize("layout", HEAD_LAYOUTS)
def test_layouts(device, layout):
    q, k, v = operands((2, 3, 130), 64, BF16, device)
    expected = tk.based(q, k, v, normalize=True)
    assert torch.equal(tk.based(*(heads(x, layout) for x in (q, k, v)), normalize=True), expected)


def test_expanded_operands(device):
    q, k, v = operands((2, 4, 70), 64, BF16, device)
    k = k[:, :1].expand_as(k)
    assert torch.equal(tk.based(q, k, v), tk.based(q, k.contiguous(), v))


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("length", [1, 65, 500])
def test_final_state(device, length, normalize):
    q, k, v = operands((2, 2, length), 72, BF16, device)
    initial = some_state((2, 2), 72, device)
    out, state = tk.based(q, k, v, normalize=normalize, initial_state=initial, return_state=True)
    assert isinstance(state, tk.BasedState)
    assert_based(out, q, k, v, normalize=normalize, initial_state=initial)
    phi = tk.reference.based_features(k.double())
    expected = phi.mT @ v.double() + initial.numerator
    error = (state.numerator - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert float(error) < 3e-3
    expected = phi.sum(2) + initial.denominator
    torch.testing.assert_close(state.denominator.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("split", [1, 64, 77, 199])
def test_a_sequence_in_parts(device, split, normalize):
    q, k, v = operands((1, 2, 200), 64, BF16, device)
    whole, end = tk.based(q, k, v, normalize=normalize, return_state=True)
    first, state = tk.based(
        *(x[:, :, :split] for x in (q, k, v)), normalize=normalize, return_state=True
    )
    second, state = tk.based(
        *(x[:, :, split:] for x in (q, k, v)),
        normalize=normalize,
        initial_state=state,
        return_state=True,
    )
    parts = torch.cat([first, second], 2)
    scale = whole.double().square().mean().sqrt()
    assert float((parts.double() - whole).square().mean().sqrt() / scale) < 6e-3
    scale = end.numerator.square().mean().sqrt()
    assert float((state.numerator - end.numerator).square().mean().sqrt() / scale) < 3e-3
    torch.testing.assert_close(state.denominator, end.denominator, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("length", [40, 900])
def test_state_at_any_address(device, length):
    """A state, and the gradient of one, may begin where no 16 bytes do."""
    tensors = operands((1, 2, length), 64, BF16, device)
    results = []
    state, grad = some_state((1, 2), 64, device), some_state((1, 2), 64, device)
    for place in (torch.Tensor.clone, unaligned):
        leaves = [x.detach().requires_grad_() for x in [*tensors, *map(place, state)]]
        _, after = tk.based(*leaves[:3], initial_state=tuple(leaves[3:]), return_state=True)
        results.append([*after, *torch.autograd.grad(after, leaves[1:], [*map(place, grad)])])
    for x, y in zip(*results, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("columns", [64, 128])
@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_gradients(device, dtype, states, columns, normalize):
    for length in (1, 64, 129, 1000):
        if length == 1 and normalize and not states:
            continue  # the gradients of q and k are 0
        inputs = operands((1, 2, length), columns, dtype, device)
        initial = some_state((1, 2), columns, device) if states else None
        tensors = [*inputs, *(initial or ())]
        found = gradients(tk.based, tensors, normalize, states)
        expected = gradients(tk.reference.based, [x.double() for x in tensors], normalize, states)
        for x, y in zip(found, expected, strict=True):
            error = (x.double() - y).square().mean().sqrt()
            assert float(error / y.square().mean().sqrt()) < (1e-2 if dtype == BF16 else 3e-3)


def gradients(function, tensors, normalize, states, wanted=None):
    """Of all tensors, or of those whose numbers are wanted."""
    wanted = range(len(tensors)) if wanted is None else wanted
    leaves = [x.detach().requires_grad_(i in wanted) for i, x in enumerate(tensors)]
    state = tk.BasedState(*leaves[3:]) if len(leaves) > 3 else None
    result = function(*leaves[:3], normalize=normalize, initial_state=state, return_state=states)
    outputs = [result[0], *result[1]] if states else [result]
    weights = [torch.cos(torch.arange(y.numel(), device=y.device)).view(y.shape) for y in outputs]
    loss = sum((y * w.to(y.dtype)).sum() for y, w in zip(outputs, weights, strict=True))
    return torch.autograd.grad(loss, [leaves[i] for i in wanted])


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), (3,)])
def test_some_gradients(device, wanted):
    tensors = [*operands((1, 2, 70), 64, BF16, device), *some_state((1, 2), 64, device)]
    everything = gradients(tk.based, tensors, True, True)
    for i, x in zip(wanted, gradients(tk.based, tensors, True, True, wanted), strict=True):
        assert torch.equal(x, everything[i])


def test_double_backward_is_refused(device):
    q, k, v = (x.requires_grad_() for x in operands((1, 1, 5), 64, BF16, device))
    (grad,) = torch.autograd.grad(tk.based(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        grad.sum().backward()


@pytest.mark.parametrize("shape", [(0, 2, 5), (2, 0, 5), (2, 2, 0)])
def test_nothing_to_compute(device, shape):
    q, k, v = (x.requires_grad_() for x in operands(shape, 64, BF16, device))
    initial = some_state((*shape[:2], 0), 64, device)
    out, state = tk.based(q, k, v, initial_state=initial, return_state=True)
    assert out.shape == v.shape
    assert torch.equal(state.numerator, initial.numerator)
    assert torch.equal(state.denominator, initial.denominator)
    out.sum().backward()
    assert q.grad.shape == q.shape


@pytest.mark.parametrize("normalize", [False, True])
def test_integers_are_exact(device, normalize):
    """One token at a time that counts: the values are small integers."""
    q = torch.zeros(1, 1, 150, 16, dtype=BF16, device=device)
    k = torch.zeros_like(q)
    v = torch.ones(1, 1, 150, 64, dtype=BF16, device=device)
    out = tk.based(q, k, v, normalize=normalize)
    count = torch.arange(1, 151, device=device).to(BF16).view(1, 1, -1, 1).expand_as(v)
    assert torch.equal(out, torch.ones_like(v) if normalize else count)


def test_features():
    q, k = torch.randn(2, 50, 16, dtype=torch.float64)
    phi = tk.reference.based_features
    s = (q * k).sum(-1) / 4
    torch.testing.assert_close((phi(q) * phi(k)).sum(-1), 1 + s + s * s / 2)
    assert phi(q).shape == (50, 153)


def test_linear_prefill(device):
    """The state in the order of the 273 features that ThunderKittens' kernel has."""
    q, k, v = operands((2, 3, 100), 64, BF16, device)
    out, state = tk.based_linear_prefill(q, k, v)
    assert torch.equal(out, tk.based(q, k, v, return_state=True)[0])
    x = k.double()
    features = torch.cat(
        [
            torch.ones_like(x[..., :1]),
            x / 2,
            (x.unsqueeze(4) * x.unsqueeze(3)).flatten(3) / (4 * math.sqrt(2)),
        ],
        3,
    )
    expected = features.mT @ v.double()
    assert state.shape == expected.shape == (2, 3, 273, 64)
    assert float((state - expected).norm() / expected.norm()) < 3e-3


Q, K, V = (torch.zeros(2, 3, 5, d, dtype=BF16) for d in (16, 16, 64))
STATE = (torch.zeros(2, 3, 153, 64), torch.zeros(2, 3, 153))
WRONG = {
    "no tensor": (([1], K, V), {}, TypeError, "q must be a torch.Tensor"),
    "k no tensor": ((Q, None, V), {}, TypeError, "k must be a torch.Tensor"),
    "float32": ((Q.float(), K.float(), V.float()), {}, TypeError, "torch.float32"),
    "mixed": ((Q, K.half(), V), {}, TypeError, "k is torch.float16"),
    "sparse": ((Q, K, V.to_sparse()), {}, TypeError, "dense"),
    "device": ((Q, K.to("meta"), V), {}, TypeError, "one device"),
    "3-D": ((Q[0], K[0], V[0]), {}, ValueError, "4 dimensions"),
    "elements": ((Q[..., :8], K[..., :8], V), {}, ValueError, "8 elements"),
    "k's length": ((Q, K[:, :, :4], V), {}, ValueError, "k has shape"),
    "k's elements": ((Q, V[..., :32], V), {}, ValueError, "k has shape"),
    "v's heads": ((Q, K, V[:, :2]), {}, ValueError, "v has shape"),
    "v's length": ((Q, K, V[:, :, :4]), {}, ValueError, "v has shape"),
    "v's batch": ((Q, K, V[:1]), {}, ValueError, "v has shape"),
    "columns": ((Q, K, V[..., :60]), {}, ValueError, "multiple of 8"),
    "many columns": ((Q, K, V.repeat(1, 1, 1, 5)), {}, ValueError, "320 columns"),
    "eps": ((Q, K, V), {"eps": -1.0}, ValueError, "eps is -1.0"),
    "eps nan": ((Q, K, V), {"eps": math.nan}, ValueError, "eps is nan"),
    "state": ((Q, K, V), {"initial_state": STATE[0]}, TypeError, "initial_state must be"),
    "one part": ((Q, K, V), {"initial_state": STATE[:1]}, TypeError, "initial_state must be"),
    "no denominator": ((Q, K, V), {"initial_state": (STATE[0], None)}, TypeError, "denominator"),
    "state's dtype": ((Q, K, V), {"initial_state": (STATE[0].half(), STATE[1])}, TypeError,
                      "numerator is torch.float16"),
    "state's shape": ((Q, K, V), {"initial_state": (STATE[0][..., :32], STATE[1])}, ValueError,
                      "numerator has shape"),
    "state's rows": ((Q, K, V), {"initial_state": (STATE[0], STATE[1][..., :17])}, ValueError,
                     "denominator has shape"),
}  # fmt: skip


@pytest.mark.parametrize(("args", "options", "error", "words"), WRONG.values(), ids=WRONG)
def test_wrong_calls(args, options, error, words):
    with pytest.raises(error, match=words):
        tk.based(*args, **options)


# The kernels on the emulator, those for Hopper and the portable ones.

EMULATED = [
    (64, 64, False, False, 1, "on_wait"),
    (130, 72, True, True, 1, "late_mma"),
    (200, 64, True, True, 3, "random"),
    (150, 128, False, False, 2, "on_wait"),
    (230, 72, True, True, 9, "random"),
    (1, 8, True, False, 1, "eager"),
]


@pytest.mark.all_twins
@pytest.mark.emulator
@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(
    ("length", "columns", "normalize", "states", "segments", "policy"), EMULATED
)
def test_emulated(portable, dtype, length, columns, normalize, states, segments, policy):
    lines = (2, 3) if length < 140 else (1, 2)
    inputs = operands((*lines, length), columns, dtype, "cpu")
    initial = some_state(lines, columns, "cpu") if states else None
    with tk.emulate(policy, portable=portable, config={"segments": segments}) as run:
        out, state = tk.based(
            *inputs, normalize=normalize, initial_state=initial, return_state=True
        )
    name = f"forward_{'bf16' if dtype == BF16 else 'fp16'}_denominator"
    assert [x["kernel"] for x in run.kernels] == [name + "_portable" * portable]
    assert_based(out, *inputs, normalize=normalize, initial_state=initial)
    expected = tk.reference.based(*inputs, initial_state=initial, return_state=True)[1]
    scale = expected.numerator.square().mean().sqrt()
    assert float((state.numerator - expected.numerator).square().mean().sqrt() / scale) < 3e-3
    torch.testing.assert_close(state.denominator, expected.denominator, rtol=1e-5, atol=1e-3)


@pytest.mark.all_twins
@pytest.mark.emulator
@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(
    ("length", "columns", "normalize", "states", "segments", "policy"), EMULATED
)
def test_emulated_gradients(portable, dtype, length, columns, normalize, states, segments, policy):
    lines = (2, 3) if length < 140 else (1, 2)
    inputs = operands((*lines, length), columns, dtype, "cpu")
    initial = some_state(lines, columns, "cpu") if states else None
    tensors = [*inputs, *(initial or ())]
    with tk.emulate(policy, portable=portable, config={"segments": segments}):
        found = gradients(tk.based, tensors, normalize, states)
    expected = gradients(tk.reference.based, [x.double() for x in tensors], normalize, states)
    for x, y in zip(found, expected, strict=True):
        error = (x.double() - y).square().mean().sqrt()
        if length > 1:
            assert float(error / y.square().mean().sqrt()) < (1e-2 if dtype == BF16 else 3e-3)


@pytest.mark.emulator
@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), (3,)])
@pytest.mark.parametrize(("columns", "segments"), [(64, 2), (128, 1)])
def test_emulated_some_gradients(portable, columns, segments, wanted):
    """The same bits, from those kernels alone that are needed."""
    tensors = [*operands((1, 2, 150), columns, BF16, "cpu"), *some_state((1, 2), columns, "cpu")]
    with tk.emulate("random", portable=portable, config={"segments": segments}):
        everything = gradients(tk.based, tensors, True, True)
        found = gradients(tk.based, tensors, True, True, wanted)
    for i, x in zip(wanted, found, strict=True):
        assert torch.equal(x, everything[i])


@pytest.mark.emulator
@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("column", [0, 2, 5, 63])
def test_emulated_column_of_large_values(portable, column):
    """Sums of one column far beyond the others, and beyond what half can hold: whichever thread has
    them, all are scaled by them."""
    inputs = operands((1, 1, 200), 64, FP16, "cpu")
    inputs[2] *= 2.0**-10
    inputs[2][..., column] = 30000
    with tk.emulate("late_mma", portable=portable, config={"segments": 1}):
        out = tk.based(*inputs, normalize=True)
    expected = tk.reference.based(*(x.double() for x in inputs), normalize=True)[..., column]
    torch.testing.assert_close(out[..., column].double(), expected, rtol=1e-2, atol=0)
