"""`tk.mxfp8_dequantize`: every element and scale, layouts, sizes, wrong calls."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import thunderkittens as tk
from helpers import block_scaled as oracle
from helpers.cover import cover, over
from helpers.layouts import RAGGED, at_any_element, matrix

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
# Layouts that one-byte elements can have: no margins of NaN, which not all of them are.
LAYOUTS = ("packed", "packed_t", "odd", "spread")


def place(codes, dtype, layout):
    """Codes as a tensor in a layout; what lies between them is other codes."""
    if layout == "packed_t":
        return place(codes.mT, dtype, "packed").mT
    if layout == "odd":
        wide = torch.nn.functional.pad(codes, (0, 1 + codes.shape[-1] % 2), value=0x55)
        return wide[..., : codes.shape[-1]].view(dtype)
    if layout == "spread":
        wide = codes.repeat_interleave(2, -1)
        wide[..., 1::2] = 0x55
        return wide[..., ::2].view(dtype)
    return codes.contiguous().view(dtype)


def same(x, y):
    return bool(((x == y) | (x.isnan() & y.isnan())).all()) and bool(
        (torch.signbit(x) == torch.signbit(y))[~y.isnan()].all()
    )


@pytest.mark.all_twins
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("kind", [E4M3, E5M2])
def test_every_element_at_every_scale(device, kind, dtype):
    """256 x 256 of them, in a block each; by NumPy in float64, where all of them are exact."""
    elements = torch.arange(256, dtype=torch.uint8).repeat_interleave(32).repeat(256, 1)
    scale = torch.arange(256, dtype=torch.uint8).unsqueeze(1).expand(256, 256).contiguous()
    values = oracle.FORMATS[kind]
    infinities = [np.inf] if kind == E5M2 else []
    half = [*values, *infinities, *[np.nan] * (128 - len(values) - len(infinities))]
    table = np.array([*half, *(-v for v in half)])
    powers = np.append(2.0 ** (np.arange(255) - 127), np.nan)
    wide = torch.from_numpy(table[elements.numpy()] * powers[:, None])
    out = tk.mxfp8_dequantize(
        elements.view(kind).to(device), scale.view(E8M0).to(device), swizzle=False, dtype=dtype
    )
    assert same(out.cpu(), wide.float().to(dtype))


def cases(device, intensity):
    return cover(
        {
            "shape": [(1, 1), (128, 128), (129, 33), (127, 200), (3, 130, 70), (2, 64, 128)]
            + [(0, 32), (5, 0), (0, 4, 4)]
            + [(1000, 1032), (2048, 1024)] * (device == "cuda"),
            "layout": LAYOUTS,
            "kind": [E4M3, E5M2],
            "dtype": [BF16, FP16, FP32],
            "axis": [-1, -2],
            "swizzle": [True, False],
        },
        intensity,
    )


@over(cases)
def test_options(device, case):
    options = {name: case[name] for name in ("axis", "swizzle")}
    x = torch.randn(case["shape"]).to(BF16)
    data, scale = tk.reference.mxfp8_quantize(x, dtype=case["kind"], **options)
    placed = place(data.view(torch.uint8), case["kind"], case["layout"]).to(device)
    out = tk.mxfp8_dequantize(placed, scale.to(device), dtype=case["dtype"], **options)
    expected = tk.reference.mxfp8_dequantize(data, scale, dtype=case["dtype"], **options)
    assert torch.equal(out.cpu(), expected)
    assert (out if case["axis"] == -1 else out.mT).is_contiguous()


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("offset", range(8))
def test_rows_at_any_byte(device, offset, dtype):
    """Read from any byte, and written to any element."""
    shapes = [*RAGGED, (72, 672), (20, 390)]
    data, scale = tk.reference.mxfp8_quantize(torch.randn(shapes[offset]).to(BF16))
    expected = tk.reference.mxfp8_dequantize(data, scale, dtype=dtype)
    for gap in (0, 1, 8):
        placed = at_any_element(data.view(torch.uint8).to(device), offset, gap).view(E4M3)
        out = tk.mxfp8_dequantize(placed, scale.to(device), dtype=dtype)
        assert torch.equal(out.cpu(), expected)


def test_round_trip(device):
    """What is already in the format comes back as it was."""
    x = torch.randn(130, 96, device=device).to(BF16)
    once = tk.mxfp8_dequantize(*tk.mxfp8_quantize(x))
    data, scale = tk.mxfp8_quantize(once)
    again = tk.mxfp8_dequantize(data, scale)
    assert torch.equal(once, again)
    assert torch.equal(again, tk.mxfp8_dequantize(data, scale.view(torch.uint8)))


def test_layouts_of_scales(device):
    x = torch.randn(130, 160, device=device).to(BF16)
    results = [
        tk.mxfp8_dequantize(*tk.mxfp8_quantize(x, swizzle=s), swizzle=s) for s in (True, False)
    ]
    assert torch.equal(*results)
    assert torch.equal(matrix(x, "packed"), x)


DATA, SCALE = torch.zeros(4, 64).to(E4M3), torch.zeros(4, 2, dtype=torch.uint8)
PLAIN = {"swizzle": False}
WRONG = {
    "list": (TypeError, "data must be a torch.Tensor, got list", [[1.0]], SCALE, PLAIN),
    "none": (TypeError, "scale must be a torch.Tensor, got NoneType", DATA, None, PLAIN),
    "bf16": (TypeError, "data is torch.bfloat16; supported are", DATA.bfloat16(), SCALE, PLAIN),
    "bytes": (TypeError, "data is torch.uint8", DATA.view(torch.uint8), SCALE, PLAIN),
    "sparse": (TypeError, "data must be a dense tensor", DATA.float().to_sparse(), SCALE, PLAIN),
    "fp32 scale": (TypeError, "scale is torch.float32", DATA, SCALE.float(), PLAIN),
    "int32 scale": (TypeError, "scale is torch.int32", DATA, SCALE.int(), PLAIN),
    "e4m3 scale": (TypeError, "scale is torch.float8_e4m3fn", DATA, SCALE.view(E4M3), PLAIN),
    "device": (TypeError, "scale is on meta, data is on", DATA, SCALE.to("meta"), PLAIN),
    "dtype": (TypeError, "dtype is torch.float64", DATA, SCALE, {**PLAIN, "dtype": torch.double}),
    "dtype fp8": (TypeError, "dtype is torch.float8_e4m3fn", DATA, SCALE, {**PLAIN, "dtype": E4M3}),
    "dtype none": (TypeError, "dtype is None", DATA, SCALE, {**PLAIN, "dtype": None}),
    "swizzle": (TypeError, "swizzle must be True or False", DATA, SCALE, {"swizzle": None}),
    "axis": (ValueError, "axis is 5; it must be -1 or -2", DATA, SCALE, {**PLAIN, "axis": 5}),
    "axis str": (TypeError, "axis must be an int, got str", DATA, SCALE, {**PLAIN, "axis": "K"}),
    "vector": (ValueError, "data has shape (64,); it must be (M, K)", DATA[0], SCALE, PLAIN),
    "four": (ValueError, "data has shape (1, 1, 4, 64)", DATA[None, None], SCALE, PLAIN),
    "plain for swizzled": (
        ValueError,
        "scale has shape (4, 2); the scales of (4, 64) in the 128x4 layout are (128, 4)",
        DATA,
        SCALE,
        {},
    ),
    "rows": (ValueError, "are (4, 2)", DATA, SCALE[:3], PLAIN),
    "columns": (ValueError, "are (4, 2)", DATA, SCALE[:, :1], PLAIN),
    "other axis": (ValueError, "are (64, 1)", DATA, SCALE, {**PLAIN, "axis": -2}),
    "batch": (ValueError, "are (1, 4, 2)", DATA[None], SCALE, PLAIN),
    "unknown": (TypeError, "rule", DATA, SCALE, {"rule": "floor"}),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls(device, name):
    error, words, data, scale, options = WRONG[name]

    def there(x):
        return x.to(device) if isinstance(x, torch.Tensor) and x.device.type == "cpu" else x

    with pytest.raises(error) as caught:
        tk.mxfp8_dequantize(there(data), there(scale), **options)
    assert words in str(caught.value)
