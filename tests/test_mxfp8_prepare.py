"""`tk.mxfp8_prepare`: bits against the reference, what it promises of elements, wrong calls."""

from __future__ import annotations

import pytest
import torch

import thunderkittens as tk
from helpers.cover import cover, over
from test_mxfp8_dequantize import place

E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
BF16 = torch.bfloat16


def cases(device, intensity):
    return cover(
        {
            "shape": [(1, 1), (128, 128), (129, 33), (127, 200), (3, 130, 70), (2, 64, 128)]
            + [(0, 32), (5, 0), (0, 4, 4), (17, 2080), (9, 200, 40)]  # the last one many blocks
            + [(1000, 1032), (2048, 8192)] * (device == "cuda"),
            "layout": ["packed", "packed_t", "odd", "spread"],
            "kind": [E4M3, E5M2],
            "scales": ["near", "wide", "any"],
            "swizzle": [True, False],
        },
        intensity,
    )


@pytest.mark.all_twins
@over(cases)
def test_bits(device, case):
    """Any codes, with scales near each other, up to 2^20 apart, and any: bit by bit."""
    *batch, rows, columns = case["shape"]
    codes = torch.randint(0, 256, case["shape"]).to(torch.uint8)
    low, high = {"near": (125, 129), "wide": (110, 131), "any": (0, 256)}[case["scales"]]
    if case["scales"] != "any":
        codes = codes % 0x7C + codes // 0x80 * 0x80
    scale = torch.randint(low, high, (*batch, rows, -(-columns // 32))).to(torch.uint8)
    if case["swizzle"]:
        # What lies in the padding must not count.
        scale = tk.reference._block_scaled.swizzle_scales(scale)
    placed = place(codes, case["kind"], case["layout"]).to(device)
    actual = tk.mxfp8_prepare(placed, scale.to(device).view(E8M0), swizzle=case["swizzle"])
    expected = tk.reference.mxfp8_prepare(
        codes.view(case["kind"]), scale.view(E8M0), swizzle=case["swizzle"]
    )
    # Of rows in the mask the codes do not count: NaN may have a sign.
    marked = expected.marks.any(-1).repeat_interleave(128, -1)[..., :rows]
    assert torch.equal(actual.marks.cpu(), expected.marks)
    assert torch.equal(actual.factor.cpu(), expected.factor)
    assert actual.codes.shape == expected.codes.shape
    same = actual.codes.cpu().view(torch.uint8) == expected.codes.view(torch.uint8)
    assert bool((same | marked[..., None]).all())


@pytest.mark.parametrize("kind", [E4M3, E5M2])
def test_elements_hardly_move(device, kind):
    """By at most 2^-9 of the largest of their block, in rows without a mark; there are both."""
    x = torch.randn(512, 256, device=device)
    x *= 2.0 ** (-9 * torch.rand(512, 8, device=device).repeat_interleave(32, -1))
    x[:128] *= 2.0 ** (-9 * torch.rand(128, 8, device=device).repeat_interleave(32, -1))
    data, scale = tk.reference.mxfp8_quantize(x.to(BF16), dtype=kind)
    kept = tk.mxfp8_prepare(data, scale)
    before = tk.reference.mxfp8_dequantize(data, scale, dtype=torch.float32).double()
    after = kept.codes.double() * kept.factor.double()[:, None]
    blocks = before.abs().unflatten(-1, (-1, 32))
    error = (after - before).abs().unflatten(-1, (-1, 32)).amax(-1) / blocks.amax(-1)
    row = torch.arange(512, device=device)
    marked = kept.marks[row // 128, row % 32 // 4] != 0
    assert bool(marked.any())
    assert not bool(marked.all())
    assert float(error[~marked].max()) <= 2.0**-9
    assert bool((error[~marked] > 0).any())


def test_normal_data_is_not_marked(device):
    for rule in ("rceil", "floor"):
        x = torch.randn(256, 1024, device=device).to(BF16)
        kept = tk.mxfp8_prepare(*tk.reference.mxfp8_quantize(x, rule=rule))
        assert not kept.marks.any()
        assert kept.marks.shape == (2, 8)


def test_padding_of_scales_does_not_count(device):
    """Other software need not write zeros there."""
    data = torch.ones(5, 40, device=device).to(E4M3)
    plain = torch.full((5, 2), 127, dtype=torch.uint8, device=device)
    scale = tk.reference._block_scaled.swizzle_scales(plain)
    dirty = tk.reference._block_scaled.swizzle_scales(
        torch.nn.functional.pad(plain, (0, 2, 0, 123), value=200)
    )
    kept, other = tk.mxfp8_prepare(data, scale), tk.mxfp8_prepare(data, dirty)
    assert torch.equal(kept.factor, other.factor)
    assert torch.equal(kept.codes.view(torch.uint8), other.codes.view(torch.uint8))
    assert not other.marks.any()


DATA, SCALE = torch.zeros(4, 64).to(E4M3), torch.zeros(4, 2, dtype=torch.uint8)
WRONG = {
    "list": (TypeError, "data must be a torch.Tensor, got list", [[1.0]], SCALE, False),
    "none": (TypeError, "scale must be a torch.Tensor, got NoneType", DATA, None, False),
    "bf16": (TypeError, "data is torch.bfloat16; supported are", DATA.bfloat16(), SCALE, False),
    "fp32 scale": (TypeError, "scale is torch.float32", DATA, SCALE.float(), False),
    "device": (TypeError, "scale is on meta, data is on", DATA, SCALE.to("meta"), False),
    "swizzle": (TypeError, "swizzle must be True or False", DATA, SCALE, 1),
    "vector": (ValueError, "data has shape (64,); it must be (M, K)", DATA[0], SCALE, False),
    "plain": (ValueError, "in the 128x4 layout are (128, 4)", DATA, SCALE, True),
    "rows": (ValueError, "are (4, 2)", DATA, SCALE[:3], False),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls(device, name):
    error, words, data, scale, swizzle = WRONG[name]

    def there(x):
        return x.to(device) if isinstance(x, torch.Tensor) and x.device.type == "cpu" else x

    with pytest.raises(error) as caught:
        tk.mxfp8_prepare(there(data), there(scale), swizzle=swizzle)
    assert words in str(caught.value)
