"""`tk.merge_attention`: parts of the keys give what all of them do; wrong calls."""

from __future__ import annotations

import math

import pytest
import torch

import thunderkittens as tk
from helpers.attention import emulated
from helpers.paged import normal

BF16, FP16 = torch.bfloat16, torch.float16
FLAGS = ("test_schema", "test_autograd_registration", "test_faketensor")


def parts_of(shape, count, dtype, device):
    outs = [normal(shape, dtype, device) for _ in range(count)]
    lse_shape = (*shape[:-3], shape[-2], shape[-3])
    return outs, [3 * torch.randn(lse_shape, device=device) for _ in range(count)]


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("count", [1, 2, 5, 16])
@pytest.mark.parametrize("shape", [(2, 3, 4, 64), (7, 2, 40), (5, 3, 256)])
def test_values(device, shape, count, dtype):
    outs, lses = parts_of(shape, count, dtype, device)
    lses[0].flatten()[0] = -math.inf
    lses[-1].flatten()[1] = math.inf  # as other libraries mark rows without keys
    for lse in lses:
        lse.flatten()[2] = math.inf
    outs[0][..., 0, 0, :] = torch.nan if bool(lses[0].flatten()[0] == -math.inf) else 0
    out, lse = tk.merge_attention(outs, lses)
    expected, expected_lse = tk.reference.merge_attention(
        [x.double() for x in outs], [x.double() for x in lses]
    )
    rounding = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(out.double(), expected, rtol=rounding, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("packed", [False, True])
def test_parts_of_keys_are_all_of_them(device, packed):
    """A prefix that every query sees, and what is causal behind it."""
    shape = (1, 40, 2, 64)
    q, k, v = (normal((1, n, 2, 64), BF16, device).transpose(1, 2) for n in (40, 90, 90))
    whole, whole_lse = tk.attention(q, k, v, causal=True, return_lse=True)
    parts = [
        tk.attention(q, k[:, :, :50], v[:, :, :50], return_lse=True),
        tk.attention(q, k[:, :, 50:], v[:, :, 50:], causal=True, return_lse=True),
    ]
    outs = [out.transpose(1, 2) for out, _ in parts]
    lses = [lse for _, lse in parts]
    if packed:
        outs, lses = ([x[0] for x in list_] for list_ in (outs, lses))
    out, lse = tk.merge_attention(outs, lses)
    torch.testing.assert_close(out.reshape(shape), whole.transpose(1, 2), atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse.reshape(whole_lse.shape), whole_lse, atol=1e-4, rtol=1e-5)


def test_strides_are_free(device):
    outs, lses = parts_of((2, 3, 4, 64), 2, BF16, device)
    out, lse = tk.merge_attention(outs, lses)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in outs]
    strided_lse = [x.mT.contiguous().mT for x in lses]
    again = tk.merge_attention(strided, strided_lse)
    assert torch.equal(again[0], out)
    assert torch.equal(again[1], lse)


def test_empty(device):
    outs, lses = parts_of((0, 3, 4, 64), 2, BF16, device)
    out, lse = tk.merge_attention(outs, lses)
    assert out.shape == (0, 3, 4, 64)
    assert lse.shape == (0, 4, 3)


def test_opcheck(device):
    if emulated(device):
        pytest.skip("the emulator is not traced")
    op = torch.ops.thunderkittens.merge_attention.default
    torch.library.opcheck(op, parts_of((2, 3, 4, 64), 2, BF16, device), test_utils=FLAGS)


WRONG = [
    (lambda o, s: ([], []), ValueError, "got 0 outs and 0 lses"),
    (lambda o, s: (o, s[:1]), ValueError, "got 2 outs and 1 lses"),
    (lambda o, s: ([o[0], o[1].float()], s), TypeError, r"outs\[1\] is torch.float32"),
    (lambda o, s: (o, [s[0], s[1].double()]), TypeError, r"lses\[1\] is torch.float64"),
    (lambda o, s: ([o[0], o[1][:1]], s), ValueError, r"outs\[1\] has shape \(1, 3, 4, 64\)"),
    (lambda o, s: (o, [s[0], s[1].mT]), ValueError, r"lses\[1\] has \(2, 3, 4\)"),
    (lambda o, s: ([x[0, 0] for x in o], s), ValueError, r"outs\[0\] has shape \(4, 64\)"),
]


@pytest.mark.parametrize(("change", "error", "words"), WRONG)
def test_wrong_calls(device, change, error, words):
    outs, lses = parts_of((2, 3, 4, 64), 2, BF16, device)
    with pytest.raises(error, match=f"tk.merge_attention: .*{words}"):
        tk.merge_attention(*change(outs, lses))
