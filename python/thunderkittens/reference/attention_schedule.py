"""`tk.attention_schedule` in plain PyTorch: the formula needs no schedule."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def attention_schedule(seq_lens: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Stands for a schedule, of which `attention_paged` of this module takes no notice.

    Args:
        seq_lens: (B,) keys of each sequence.
        args, kwargs: whatever else `tk.attention_schedule` takes.

    Returns:
        an empty tensor of int32.
    """
    return seq_lens.new_empty(0, dtype=torch.int32)
