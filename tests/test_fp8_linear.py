"""`tk.fp8_linear`: its products against those of what it rounds, and training with it."""

from __future__ import annotations

import pytest
import torch

import thunderkittens as tk

BF16, FP32 = torch.bfloat16, torch.float32


def relative(x, y):
    x, y = x.detach().double(), y.detach().double()
    return float((x - y).norm() / y.norm())


@pytest.mark.parametrize("scaling", ["row", "block"])
@pytest.mark.parametrize("grad_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_gradients(device, scaling, grad_dtype):
    """Each result differs from that of the unrounded product by about two roundings to fp8."""
    x = torch.randn(3, 50, 264, device=device, requires_grad=True)
    w = torch.randn(136, 264, device=device, requires_grad=True)
    bias = torch.randn(136, device=device, requires_grad=True)
    grad = torch.randn(3, 50, 136, device=device)
    out = tk.fp8_linear(x, w, bias, scaling=scaling, grad_dtype=grad_dtype)
    actual = torch.autograd.grad(out, (x, w, bias), grad)
    plain = torch.nn.functional.linear(x, w, bias)
    expected = torch.autograd.grad(plain, (x, w, bias), grad)
    bound = 0.05 if grad_dtype == torch.float8_e4m3fn else 0.09
    assert relative(out, plain) < 0.05
    for a, e in zip(actual[:2], expected[:2], strict=True):
        assert a.dtype == e.dtype
        assert relative(a, e) < bound
    torch.testing.assert_close(actual[2], expected[2])


@pytest.mark.parametrize("needs", [(True, False), (False, True), (False, False)])
def test_only_what_is_needed(device, needs):
    x = torch.randn(20, 32, device=device).requires_grad_(needs[0])
    w = torch.randn(24, 32, device=device).requires_grad_(needs[1])
    out = tk.fp8_linear(x, w)
    assert out.requires_grad == any(needs)
    if any(needs):
        out.sum().backward()
        assert [t.grad is not None for t in (x, w)] == list(needs)


def train(layer, device, steps=60):
    """Losses of a small network that learns a fixed one."""
    torch.manual_seed(0)
    make = {"bf16": torch.nn.Linear, "row": tk.Fp8Linear, "block": tk.Fp8Linear}[layer]
    options = {} if layer == "bf16" else {"scaling": layer}
    net = torch.nn.Sequential(
        make(64, 160, **options), torch.nn.GELU(), make(160, 64, **options)
    ).to(device, BF16)
    teacher = torch.randn(64, 64, device=device, dtype=BF16) / 8
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        x = torch.randn(192, 64, device=device, dtype=BF16)
        loss = torch.nn.functional.mse_loss(net(x).float(), torch.tanh(x @ teacher).float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return torch.tensor(losses)


@pytest.mark.parametrize("scaling", ["row", "block"])
def test_training_follows_bf16(device, scaling):
    """The loss falls as in bfloat16: the same curve within a tenth, smoothed over ten steps."""
    fp8, bf16 = train(scaling, device), train("bf16", device)
    smooth = lambda x: x.unfold(0, 10, 5).mean(-1)  # noqa: E731
    assert float(bf16[-10:].mean()) < 0.5 * float(bf16[:5].mean())
    assert bool(((smooth(fp8) - smooth(bf16)).abs() < 0.1 * smooth(bf16)).all())


def test_autocast(device):
    x, layer = torch.randn(5, 32, device=device), tk.Fp8Linear(32, 16).to(device)
    with torch.autocast(device, BF16):
        assert layer(x).dtype == BF16
    assert layer(x).dtype == FP32


def test_wrong_calls(device):
    x, w = torch.zeros(4, 8, device=device), torch.zeros(5, 8, device=device)
    with pytest.raises(TypeError, match="weight must be a bfloat16"):
        tk.fp8_linear(x, w.long())
    with pytest.raises(TypeError, match="grad_dtype"):
        tk.fp8_linear(x, w, grad_dtype=BF16)
    with pytest.raises(ValueError, match="scaling is 'tensor'"):
        tk.fp8_linear(x, w, scaling="tensor")
    with pytest.raises(ValueError, match="must be"):
        tk.fp8_linear(x, w.t())
    with pytest.raises(ValueError, match=r"fp8_linear: bias has shape \(4,\); it must be \(5,\)"):
        tk.fp8_linear(x, w, x[:, 0])
    with pytest.raises(TypeError, match="fp8_linear: weight is on meta, x is on"):
        tk.fp8_linear(x, w.to("meta"))
