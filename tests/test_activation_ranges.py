"""The activations of all products, and their derivatives, range by range of their argument.

Errors where an activation is small must not hide behind those where it is large: the floating-point
rule holds for each range by itself. The products are of zeros, so that the bias is what the
activation is applied to, exactly.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import thunderkittens as tk
from helpers.cover import alternate
from helpers.numerics import FLUSHED, assert_accurate

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, BYTE = torch.float8_e4m3fn, torch.uint8
ACTIVATIONS = ["relu", "gelu", "gelu_tanh", "silu"]
GATED = {"geglu": "gelu", "swiglu": "silu"}

# Among them: where silu's sigmoid, and then silu, is no normal number any more; where gelu is none;
# where PyTorch's formula of gelu gives zero.
ENDS = (
    -1e4,
    -200,
    -92,
    -88.5,
    -87,
    -60,
    -40,
    -20,
    -13.5,
    -13,
    -12,
    -10,
    -8,
    -7,
    -6,
    -5,
    -4,
    -3,
    -2,
)
ENDS += (-1.5, -1, -0.5, -0.1, -1e-4, -1e-30, 0, 1e-30, 1e-4, 0.1, 0.5, 1, 2, 4, 6, 10, 50, 1e4)
SPECIAL = (math.inf, -math.inf, math.nan, 0.0, -0.0)


def exact(z: Tensor, activation: str) -> Tensor:
    """In float64, without the cancellation that PyTorch's formulas have for negative numbers."""
    z = z.double()
    if activation == "relu":
        return z.clamp_min(0)
    if activation == "gelu":
        return z * torch.special.erfc(-z / math.sqrt(2)) / 2
    return z * torch.sigmoid(z if activation == "silu" else tanh_argument(z))


def tanh_argument(z: Tensor) -> Tensor:
    return 2 * math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)


def exact_derivative(z: Tensor, activation: str) -> Tensor:
    z = z.double()
    if activation == "relu":
        return (z > 0).double()
    if activation == "gelu":
        density = torch.exp(-z.square() / 2) / math.sqrt(2 * math.pi)
        return torch.special.erfc(-z / math.sqrt(2)) / 2 + z * density
    u, slope = z, torch.ones_like(z)
    if activation == "gelu_tanh":
        u, slope = tanh_argument(z), 2 * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * z.square())
    return torch.sigmoid(u) * (1 + z * torch.sigmoid(-u) * slope)


def plain(z: Tensor, activation: str) -> Tensor:
    functions = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu}
    functions["gelu_tanh"] = lambda x: F.gelu(x, approximate="tanh")
    return functions[activation](z)


def values(dtype: torch.dtype, device: str) -> Tensor:
    """Of the ranges in turn, as many of each."""
    count = 96 if device == "cuda" else 24
    parts = []
    for low, high in pairwise(ENDS):
        part = low + (high - low) * torch.rand(count)
        parts.append(part.clamp(-6e4, 6e4).to(dtype))
    return torch.cat(parts).to(device)


def check_ranges(actual: Tensor, z: Tensor, activation: str, *, derivative: bool = False) -> None:
    """Of rows that are all the same."""
    z = z.detach()
    assert torch.equal(actual, actual[:1].expand_as(actual))
    function = exact_derivative if derivative else exact
    expected = function(z, activation)
    if derivative:
        leaf = z.float().requires_grad_()
        usual = torch.autograd.grad(plain(leaf, activation).sum(), leaf)[0]
    else:
        usual = plain(z.float(), activation)
    usual = usual.to(actual.dtype)
    # In a range, the few roundings of PyTorch may all be small by luck. The reference is PyTorch
    # itself, whose error function of vectors on a CPU is less accurate.
    reference = not actual.is_cuda and not tk.emulation.active()
    # The factor of z, a sigmoid or a density, may be flushed to zero.
    slack = FLUSHED * z.double().abs()
    if actual.dtype == FP32:
        slack = slack + 2.0 ** (-19 if reference else -22) * expected.abs()
    size = z.numel() // (len(ENDS) - 1)
    for i, ends in enumerate(pairwise(ENDS)):
        part = slice(i * size, (i + 1) * size)
        try:
            assert_accurate(actual[0, part], expected[part], usual[part], slack=slack[part])
        except AssertionError as error:
            raise AssertionError(f"{activation} from {ends[0]} to {ends[1]}: {error}") from None


