"""The op behind the gradient of `tk.gemm` with a gate: values, layouts, wrong calls."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import thunderkittens as tk
from helpers.cover import cover, over
from helpers.guard import assert_guards_intact
from helpers.numerics import assert_accurate, integers
from thunderkittens.reference.gemm import activate

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NUMBERS = {"geglu": 2, "swiglu": 4}
GATES = {"blocked": 1, "interleaved": 2}


def through_gate(grad, z, activation, gate_layout):
    return torch.ops.thunderkittens.gemm_backward(grad, z, NUMBERS[activation], GATES[gate_layout])


def by_autograd(grad, z, activation, gate_layout, dtype):
    z = z.to(dtype, copy=True).requires_grad_()
    out = activate(z, activation, gate_layout)
    return torch.autograd.grad(out, z, grad.to(dtype))[0]


def placed(shape, layout, dtype, device):
    """Normal values; NaN around those of a slice."""
    if layout == "packed":
        return torch.randn(shape, device=device).to(dtype)
    if layout == "transposed":
        return torch.randn((*shape[:-2], shape[-1], shape[-2]), device=device).to(dtype).mT
    if layout == "expanded":
        return torch.randn((*shape[:-2], 1, shape[-1]), device=device).to(dtype).expand(shape)
    offset = 8 if layout == "sliced" else 3
    wide = torch.full((*shape[:-1], shape[-1] + 16), torch.nan, device=device, dtype=dtype)
    part = wide[..., offset : offset + shape[-1]]
    return part.copy_(torch.randn(shape, device=device))


def cases(device, intensity):
    return cover(
        {
            "shape": [(1, 1), (3, 7), (33, 8), (5, 129), (130, 72), (2, 3, 24), (0, 8), (4, 0)]
            + [(1031, 4096), (3, 257, 1000), (70001, 16)] * (device == "cuda"),
            "activation": list(NUMBERS),
            "gate_layout": list(GATES),
            "dtype": [BF16, FP16, FP32],
            "layout": ["packed", "sliced", "unaligned", "transposed", "expanded"],
            "layout_z": ["packed", "sliced"],
        },
        intensity,
    )


@over(cases)
def test_against_autograd(device, case):
    shape, how = case["shape"], (case["activation"], case["gate_layout"])
    grad = placed(shape, case["layout"], case["dtype"], device)
    z = placed((*shape[:-1], 2 * shape[-1]), case["layout_z"], case["dtype"], device)
    out = through_gate(grad, z, *how)
    assert out.is_contiguous()
    assert out.dtype == z.dtype
    expected = by_autograd(grad, z, *how, torch.float64)
    plain = by_autograd(grad, z, *how, FP32).to(case["dtype"])
    slack = 2.0**-20 * grad.double().abs().max() * z.double().abs().max() if z.numel() else 0.0
    assert_accurate(out, expected, plain, slack=slack)


@pytest.mark.parametrize("gate_layout", list(GATES))
@pytest.mark.parametrize("activation", list(NUMBERS))
def test_far_from_zero(device, activation, gate_layout):
    """Where an activation is the identity or zero, results are exact."""
    grad, values = (integers(3, 32, low=-8, high=8, dtype=BF16, device=device) for _ in range(2))
    for gates in (torch.full_like(grad, 300.0), torch.full_like(grad, -300.0)):
        parts = (gates, values)
        z = torch.cat(parts, -1) if gate_layout == "blocked" else torch.stack(parts, -1).flatten(1)
        out = through_gate(grad, z, activation, gate_layout)
        halves = out.chunk(2, -1) if gate_layout == "blocked" else (out[:, ::2], out[:, 1::2])
        slope = 1 if gates[0, 0] > 0 else 0
        assert torch.equal(halves[0], slope * grad * values)
        assert torch.equal(halves[1].double(), (slope * grad.double() * gates.double()).to(BF16))


def test_nan_stays_where_it_is(device):
    grad, z = torch.ones(4, 16, dtype=BF16, device=device), torch.ones(4, 32, device=device)
    z[1, 3], z[2, 20] = torch.nan, torch.nan
    out = through_gate(grad, z.to(BF16), "swiglu", "blocked")
    places = [[1, 3], [1, 19], [2, 4]]
    assert torch.isnan(out).nonzero().tolist() == places


class Called(TorchDispatchMode):
    """The names of the ops that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("activation", list(NUMBERS))
def test_gradient_goes_over_memory_once(device, activation):
    """The gradient of z is one op, and nothing else computes on it but the two products."""
    a = torch.randn(24, 40, device=device).to(BF16).requires_grad_()
    b = torch.randn(40, 64, device=device).to(BF16).requires_grad_()
    out = tk.gemm(a, b, activation=activation)
    grad = torch.randn_like(out)
    with Called() as called:
        out.backward(grad)
    names = [name for name in called.names if not name.startswith(("aten::t", "aten::detach"))]
    forward = "thunderkittens::gemm_forward"
    assert names == ["thunderkittens::gemm_backward", forward, forward]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1031, 1040), (1111, 777)])
def test_writes_nothing_outside(device, shape):
    grad = torch.randn(shape, device=device).to(BF16)
    z = torch.randn(shape[0], 2 * shape[1], device=device).to(BF16)
    for gate_layout in GATES:
        assert_guards_intact(lambda: through_gate(grad, z, "swiglu", gate_layout))  # noqa: B023


@pytest.mark.gpu
@pytest.mark.large
def test_more_than_2_31_elements(device):
    grad = torch.randn((1 << 17) + 3, 8200, device=device, dtype=BF16)
    z = torch.randn(grad.shape[0], 2 * grad.shape[1], device=device, dtype=BF16)
    out = through_gate(grad, z, "swiglu", "blocked")
    assert out.numel() > 2**31
    last = slice(-5, None)
    expected = by_autograd(grad[last], z[last], "swiglu", "blocked", torch.float64)
    torch.testing.assert_close(out[last].double(), expected, rtol=2**-7, atol=2**-7)


G, Z = torch.zeros(3, 4, dtype=BF16), torch.zeros(3, 8, dtype=BF16)
WRONG = {
    "dtypes": ((G, Z.half(), 4, 1), "z is torch.float16"),
    "columns": ((G, Z[:, :6], 4, 1), r"z has shape \(3, 6\)"),
    "rows": ((G, Z[:2], 4, 1), r"z has shape \(2, 8\)"),
    "dimensions": ((G[0], Z[0], 4, 1), "dimensions"),
    "activation": ((G, Z, 1, 1), "activation"),
    "gate": ((G, Z, 4, 0), "gate"),
}


@pytest.mark.parametrize("name", list(WRONG))
def test_wrong_calls(device, name):
    arguments, text = WRONG[name]
    tensors = [x.to(device) if isinstance(x, torch.Tensor) else x for x in arguments]
    with pytest.raises((RuntimeError, ValueError, TypeError), match=text):
        torch.ops.thunderkittens.gemm_backward(*tensors)


def test_is_not_differentiated_itself(device):
    """The gradient of a gate that is to be differentiated is made of PyTorch's operations."""
    grad = torch.ones(3, 4, device=device, requires_grad=True)
    z = torch.ones(3, 8, device=device)
    out = torch.ops.thunderkittens.gemm_backward(grad, z, 4, 1)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        out.sum().backward()
