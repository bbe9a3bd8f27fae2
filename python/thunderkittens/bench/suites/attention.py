"""Attention beside PyTorch's cuDNN and FlashAttention back ends, and flash-attn where installed.

The default points are those usual in the field: 16k tokens in all, so B = 16384 / N, and a model
width of 2048, so H = 2048 / D; layout (B, H, N, D). FLOPs are 4 B H N N D, half of it for a causal
mask.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..cases import Case, Expected, Implementation, Inputs, random_normal

TOKENS, WIDTH = 16384, 2048
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
HEAD_DIMS = (64, 128, 256)
RATED_LENGTH = 2048  # lengths from here on make the op's headline
SCORES = 1 << 28  # elements of a block of scores in the oracle: 1 GiB in fp32

Point = tuple[int, int, int, int, bool]  # B, H, N, D, causal


def grid(head_dims: tuple[int, ...], lengths: tuple[int, ...] = LENGTHS) -> list[Point]:
    return [
        (TOKENS // n, WIDTH // d, n, d, causal)
        for d in head_dims
        for causal in (False, True)
        for n in lengths
    ]


SHAPES: dict[str, list[Point]] = {
    "default": grid(HEAD_DIMS),
    "d64": grid((64,)),
    "d128": grid((128,)),
    "d256": grid((256,)),
    "rated": grid(HEAD_DIMS, tuple(n for n in LENGTHS if n >= RATED_LENGTH)),
    "tiny": [(1, 2, 64, 64, False), (2, 1, 33, 64, True)],
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Attention has no options of its own."""


def options(args: argparse.Namespace) -> dict[str, Any]:
    return {}


def oracle(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Iterator[Expected]:
    """softmax(q k^T / sqrt(D)) v by blocks of heads, in fp32 and at the inputs' precision."""
    batch, heads, length, dim = q.shape
    mask = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1) if causal else None

    def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-1, -2)
        scores *= dim**-0.5
        if mask is not None:
            scores.masked_fill_(mask, -torch.inf)
        return scores.softmax(-1) @ v

    head_step = max(1, min(heads, SCORES // length**2))
    batch_step = max(1, SCORES // (heads * length**2))
    for b in range(0, batch, batch_step):
        for h in range(0, heads, head_step):
            index = (slice(b, b + batch_step), slice(h, h + head_step))
            part = [tensor[index] for tensor in (q, k, v)]
            yield Expected(0, index, formula(*(tensor.float() for tensor in part)), formula(*part))


def make_case(
    batch: int, heads: int, length: int, dim: int, causal: bool, dtype: torch.dtype
) -> Case:
    """Self-attention with q, k, v of (batch, heads, length, dim)."""
    mask = "causal" if causal else "full"
    groups = [f"D={dim} {mask}"] + (
        [f"D={dim}, N >= {RATED_LENGTH}"] if length >= RATED_LENGTH else []
    )

    def make_inputs(device: torch.device, generator: torch.Generator) -> Inputs:
        shape = (batch, heads, length, dim)
        q, k, v = (random_normal(*shape, dtype=dtype, generator=generator) for _ in range(3))
        return {"q": q, "k": k, "v": v, "causal": causal}

    return Case(
        name=f"D={dim} {mask} N={length}",
        make_inputs=make_inputs,
        flops=4.0 * batch * heads * length**2 * dim / (2 if causal else 1),
        bytes=4.0 * dtype.itemsize * batch * heads * length * dim,
        groups=tuple(groups),
        parameters={
            "label": str(length),
            "direction": "forward",
            "batch": batch,
            "heads": heads,
            "length": length,
            "head_dim": dim,
            "causal": causal,
            "dtype": str(dtype).removeprefix("torch."),
        },
        oracle=oracle,
    )


def cases(shapes: str = "default", *, dtype: torch.dtype = torch.bfloat16) -> list[Case]:
    """The cases of a set of shapes. ValueError for a name there is not."""
    if shapes not in SHAPES:
        raise ValueError(f"shapes {shapes!r} is unknown; expected one of {', '.join(SHAPES)}")
    return [make_case(*point, dtype) for point in SHAPES[shapes]]


def sdpa(backend: SDPBackend) -> Implementation:
    """PyTorch's scaled_dot_product_attention held to one back end."""

    def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return attention


def flash_attn(module: str) -> Implementation | None:
    """`flash_attn_func` of a flash-attn package, which takes (B, N, H, D); None without it."""
    try:
        if importlib.util.find_spec(module) is None:
            return None
        function = importlib.import_module(module).flash_attn_func
    except (
        ImportError,
        AttributeError,
        RuntimeError,
        OSError,
    ):  # OSError: a library it needs is missing
        return None

    def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        result = function(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=causal)
        out: Tensor = result[0] if isinstance(result, tuple) else result
        return out.transpose(1, 2)

    return attention


def implementations(device: torch.device) -> dict[str, Implementation]:
    """This package's op first, then the peers that are installed."""
    import thunderkittens as tk

    def ours(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        return tk.attention(q, k, v, causal=causal)

    if device.type != "cuda":
        return {"thunderkittens": ours, "PyTorch": sdpa(SDPBackend.MATH)}
    peers = {
        "flash-attn": flash_attn("flash_attn"),
        "flash-attn-3": flash_attn("flash_attn_interface"),
        "flash-attn-4": flash_attn("flash_attn.cute"),
    }
    return {
        "thunderkittens": ours,
        "cuDNN": sdpa(SDPBackend.CUDNN_ATTENTION),
        "torch flash": sdpa(SDPBackend.FLASH_ATTENTION),
        **{name: peer for name, peer in peers.items() if peer is not None},
    }


def host_calls(device: torch.device) -> dict[str, Callable[[], Any]]:
    """Calls on one head, 128 tokens, D = 128, bf16. PyTorch chooses its back end itself."""
    import thunderkittens as tk

    q, k, v = (torch.randn(1, 1, 128, 128, dtype=torch.bfloat16, device=device) for _ in range(3))
    return {
        "thunderkittens.attention": lambda: tk.attention(q, k, v),
        "scaled_dot_product_attention": lambda: F.scaled_dot_product_attention(q, k, v),
    }
