"""`tk.nvfp4_quantize`: bit by bit against an oracle in NumPy and the reference; stochastic
rounding, layouts, sizes, options, wrong calls."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import thunderkittens as tk
from helpers import block_scaled as oracle
from helpers.cover import cover, over
from helpers.guard import assert_guards_intact
from helpers.layouts import MATRIX_LAYOUTS, RAGGED_PAIRS, at_any_element, matrix
from thunderkittens.reference.nvfp4_quantize import philox

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FP4, E4M3 = torch.float4_e2m1fn_x2, torch.float8_e4m3fn
SHAPES = [
    (1, 2),
    (128, 128),
    (1, 16),
    (129, 34),
    (127, 200),
    (40, 264),
    (300, 30),
    (3, 130, 70),
    (2, 64, 128),
]
EMPTY = [(0, 32), (5, 0), (0, 0), (0, 4, 4), (2, 0, 8)]


def assert_oracle(results, x, given=None, square=False, swizzle=True):
    elements, scale, factor = oracle.nvfp4(x, given, square)
    data, block_scale, global_scale = results
    assert oracle.same_bits(data, oracle.packed(elements))
    assert oracle.same_bits(block_scale, oracle.swizzled(scale) if swizzle else scale)
    assert float(global_scale) == float(factor)


def assert_same(actual, expected):
    for x, y in zip(actual[:2], expected[:2], strict=True):
        assert oracle.same_bits(x, y)
    assert torch.equal(actual[2].cpu(), expected[2].cpu())


@pytest.mark.parametrize("block", ["1x16", "16x16"])
@pytest.mark.parametrize("given", [None, 1.0, 3 / 2688, 1e-30, 2.0**120])
def test_every_bf16_as_the_largest(device, block, given):
    """Of a block: zeros, subnormal numbers, infinities and NaN among them."""
    x = oracle.every_largest(16).to(device)
    scale = None if given is None else torch.tensor(given, device=device)
    results = tk.nvfp4_quantize(x, global_scale=scale, block=block)
    assert_oracle(results, x, given, block == "16x16")


@pytest.mark.parametrize("largest", [3e38, 1e30, 5.25, 1e-6, 1e-35, 1e-39, 0.0, math.inf, math.nan])
def test_global_scale(device, largest):
    """Found on the device; 1 where the largest magnitude is 0, infinite or NaN."""
    x = torch.randn(70, 96).clamp(-3, 3) / 3.5 * (largest if math.isfinite(largest) else 1.0)
    x[33, 77] = -largest
    x = x.to(BF16).to(device)
    assert_oracle(tk.nvfp4_quantize(x), x)


@pytest.mark.parametrize("given", [0.0, math.inf, math.nan, 1e-45, 3e38])
def test_strange_global_scales(device, given):
    x = torch.randn(16, 32).to(BF16).to(device)
    data, scale, factor = tk.nvfp4_quantize(x, global_scale=torch.tensor(given, device=device))
    expected = tk.reference.nvfp4_quantize(x.cpu(), global_scale=torch.tensor(given))
    assert oracle.same_bits(data, expected[0])
    assert oracle.same_bits(scale, expected[1])
    assert float(factor) == float(expected[2]) or math.isnan(given)


def test_random_global_scales(device):
    """Where products fall on ties of e4m3, the recipes of the field differ; this is one of them."""
    for _ in range(20):
        x = torch.randn(64, 128).to(BF16).to(device)
        given = float((torch.rand(()) * 8).to(BF16)) / 2688
        given = float(np.float32(given))
        results = tk.nvfp4_quantize(x, global_scale=torch.tensor(given, device=device))
        assert_oracle(results, x, given)


def test_ties(device):
    """Numbers half way between elements: the scale is 1, and 6 is in every block."""
    halves = (oracle.E2M1[:-1] + oracle.E2M1[1:]) / 2
    row = torch.tensor([6.0, -0.0, *halves, *-halves])
    beside = row * (1 + 2**-7 * torch.tensor([-1.0, 1.0]).unsqueeze(1))
    beside[:, 0] = 6
    x = torch.cat([row.unsqueeze(0), beside]).to(BF16).to(device)
    one = torch.ones((), device=device)
    results = tk.nvfp4_quantize(x, global_scale=one)
    assert_oracle(results, x, 1.0)
    first = results[0].view(torch.uint8)[0]
    codes = torch.stack((first & 15, first >> 4), -1).flatten().tolist()
    assert codes == [7, 8, 0, 2, 2, 4, 4, 6, 6, 8, 10, 10, 12, 12, 14, 14]


def test_tiny_numbers(device):
    x = oracle.some_tiny().to(device)
    assert_oracle(tk.nvfp4_quantize(x), x)


def cases(device, intensity):
    return cover(
        {
            "shape": SHAPES + [(1000, 1032), (2048, 1024)] * (device == "cuda"),
            "layout": MATRIX_LAYOUTS,
            "source": [BF16, FP16, FP32],
            "block": ["1x16", "16x16"],
            "swizzle": [True, False],
            "given": [False, True],
            "seed": [None, 0, -7, 2**62 + 1],
        },
        intensity,
    )


@over(cases)
def test_options(device, case):
    """Against the reference, and the oracle where that has the option."""
    x = torch.randn(case["shape"], device=device) * torch.randn(case["shape"], device=device).exp()
    x = x.to(case["source"])
    scale = torch.rand(x.shape[:-2]) / 500 + 1e-4 if case["given"] else None
    seed = None if case["seed"] is None else torch.tensor(case["seed"])
    options = {name: case[name] for name in ("block", "swizzle")}

    def there(y):
        return None if y is None else y.to(device)

    results = tk.nvfp4_quantize(
        matrix(x, case["layout"]), global_scale=there(scale), seed=there(seed), **options
    )
    expected = tk.reference.nvfp4_quantize(x.cpu(), global_scale=scale, seed=seed, **options)
    assert_same(results, expected)
    assert [y.dtype for y in results] == [FP4, E4M3, FP32]
    assert all(y.is_contiguous() for y in results)
    assert results[0].shape == (*x.shape[:-1], x.shape[-1] // 2)
    if x.dim() == 2 and seed is None:
        given = None if scale is None else float(scale)
        assert_oracle(results, x, given, case["block"] == "16x16", case["swizzle"])


@pytest.mark.parametrize("source", [BF16, FP16, FP32])
@pytest.mark.parametrize("offset", range(8))
def test_rows_at_any_byte(device, offset, source):
    """Read from any element, in tiles with and without edges, and written to any byte."""
    shapes = [*RAGGED_PAIRS, (272, 134), (40, 390)]
    for gap in (0, 1, 5):
        x = torch.randn(shapes[offset], device=device).to(source)
        options = {"block": ("1x16", "16x16")[(offset + gap) % 2]}
        seed = torch.tensor(offset) if gap == 1 else None
        there = None if seed is None else seed.to(device)
        results = tk.nvfp4_quantize(at_any_element(x, offset, gap), seed=there, **options)
        assert_same(results, tk.reference.nvfp4_quantize(x.cpu(), seed=seed, **options))


def test_a_batch_is_its_matrices(device):
    x = (torch.randn(3, 50, 70) * torch.tensor([1, 5, 0.01]).view(3, 1, 1)).to(BF16).to(device)
    data, scale, factor = tk.nvfp4_quantize(x)
    for i in range(3):
        assert_same((data[i], scale[i], factor[i]), tk.nvfp4_quantize(x[i]))


@pytest.mark.emulator
@pytest.mark.parametrize("policy", ["on_wait", "random"])
@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize(("given", "dtype"), [(False, BF16), (True, FP16)])
def test_blocks_that_stay(given, dtype, seed, policy):
    """More tiles than stages, of several matrices, for the blocks of one SM."""
    x = (torch.randn(3, 200, 270) * torch.tensor([1, 5, 0.01]).view(3, 1, 1)).to(dtype)
    scale = torch.tensor([0.001, 0.005, 1e-5]) if given else None
    word = None if seed is None else torch.tensor(seed)
    with tk.emulate(policy, seed=1, sm_count=1):
        results = tk.nvfp4_quantize(x, global_scale=scale, seed=word)
    assert_same(results, tk.reference.nvfp4_quantize(x, global_scale=scale, seed=word))


@pytest.mark.gpu
@pytest.mark.parametrize("seed", [None, 5])
def test_many_tiles(seed):
    """More than all blocks of a GPU have at a time."""
    x = torch.randn(5, 1500, 2064).to(BF16)
    word = None if seed is None else torch.tensor(seed)
    results = tk.nvfp4_quantize(x.cuda(), seed=None if word is None else word.cuda())
    assert_same(results, tk.reference.nvfp4_quantize(x, seed=word))


def test_squares_serve_both_orientations(device):
    """The elements of the transpose are the transposed elements."""
    x = torch.randn(144, 208).to(BF16).to(device)
    y = tk.nvfp4_dequantize(*tk.nvfp4_quantize(x, block="16x16"))
    turned = tk.nvfp4_dequantize(*tk.nvfp4_quantize(x.mT, block="16x16"))
    assert torch.equal(y.mT, turned)


@pytest.mark.parametrize("given", [None, 0.5])
@pytest.mark.parametrize("shape", EMPTY)
def test_empty(device, shape, given):
    x = torch.zeros(shape, dtype=BF16, device=device)
    scale = None if given is None else torch.full(shape[:-2], given, device=device)
    expected = tk.reference.nvfp4_quantize(x, global_scale=scale)
    for y, e in zip(tk.nvfp4_quantize(x, global_scale=scale), expected, strict=True):
        assert (y.shape, y.dtype) == (e.shape, e.dtype)
    assert torch.equal(tk.nvfp4_quantize(x, global_scale=scale)[2], expected[2])


# Stochastic rounding


def test_philox():
    """The words of the generator's authors for counters and keys of zeros and of ones."""
    zero = torch.zeros(1, dtype=torch.int64)
    words = [int(w) for w in philox(zero, zero, zero)]
    assert words == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def test_stochastic_rounding_has_no_bias(device):
    """The mean over many seeds is the number, and what is an element stays as it is."""
    row = torch.tensor([6.0, -6, 0.1, -0.4, 0.5, 1.3, -2.7, 3, 3.9, -5, 4, 0, -1.5, 0.05, 2.2, 5.9])
    x = row.repeat(256, 16).to(BF16)
    one = torch.ones((), device=device)
    total = torch.zeros(16, dtype=torch.float64)
    seeds = 4
    for seed in range(seeds):
        results = tk.nvfp4_quantize(
            x.to(device), global_scale=one, seed=torch.tensor(seed, device=device)
        )
        y = tk.nvfp4_dequantize(*results, dtype=FP32).cpu()
        exact = x.float()
        neighbours = torch.tensor([*oracle.E2M1, *-oracle.E2M1], dtype=FP32)
        on_grid = (exact.unsqueeze(-1) == neighbours).any(-1)
        assert torch.equal(y[on_grid], exact[on_grid])
        assert bool(((y - exact).abs() <= 2).all())
        total += y.double().view(-1, 16).mean(0)
    count = seeds * 256 * 16
    assert bool(((total / seeds - x[0, :16].double()).abs() < 6 / math.sqrt(count)).all())