def of_gemm(z, m, activation, out_dtype, k=16, **options):
    a = torch.zeros(m, k, dtype=z.dtype, device=z.device)
    b = torch.zeros(k, z.numel(), dtype=z.dtype, device=z.device)
    return tk.gemm(a, b, bias=z, activation=activation, out_dtype=out_dtype, **options)


def of_fp8(z, m, activation, out_dtype, *, accurate=True, blocks=False):
    a = torch.zeros(m, 128, device=z.device).to(E4M3)
    b = torch.zeros(z.numel(), 128, device=z.device).to(E4M3).t()
    scale_a = scale_b = torch.ones((), device=z.device)
    if blocks:
        scale_a = torch.ones(m, 1, device=z.device)
        scale_b = torch.ones(1, -(-z.numel() // 128), device=z.device)
    options = {"bias": z, "activation": activation, "out_dtype": out_dtype, "accurate": accurate}
    return tk.fp8_gemm(a, b, scale_a, scale_b, **options)


def of_mxfp8(z, m, activation, out_dtype, path):
    def zeros(rows):
        data = torch.zeros(rows, 64, device=z.device).to(E4M3)
        scale = torch.full((rows, 2), 127, dtype=BYTE, device=z.device)
        return data, scale.view(torch.float8_e8m0fnu)

    (a, scale_a), (b, scale_b) = zeros(m), zeros(z.numel())
    options = {"bias": z, "activation": activation, "out_dtype": out_dtype, "path": path}
    return tk.mxfp8_gemm(a, b.t(), scale_a, scale_b, swizzle=False, **options)


def of_nvfp4(z, m, activation, out_dtype, dtype=BF16):
    n = z.numel()
    codes = torch.zeros(n, 32, dtype=BYTE, device=z.device)
    scale = torch.ones(n, 4, device=z.device).to(E4M3)
    weight = tk.nvfp4_prepare(codes, scale, torch.ones((), device=z.device), swizzle=False)
    a = torch.zeros(m, 64, dtype=z.dtype, device=z.device)
    return tk.nvfp4_gemm(a, weight, bias=z, activation=activation, out_dtype=out_dtype)


PRODUCTS = {
    "gemm": (of_gemm, {}),
    "fp8": (of_fp8, {}),
    "fp8_fast": (of_fp8, {"accurate": False}),
    "fp8_blocks": (of_fp8, {"blocks": True}),
    "mxfp8_exact": (of_mxfp8, {"path": "exact"}),
    "mxfp8_rebased": (of_mxfp8, {"path": "rebased"}),
    "nvfp4": (of_nvfp4, {}),
}
# Of the kernels for few rows, and of those for many.
ROWS = (1, 20, 70, 300)


@alternate(("activation", "dtype"), ACTIVATIONS, [BF16, FP16])
@pytest.mark.parametrize("product", PRODUCTS)
def test_products(device, product, activation, dtype, intensity):
    function, options = PRODUCTS[product]
    if product.startswith("mxfp8"):
        bias = BF16  # out_dtype is what differs
    else:
        bias = dtype
    z = values(bias, device)
    for i, m in enumerate(ROWS + (3000,) * (device == "cuda")):
        for out_dtype in (dtype, FP32) if intensity > 1 else ((dtype, FP32)[i % 2],):
            out = function(z, m, activation, out_dtype, **options)
            check_ranges(out, z, activation)


@pytest.mark.parametrize("out_dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_float32_arguments(device, activation, out_dtype):
    """What fp32 sums are: with all their bits."""
    z = values(FP32, device)
    for m in (1, 70, 300):
        check_ranges(of_fp8(z, m, activation, out_dtype), z, activation)


@pytest.mark.emulator
@pytest.mark.parametrize("out_dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_fp8_in_ping_pong(activation, out_dtype):
    """Which takes long activations an eighth of its values at a time."""
    z = values(BF16, "cpu")
    config = {"block_m": 128, "block_n": 176, "block_k": 128, "stages": 5, "buffers": 2}
    config |= {"consumers": 2, "swap_ab": False, "splits": 1, "raster_group": 1, "blocks": 2}
    config |= {"sums": 0, "cluster_m": 1, "cluster_n": 1}
    with tk.emulate(seed=1, config=config) as run:
        out = of_fp8(z, 200, activation, out_dtype, accurate=False)
    assert run.kernels[0]["kernel"] == "e4m3_e4m3_fast_128x176"
    check_ranges(out, z, activation)


@pytest.mark.parametrize("gate_layout", ["blocked", "interleaved"])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("activation", GATED)
def test_gates(device, activation, dtype, gate_layout):
    """Of values that are one."""
    gates = values(dtype, device)
    ones = torch.ones_like(gates)
    pair = torch.cat if gate_layout == "blocked" else lambda x: torch.stack(x, 1).flatten()
    z = pair((gates, ones))
    for m in ROWS:
        for out_dtype in (dtype, FP32):
            out = of_gemm(z, m, activation, out_dtype, gate_layout=gate_layout)
            check_ranges(out, gates, GATED[activation])


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("activation", [*ACTIVATIONS, *GATED])
def test_finished_beside_the_main_loop(device, activation, dtype, residual):
    """By other warps than those that multiply, and those of a block's last tile by them
    (dense/epilogue_warps_sm90.cuh); the residual is zero."""
    z = gates = values(dtype, device)
    if activation in GATED:
        z = torch.cat((gates, torch.ones_like(gates)))
    m, k = (4096, 4096) if device == "cuda" else (300, 128)
    options = {}
    if residual:
        options["residual"] = torch.zeros(m, gates.numel(), dtype=dtype, device=device)
    tile = {"block_m": 128, "block_n": 256, "stages": 4, "consumers": 2, "swap_ab": False}
    tile |= {"block_k": 64, "fused": True, "store_interval": 1}
    emulated = type(device) is not str
    with tk.emulate(seed=1, config=tile, sm_count=2) if emulated else nullcontext():
        out = of_gemm(z, m, activation, dtype, k=k, **options)
    check_ranges(out, gates, GATED.get(activation, activation))


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("activation", [*ACTIVATIONS, *GATED])
def test_gradients(device, activation, dtype):
    """Of the bias of one row, which are the derivatives."""
    z = gates = values(dtype, device)
    if activation in GATED:
        z = torch.cat((gates, torch.ones_like(gates)))
    z.requires_grad_()
    out = of_gemm(z, 1, activation, dtype)
    (grad,) = torch.autograd.grad(out, z, torch.ones_like(out))
    gates = gates.detach()
    part = grad[: gates.numel()].unsqueeze(0)
    check_ranges(part, gates, GATED.get(activation, activation), derivative=True)
    if activation in GATED:
        check_ranges(grad[gates.numel() :].unsqueeze(0), gates, GATED[activation])


@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_float32_gradients(device, activation):
    z = values(FP32, device)
    pairs = torch.cat((z, torch.ones_like(z))).unsqueeze(0)
    number = {"gelu": 2, "silu": 4}[activation]
    grad = torch.ones(1, z.numel(), device=device)
    out = torch.ops.thunderkittens.gemm_backward(grad, pairs, number, 1)
    check_ranges(out[:, : z.numel()], z, activation, derivative=True)
    check_ranges(out[:, z.numel() :], z, activation)


@pytest.mark.parametrize("out_dtype", [BF16, FP32])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("product", PRODUCTS)
def test_special_values(device, product, activation, out_dtype):
    """Infinities, NaN and the largest numbers, as PyTorch computes them in float64."""
    largest = torch.finfo(BF16).max
    z = torch.tensor([*SPECIAL, largest, -largest] * 2, dtype=BF16, device=device)
    # PyTorch on a CPU makes NaN of gelu of infinity in float32.
    reference = not z.is_cuda and not tk.emulation.active()
    expected = plain(z.float() if reference else z.double(), activation).to(out_dtype)
    function, options = PRODUCTS[product]
    for m in ROWS:
        out = function(z, m, activation, out_dtype, **options)
        torch.testing.assert_close(
            out, expected.expand_as(out), rtol=0, atol=0, equal_nan=True, check_stride=False
        )
