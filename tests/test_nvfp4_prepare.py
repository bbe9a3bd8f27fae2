"""`tk.nvfp4_prepare`: the layout by a definition of its own, every value and scale, round trips."""

from __future__ import annotations

import io

import pytest
import torch

import thunderkittens as tk
from test_mxfp8_dequantize import same

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, BYTE = torch.float8_e4m3fn, torch.uint8
RESTORE = torch.ops.thunderkittens.nvfp4_dequantize.prepared
VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
# Bits s, e, e, m of the four elements in a half word.
BITS = [(9, 2, 1, 0), (13, 6, 5, 4), (19, 12, 11, 10), (15, 8, 7, 14)]


def random_weight(*shape, device="cpu"):
    """Codes, and scales of every kind but NaN."""
    *batch, n, k = shape
    codes = torch.randint(0, 256, (*batch, n, k // 2), dtype=BYTE)
    scale = torch.randint(0, 256, (*batch, n, k // 16), dtype=BYTE)
    scale = torch.where(scale & 127 == 127, 0x38, scale)
    return codes.to(device), scale.view(E4M3).to(device)


def element(piece, row, column):
    """An element times its scale, from the 2304 bytes of a piece, as the layout defines it."""
    line, product = row % 16, column // 16
    inner = column % 16
    strip, thread = row // 16 * 576, line % 8 * 4 + inner % 8 // 2
    at = strip + thread * 16 + product * 4
    word = int.from_bytes(bytes(piece[at : at + 4]), "little")
    odd = 16 * (inner % 2)
    code = 0
    for bit in BITS[inner // 8 * 2 + line // 8]:
        code = 2 * code + (word >> (bit + odd) % 32 & 1)
    byte = piece[strip + 512 + thread // 4 * 8 + product // 2 * 4 + line // 8 * 2 + product % 2]
    return (-1) ** (code >> 3) * VALUES[code & 7] * 2.0 ** ((byte >> 3) - 10) * (1 + byte % 8 / 8)


def test_layout(device):
    codes, scale = random_weight(70, 80)
    weight = tk.nvfp4_prepare(
        codes.to(device), scale.to(device), torch.ones((), device=device), swizzle=False
    )
    assert weight.data.shape == (2, 2, 2304)
    assert (weight.rows, weight.columns) == (70, 80)
    expected = tk.reference.nvfp4_dequantize(
        codes, scale, torch.ones(()), swizzle=False, dtype=FP32
    )
    pieces = weight.data.cpu().tolist()
    for row in range(128):
        for column in range(row % 3, 128, 3):
            value = element(pieces[row // 64][column // 64], row % 64, column % 64)
            inside = row < 70 and column < 80
            assert value == (expected[row, column] if inside else 0)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("factor", [1.0, 0.37, 1e-30])
def test_every_element_at_every_scale(device, factor, dtype):
    """All pairs of elements, all scales with their signs, NaN too, there and back."""
    data = torch.arange(256, dtype=BYTE).repeat(256, 1).to(device)
    scale = torch.arange(256, dtype=BYTE).unsqueeze(1).expand(256, 32).contiguous()
    scale, factor = scale.view(E4M3).to(device), torch.tensor(factor, device=device)
    weight = tk.nvfp4_prepare(data, scale, factor, swizzle=False)
    out = RESTORE(weight.data, factor, 256, 512, dtype)
    expected = tk.reference.nvfp4_dequantize(data, scale, factor, swizzle=False, dtype=dtype)
    zero = expected == 0  # of a block whose scale is zero the signs are not kept
    assert same(torch.where(zero, 0, out).cpu(), torch.where(zero, 0, expected).cpu())


@pytest.mark.parametrize("swizzle", [True, False])
@pytest.mark.parametrize(
    "shape", [(64, 64), (1, 16), (130, 208), (70, 336), (3, 65, 48), (0, 32), (2, 5, 0)]
)
def test_shapes(device, shape, swizzle):
    codes, scale = random_weight(*shape)
    if swizzle:
        scale = tk.reference._block_scaled.swizzle_scales(scale.view(BYTE)).view(E4M3)
    factor = torch.rand(shape[:-2])
    expected = tk.reference.nvfp4_prepare(codes, scale, factor, swizzle=swizzle)
    strided = torch.full((*shape[:-1], shape[-1] // 2 + 3), 0xFF, dtype=BYTE, device=device)
    strided = strided[..., 3:].copy_(codes)
    weight = tk.nvfp4_prepare(strided, scale.to(device), factor.to(device), swizzle=swizzle)
    assert torch.equal(weight.data.cpu(), expected.data)
    dense = tk.reference.nvfp4_dequantize(codes, scale, factor, swizzle=swizzle, dtype=FP32)
    out = RESTORE(weight.data, factor.to(device), *shape[-2:], FP32)
    assert torch.equal(out.cpu(), dense)


class Layer(torch.nn.Module):
    """A module that keeps a prepared weight as buffers."""

    def __init__(self, n, k):
        super().__init__()
        self.rows, self.columns = n, k
        self.register_buffer("data", torch.empty(-(-n // 64), -(-k // 64), 2304, dtype=BYTE))
        self.register_buffer("global_scale", torch.empty(()))

    def take(self, weight):
        self.data.copy_(weight.data)
        self.global_scale.copy_(weight.global_scale)

    def forward(self, x):
        weight = tk.Nvfp4Weight(self.data, self.global_scale, self.rows, self.columns)
        return tk.nvfp4_gemm(x, weight)


def through_a_file(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_state_dict(device):
    first, second = Layer(72, 96).to(device), Layer(72, 96).to(device)
    first.take(tk.nvfp4_prepare(*tk.nvfp4_quantize(torch.randn(72, 96).to(BF16).to(device))))
    x = torch.randn(5, 96).to(BF16).to(device)
    second.load_state_dict(through_a_file(first.state_dict()))
    assert torch.equal(first(x), second(x))


def test_a_weight_can_be_saved(device):
    weight = tk.nvfp4_prepare(*tk.nvfp4_quantize(torch.randn(72, 96).to(BF16).to(device)))
    again = tk.Nvfp4Weight(*through_a_file(tuple(weight))).to(device)
    assert again[2:] == (72, 96)
    assert all(torch.equal(x, y) for x, y in zip(weight[:2], again[:2], strict=True))


def zeros(*shape, dtype=BYTE):
    return torch.zeros(*shape, dtype=dtype)


ONE = torch.ones(())
WRONG_CALLS = {
    "kind": (([1], zeros(8, 2, dtype=E4M3), ONE), TypeError, "weight must be a torch.Tensor"),
    "dtype": ((zeros(8, 16, dtype=BF16), zeros(8, 2, dtype=E4M3), ONE), TypeError, "bfloat16"),
    "scale": ((zeros(8, 16), zeros(8, 2), ONE), TypeError, "block_scale is torch.uint8"),
    "global": ((zeros(8, 16), zeros(8, 2, dtype=E4M3), ONE.to(BF16)), TypeError, "global_scale"),
    "columns": ((zeros(8, 12), zeros(8, 2, dtype=E4M3), ONE), ValueError, "multiple of 16"),
    "dimensions": ((zeros(16), zeros(8, 2, dtype=E4M3), ONE), ValueError, "shape"),
    "scales": ((zeros(8, 16), zeros(8, 3, dtype=E4M3), ONE), ValueError, "block_scale"),
    "one scale": ((zeros(8, 16), zeros(8, 2, dtype=E4M3), ONE[None]), ValueError, "per matrix"),
}


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_wrong_calls(device, name):
    arguments, error, words = WRONG_CALLS[name]
    arguments = [x.to(device) if isinstance(x, torch.Tensor) else x for x in arguments]
    with pytest.raises(error, match=words):
        tk.nvfp4_prepare(*arguments, swizzle=False)


def test_restoring_what_is_none(device):
    data, factor = torch.zeros(1, 1, 2304, dtype=BYTE, device=device), ONE.to(device)
    with pytest.raises((ValueError, RuntimeError), match="no prepared weight of 65 x 16"):
        RESTORE(data, factor, 65, 16, BF16)


OPCHECKS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def test_opcheck(device):
    codes, scale = random_weight(66, 80, device=device)
    op = torch.ops.thunderkittens.nvfp4_prepare.default
    result = torch.library.opcheck(op, (codes, scale, False), test_utils=OPCHECKS)
    assert set(result.values()) == {"SUCCESS"}
    arguments = (op(codes, scale, False), torch.ones((), device=device), 66, 80, BF16)
    result = torch.library.opcheck(RESTORE, arguments, test_utils=OPCHECKS)
    assert set(result.values()) == {"SUCCESS"}


def test_vmap(device):
    codes, scale = random_weight(3, 66, 80, device=device)
    op = torch.ops.thunderkittens.nvfp4_prepare.default
    expected = op(codes, scale, False)
    out = torch.func.vmap(lambda x, y: op(x, y, False))(codes, scale)
    assert torch.equal(out, expected)
    factor = torch.rand(3, device=device)
    values = torch.func.vmap(lambda x, y: RESTORE(x, y, 66, 80, BF16))(out, factor)
    assert torch.equal(values, RESTORE(expected, factor, 66, 80, BF16))