def test_seeds(device):
    """Equal seeds give equal results, others do not; a seed may have any shape of one element."""
    x = torch.randn(64, 64).to(BF16).to(device)
    a, b, c = (tk.nvfp4_quantize(x, seed=torch.tensor(s, device=device))[0] for s in (1, 1, 2))
    d = tk.nvfp4_quantize(x, seed=torch.tensor([[1]], device=device))[0]
    assert oracle.same_bits(a, b)
    assert oracle.same_bits(a, d)
    assert not oracle.same_bits(a, c)


def test_quality(device):
    """Signal to noise for normal numbers: 20.4 dB."""
    x = torch.randn(512, 512).to(BF16).to(device)
    y = tk.nvfp4_dequantize(*tk.nvfp4_quantize(x), dtype=FP32)
    noise = 20 * math.log10(float(x.float().norm() / (y - x.float()).norm()))
    assert abs(noise - 20.4) < 0.2


def test_gradients_stop(device):
    x = torch.randn(32, 32, device=device, requires_grad=True)
    assert not any(y.requires_grad for y in tk.nvfp4_quantize(x))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4096, 1024), (4099, 1032)])
def test_writes_nothing_outside(device, shape):
    x = torch.randn(shape, device=device).to(BF16)
    assert_guards_intact(lambda: tk.nvfp4_quantize(x)[0])


