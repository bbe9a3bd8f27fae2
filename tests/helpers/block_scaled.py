"""Oracles of the block-scaled formats, in NumPy and float64, written from the formats' definitions:
the values of codes from their fields, rounding by search among all values, scales by arithmetic on
exact numbers, layouts by their formula, element by element."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def fp8_values(exponent_bits: int, mantissa_bits: int, codes: int) -> np.ndarray:
    """The values of the first `codes` codes, which are not negative."""
    bias = 2 ** (exponent_bits - 1) - 1
    code = np.arange(codes)
    exponent, mantissa = code >> mantissa_bits, code % 2**mantissa_bits
    fraction = mantissa / 2**mantissa_bits
    normal = (1 + fraction) * 2.0 ** (exponent - bias)
    return np.where(exponent == 0, fraction * 2.0 ** (1 - bias), normal)


E4M3 = fp8_values(4, 3, 127)
E5M2 = fp8_values(5, 2, 124)
E2M1 = fp8_values(2, 1, 8)
FORMATS = {torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2}


def nearest(x: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The code of the value nearest to |x|, the even one of two, saturated; with the sign of x in
    the bit above."""
    magnitude = np.abs(x)
    above = np.searchsorted(values, magnitude).clip(max=len(values) - 1)
    below = (above - 1).clip(min=0)
    up, down = values[above] - magnitude, magnitude - values[below]
    take_below = (down < up) | ((down == up) & (below % 2 == 0))
    code = np.where(magnitude >= values[-1], len(values) - 1, np.where(take_below, below, above))
    sign = 8 if len(values) == 8 else 128
    return (code + sign * np.signbit(x)).astype(np.uint8)


def blocks(x: np.ndarray, size: int) -> np.ndarray:
    """(R, K) as (R, blocks, size), filled up with zeros."""
    full = np.zeros((x.shape[0], -(-x.shape[1] // size) * size), dtype=x.dtype)
    full[:, : x.shape[1]] = x
    return full.reshape(x.shape[0], -1, size)


def mxfp8(x: Tensor, rule: str, dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Codes and plain scales of a matrix of a 16-bit dtype, whose magnitudes are so short that
    rounding the quotient to float32 does not matter."""
    values = FORMATS[dtype]
    parts = blocks(x.double().cpu().numpy(), 32)
    top = np.abs(parts).max(-1)
    finite = np.where(np.isfinite(top) & (top > 0), top, 1.0)
    if rule == "floor":
        exponent = np.floor(np.log2(finite)) - np.floor(np.log2(values[-1]))
    else:
        exponent = np.ceil(np.log2(finite / values[-1]))
        exponent += finite > values[-1] * 2.0**exponent
        exponent -= finite <= values[-1] * 2.0 ** (exponent - 1)
    byte = (exponent + 127).clip(0, 254)
    byte = np.where(top == 0, 0, np.where(np.isinf(top), 254, np.where(np.isnan(top), 255, byte)))
    with np.errstate(invalid="ignore"):
        codes = nearest(parts * 2.0 ** (127 - byte)[..., None], values)
    codes[np.isnan(top)] = 0x7F
    return codes.reshape(x.shape[0], -1)[:, : x.shape[1]], byte.astype(np.uint8)


def nvfp4(
    x: Tensor, given: float | None, square: bool
) -> tuple[np.ndarray, np.ndarray, np.float32]:
    """Codes (one per byte), plain scales and the global scale, in NumPy's float32 where the recipe
    says float32."""
    one, largest = np.float32(1), np.finfo(np.float32).max
    wide = x.float().cpu().numpy()
    with np.errstate(all="ignore"):
        if given is None:
            top = np.abs(wide).max() if wide.size else np.float32(0)
            usable = 0 < top < np.inf
            scale = top / np.float32(2688) if usable else one
            encode = min(np.float32(2688) / top, largest) if usable else one
        else:
            scale = np.float32(given)
            encode = min(one / scale, largest) if 0 < scale < np.inf else one
        encode = encode if encode > 0 else one
        parts = blocks(wide, 16)
        top = np.abs(parts).max(-1)
        if square:
            for first in range(0, x.shape[0], 16):
                top[first : first + 16] = top[first : first + 16].max(0)
        wanted = np.minimum(top * (encode * (one / np.float32(6))), largest)
        codes = nearest(wanted.astype(np.float64), E4M3)
        codes[np.isnan(top)] = 0x7F
        decoded = E4M3.astype(np.float32)[codes.clip(max=126)]
        factor = np.minimum(one / (decoded * (one / encode)), largest)
        scaled = parts * factor[..., None]
        scaled = np.where(np.isnan(scaled), np.copysign(6, parts), scaled)
        elements = nearest(scaled.astype(np.float64), E2M1)
    elements[np.isnan(top)] = 7
    return elements.reshape(x.shape[0], -1)[:, : x.shape[1]], codes, np.float32(scale)


def packed(elements: np.ndarray) -> np.ndarray:
    """Two codes per byte, the first in the low half."""
    return elements[:, ::2] | elements[:, 1::2] << 4


def swizzled(scale: np.ndarray) -> np.ndarray:
    """The 128x4 layout, by its formula, zero in the padding."""
    rows, columns = scale.shape
    shape = -(-rows // 128) * 128, -(-columns // 4) * 4
    flat = np.zeros(shape[0] * shape[1], dtype=scale.dtype)
    r, c = np.indices(scale.shape)
    atom = r // 128 * (shape[1] // 4) + c // 4
    flat[atom * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4] = scale
    return flat.reshape(shape)


def every_bf16() -> Tensor:
    """All bit patterns."""
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def every_largest(block: int) -> Tensor:
    """A matrix of which each bit pattern of bfloat16 is the largest magnitude of a block."""
    largest = every_bf16()
    magnitude = torch.where(largest.isfinite(), largest, 1.0).float().abs()
    x = ((torch.rand(65536, block) * 2 - 1) * magnitude.unsqueeze(1)).bfloat16()
    x[torch.arange(65536), torch.randint(0, block, (65536,))] = largest
    return x.view(-1, 4 * block)


def some_tiny() -> Tensor:
    """Subnormal numbers, zeros of both signs, and numbers next to them."""
    bits = torch.randint(0, 300, (64, 96)) * torch.randint(0, 2, (64, 96))
    return (bits | torch.randint(0, 2, (64, 96)) << 15).to(torch.int16).view(torch.bfloat16)


def same_bits(actual: Tensor, expected: np.ndarray | Tensor) -> bool:
    """Whether tensors of one-byte elements are equal, byte by byte."""
    if isinstance(expected, Tensor):
        expected = expected.view(torch.uint8).cpu().numpy()
    return np.array_equal(actual.view(torch.uint8).cpu().numpy(), expected)
