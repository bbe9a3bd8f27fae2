"""`tk.attention_schedule` in plain PyTorch: the formula needs no schedule."""

from __future__ import annotations

import torch
from torch import Tensor


def attention_schedule(
    seq_lens: Tensor,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    value_dim: int | None = None,
    *,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int = 1,
    cu_seqlens_k_new: Tensor | None = None,
    new_keys: int = 0,
    cache_leftpad: Tensor | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int | None = None,
    split_size: int | None = None,
    mask: bool = False,
    codes: bool = False,
) -> Tensor:
    """Stands for a schedule, of which `attention_paged` of this module takes no notice.

    Args:
        seq_lens: (B,) keys of each sequence.

    The others are those of `tk.attention_schedule`, and without effect.

    Returns:
        an empty tensor of int32.
    """
    return seq_lens.new_empty(0, dtype=torch.int32)
