"""`tk.nvfp4_quantize` in plain PyTorch: the recipe of NVIDIA's Transformer Engine, every operation
in float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ._block_scaled import blocks_of, swizzle_scales, to_fp8

BLOCK = 16
RANGE = 448.0 * 6.0  # of the largest scale and the largest element
LARGEST = torch.finfo(torch.float32).max
# Halfway between neighbouring values of e2m1. Where two are equally near, the even code is taken.
MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def nvfp4_quantize(
    x: Tensor,
    *,
    global_scale: Tensor | None = None,
    block: str = "1x16",
    swizzle: bool = True,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks of 16 neighbours, or of 16 x 16, each with a scale in e4m3, and a scale per matrix.

    Args:
        x: (M, K) or (B, M, K), any floating-point dtype; taken as float32.
        global_scale: float32, () or (B,); None: the largest magnitude of the matrix / 2688.
        block: "1x16" or "16x16"; the scale of a square is repeated in each of its rows.
        swizzle: whether the scales lie in the 128x4 layout.
        seed: int64, of stochastic rounding; None: to nearest even.

    Returns:
        The elements, two per byte, the first in the low four bits, as float4_e2m1fn_x2
        (..., M, K / 2); the blocks' scales; the matrices' scales.
    """
    columns = x.shape[-1]
    wide = x.to(torch.float32)
    encode, global_scale = encode_factor(wide, global_scale)
    blocks = blocks_of(wide, BLOCK)
    largest = blocks.abs().amax(-1)
    if block == "16x16":
        squares = F.pad(largest, (0, 0, 0, -x.shape[-2] % 16)).unflatten(-2, (-1, 16))
        largest = squares.amax(-2).repeat_interleave(16, -2)[..., : x.shape[-2], :]
    sixth = torch.tensor(1 / 6, dtype=torch.float32, device=x.device)
    encode = encode[..., None, None]
    # fmin and not clamp: NaN makes the scale NaN below.
    wanted = (largest * (encode * sixth)).clamp(max=LARGEST)
    scale = to_fp8(wanted, torch.float8_e4m3fn)
    factor = (1 / (scale.to(torch.float32) * (1 / encode))).clamp(max=LARGEST)
    scaled = scaled_by(blocks, factor)
    if seed is None:
        codes = nearest_code(scaled)
    else:
        # In the range of half precision.
        scaled = scaled_by(blocks, factor * 2.0**-14).double() * 2.0**14
        codes = random_code(scaled, columns, seed)
    codes = torch.where(largest.isnan().unsqueeze(-1), 7, codes)
    codes = codes.flatten(-2)[..., :columns].to(torch.uint8)
    data = (codes[..., ::2] | codes[..., 1::2] << 4).view(torch.float4_e2m1fn_x2)
    scale = scale.view(torch.uint8)
    scale = (swizzle_scales(scale) if swizzle else scale).contiguous()
    return data, scale.view(torch.float8_e4m3fn), global_scale


def encode_factor(x: Tensor, global_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """By what each matrix is multiplied, and its global scale. Both are 1 where the largest
    magnitude is 0, infinite or NaN."""
    if global_scale is None:
        if x.shape[-1] * x.shape[-2]:
            top = x.abs().amax((-1, -2))
        else:
            top = x.new_zeros(x.shape[:-2])
        usable = (top > 0) & (top <= LARGEST)
        # Both as tensors: PyTorch divides by a number, and a number by a tensor, by reciprocals.
        full = torch.full_like(top, RANGE)
        global_scale = torch.where(usable, top / full, 1.0)
        factor = (full / top).clamp(max=LARGEST)
    else:
        usable = (global_scale > 0) & (global_scale <= LARGEST)
        factor = (1 / global_scale).clamp(max=LARGEST)
        global_scale = global_scale.clone()
    return torch.where(usable & (factor > 0), factor, 1.0), global_scale


def scaled_by(blocks: Tensor, factor: Tensor) -> Tensor:
    """Elements times their block's factor. An infinity times 0, where the scales overflow, is an
    infinity too."""
    scaled = blocks * factor.unsqueeze(-1)
    return torch.where(scaled.isnan(), torch.copysign(torch.full_like(scaled, 6.0), blocks), scaled)


def nearest_code(x: Tensor) -> Tensor:
    """The e2m1 code of x, rounded to nearest even, saturated; the sign is bit 3."""
    magnitude = x.abs()
    code = torch.zeros(x.shape, dtype=torch.int64, device=x.device)
    for below, midpoint in enumerate(MIDPOINTS):
        above = magnitude >= midpoint if below % 2 else magnitude > midpoint
        code += above.long()
    return code + 8 * torch.signbit(x).long()


def random_code(x: Tensor, columns: int, seed: Tensor) -> Tensor:
    """The e2m1 code of x, rounded up with a probability that is its place between two codes."""
    magnitude = x.abs().clamp(max=6.0)
    # Its integers are the codes. In steps of 2^-9, in float64 so that it is rounded once.
    place = torch.minimum(torch.minimum(2 * magnitude, magnitude + 2), magnitude * 0.5 + 4)
    steps = (place * 512).round().long()
    batch, rows = x.shape[:-3].numel(), x.shape[-3]
    pairs, chunks = (rows + 1) // 2, -(-columns // 8)
    matrix, pair, chunk = (torch.arange(n, device=x.device) for n in (batch, pairs, chunks))
    counter = (pair[:, None] << 32 | chunk).expand(batch, pairs, chunks)
    words = torch.stack(philox(counter, seed, matrix[:, None, None].expand_as(counter)), -1)
    # Two words for each row of a pair. Of the nine bits in a word, those that begin at 0 and 7 are
    # for neighbours, those at 16 and 23 for the elements four further on.
    dice = torch.stack([words >> first & 0x1FF for first in (0, 7, 16, 23)], -1)
    dice = dice.view(batch, pairs, chunks, 2, 2, 2, 2).permute(0, 1, 3, 2, 5, 4, 6)
    dice = dice.reshape(batch, 2 * pairs, chunks * 8)[:, :rows]
    dice = F.pad(dice, (0, x.shape[-2] * BLOCK - chunks * 8)).reshape(x.shape)
    return (steps + dice >> 9) + 8 * torch.signbit(x).long()


def philox(counter: Tensor, seed: Tensor, upper: Tensor) -> list[Tensor]:
    """Philox4x32 with 10 rounds (Salmon et al., 2011) of a counter of 128 bits: four words of 32
    bits, as int64."""
    low = 0xFFFFFFFF
    seed = seed.reshape(())
    key = [seed & low, seed >> 32 & low]
    x = [counter & low, counter >> 32 & low, upper & low, upper >> 32 & low]
    for _ in range(10):
        # The products wrap, which leaves all of their 64 bits as they should be.
        a, b = x[0] * 0xD2511F53, x[2] * 0xCD9E8D57
        x = [
            (b >> 32 & low) ^ x[1] ^ key[0],
            b & low,
            (a >> 32 & low) ^ x[3] ^ key[1],
            a & low,
        ]
        key = [(key[0] + 0x9E3779B9) & low, (key[1] + 0xBB67AE85) & low]
    return x
