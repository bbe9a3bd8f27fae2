"""`tk.nvfp4_dequantize`: every element and scale, layouts, sizes, wrong calls."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import thunderkittens as tk
from helpers import block_scaled as oracle
from helpers.cover import cover, over
from helpers.layouts import RAGGED_PAIRS, at_any_element
from test_mxfp8_dequantize import LAYOUTS, place, same

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FP4, E4M3, BYTE = torch.float4_e2m1fn_x2, torch.float8_e4m3fn, torch.uint8


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("factor", [1.0, 0.37, 1e-30, 3e38, 1e-44])
def test_every_element_at_every_scale(device, factor, dtype):
    """All pairs of elements, all scales, negative ones too; by NumPy in float32."""
    data = torch.arange(256, dtype=BYTE).repeat(256, 1)
    scale = torch.arange(256, dtype=BYTE).unsqueeze(1).expand(256, 32).contiguous()
    codes = np.stack((data.numpy() & 15, data.numpy() >> 4), -1).reshape(256, 512)
    values = np.array([*oracle.E2M1, *-oracle.E2M1], dtype=np.float32)
    half = [*oracle.E4M3, np.nan]
    scales = np.array([*half, *(-v for v in half)], dtype=np.float32)
    with np.errstate(over="ignore"):
        wide = values[codes] * scales[:, None] * np.float32(factor)
    out = tk.nvfp4_dequantize(
        data.to(device),
        scale.view(E4M3).to(device),
        torch.tensor(factor, device=device),
        swizzle=False,
        dtype=dtype,
    )
    assert same(out.cpu(), torch.from_numpy(wide).to(dtype))


def cases(device, intensity):
    return cover(
        {
            "shape": [(1, 2), (128, 128), (129, 34), (127, 200), (3, 130, 70), (2, 64, 128)]
            + [(0, 32), (5, 0), (0, 4, 4)]
            + [(1000, 1032), (2048, 1024)] * (device == "cuda"),
            "layout": LAYOUTS,
            "dtype": [BF16, FP16, FP32],
            "swizzle": [True, False],
            "bytes": [False, True],
        },
        intensity,
    )


@over(cases)
def test_options(device, case):
    x = torch.randn(case["shape"]).to(BF16)
    data, scale, factor = tk.reference.nvfp4_quantize(x, swizzle=case["swizzle"])
    placed = place(data.view(BYTE), BYTE, case["layout"]).to(device)
    placed = placed if case["bytes"] else placed.view(FP4)
    options = {"swizzle": case["swizzle"], "dtype": case["dtype"]}
    out = tk.nvfp4_dequantize(placed, scale.to(device), factor.to(device), **options)
    expected = tk.reference.nvfp4_dequantize(data, scale, factor, **options)
    assert torch.equal(out.cpu(), expected)
    assert out.is_contiguous()


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("offset", range(8))
def test_rows_at_any_byte(device, offset, dtype):
    """Read from any byte, and written to any element."""
    shapes = [*RAGGED_PAIRS, (72, 672), (20, 390)]
    data, scale, factor = tk.reference.nvfp4_quantize(torch.randn(shapes[offset]).to(BF16))
    expected = tk.reference.nvfp4_dequantize(data, scale, factor, dtype=dtype)
    for gap in (0, 1, 4):
        placed = at_any_element(data.view(BYTE).to(device), offset, gap)
        out = tk.nvfp4_dequantize(placed, scale.to(device), factor.to(device), dtype=dtype)
        assert torch.equal(out.cpu(), expected)


def test_layouts_of_scales(device):
    x = torch.randn(130, 160, device=device).to(BF16)
    results = [
        tk.nvfp4_dequantize(*tk.nvfp4_quantize(x, swizzle=s), swizzle=s) for s in (True, False)
    ]
    assert torch.equal(*results)


DATA = torch.zeros(4, 16, dtype=BYTE)
SCALE, ONE = torch.zeros(4, 2, dtype=BYTE).view(E4M3), torch.ones(())
PLAIN = {"swizzle": False}
WRONG = {
    "list": (TypeError, "data must be a torch.Tensor, got list", ([1], SCALE, ONE), PLAIN),
    "none": (TypeError, "block_scale must be a torch.Tensor", (DATA, None, ONE), PLAIN),
    "float": (TypeError, "global_scale must be a torch.Tensor", (DATA, SCALE, 1.0), PLAIN),
    "bf16": (TypeError, "data is torch.bfloat16", (DATA.to(BF16), SCALE, ONE), PLAIN),
    "int32": (TypeError, "data is torch.int32", (DATA.int(), SCALE, ONE), PLAIN),
    "sparse": (TypeError, "data must be a dense", (DATA.float().to_sparse(), SCALE, ONE), PLAIN),
    "byte scale": (TypeError, "block_scale is torch.uint8", (DATA, SCALE.view(BYTE), ONE), PLAIN),
    "fp32 scale": (TypeError, "block_scale is torch.float32", (DATA, SCALE.float(), ONE), PLAIN),
    "fp64": (TypeError, "global_scale is torch.float64", (DATA, SCALE, ONE.double()), PLAIN),
    "device": (TypeError, "block_scale is on meta", (DATA, SCALE.to("meta"), ONE), PLAIN),
    "device of one": (TypeError, "global_scale is on meta", (DATA, SCALE, ONE.to("meta")), PLAIN),
    "dtype": (TypeError, "dtype is torch.float64", (DATA, SCALE, ONE), {"dtype": torch.double}),
    "dtype fp8": (TypeError, "dtype is torch.float8_e4m3fn", (DATA, SCALE, ONE), {"dtype": E4M3}),
    "dtype none": (TypeError, "dtype is None", (DATA, SCALE, ONE), {"dtype": None}),
    "swizzle": (TypeError, "swizzle must be True or False", (DATA, SCALE, ONE), {"swizzle": 2}),
    "vector": (ValueError, "data has shape (16,)", (DATA[0], SCALE, ONE), PLAIN),
    "four": (ValueError, "data has shape (1, 1, 4, 16)", (DATA[None, None], SCALE, ONE), PLAIN),
    "plain for swizzled": (
        ValueError,
        "block_scale has shape (4, 2); the scales of (4, 32) in the 128x4 layout are (128, 4)",
        (DATA, SCALE, ONE),
        {},
    ),
    "rows": (ValueError, "are (4, 2)", (DATA, SCALE[:3], ONE), PLAIN),
    "columns": (ValueError, "are (4, 2)", (DATA, SCALE[:, :1], ONE), PLAIN),
    "batch": (ValueError, "are (1, 4, 2)", (DATA[None], SCALE, ONE[None]), PLAIN),
    "one per matrix": (ValueError, "it must be (1,)", (DATA[None], SCALE[None], ONE), PLAIN),
    "unknown": (TypeError, "axis", (DATA, SCALE, ONE), {"axis": -2}),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls(device, name):
    error, words, operands, options = WRONG[name]

    def there(x):
        return x.to(device) if isinstance(x, torch.Tensor) and x.device.type == "cpu" else x

    with pytest.raises(error) as caught:
        tk.nvfp4_dequantize(*(there(x) for x in operands), **options)
    assert words in str(caught.value)