X, ONE = torch.zeros(4, 32, dtype=BF16), torch.ones(())
WRONG = {
    "list": (TypeError, "x must be a torch.Tensor, got list", [[1.0]], {}),
    "none": (TypeError, "x must be a torch.Tensor, got NoneType", None, {}),
    "sparse": (TypeError, "x must be a dense tensor", X.float().to_sparse(), {}),
    "float64": (TypeError, "x is torch.float64; supported are torch.bfloat16,", X.double(), {}),
    "integers": (TypeError, "x is torch.int32", X.int(), {}),
    "fp8": (TypeError, "x is torch.float8_e4m3fn", X.to(E4M3), {}),
    "vector": (ValueError, "x has shape (32,); it must be (M, K) or (B, M, K)", X[0], {}),
    "four dimensions": (ValueError, "x has shape (1, 1, 4, 32)", X[None, None], {}),
    "odd": (ValueError, "x has shape (4, 31); its last dimension must be even", X[:, :31], {}),
    "block": (ValueError, "block is '32x32'; it must be '1x16' or '16x16'", X, {"block": "32x32"}),
    "block int": (TypeError, "block must be a str, got int", X, {"block": 16}),
    "swizzle": (TypeError, "swizzle must be True or False, got 0", X, {"swizzle": 0}),
    "scale float": (TypeError, "global_scale must be a torch.Tensor", X, {"global_scale": 1.0}),
    "scale fp64": (TypeError, "global_scale is torch.float64", X, {"global_scale": ONE.double()}),
    "scale bf16": (TypeError, "global_scale is torch.bfloat16", X, {"global_scale": ONE.to(BF16)}),
    "scale device": (TypeError, "global_scale is on meta", X, {"global_scale": ONE.to("meta")}),
    "scale shape": (
        ValueError,
        "global_scale has shape (1,); it must be (), one value per matrix",
        X,
        {"global_scale": ONE[None]},
    ),
    "scale of a batch": (ValueError, "it must be (1,)", X[None], {"global_scale": ONE}),
    "seed int": (TypeError, "seed must be a torch.Tensor, got int", X, {"seed": 1}),
    "seed int32": (TypeError, "seed is torch.int32", X, {"seed": ONE.int()}),
    "seed float": (TypeError, "seed is torch.float32", X, {"seed": ONE}),
    "seed device": (TypeError, "seed is on meta", X, {"seed": ONE.long().to("meta")}),
    "seeds": (ValueError, "seed has shape (2,); it must be one", X, {"seed": torch.arange(2)}),
    "unknown": (TypeError, "axis", X, {"axis": -2}),
    "by position": (TypeError, "positional", X, None),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls(device, name):
    error, words, x, options = WRONG[name]

    def there(x):
        return x.to(device) if isinstance(x, torch.Tensor) and x.device.type == "cpu" else x

    with pytest.raises(error) as caught:
        if options is None:
            tk.nvfp4_quantize(there(x), None)
        else:
            tk.nvfp4_quantize(there(x), **{key: there(y) for key, y in options.items()})
    assert words in str(caught.value)
