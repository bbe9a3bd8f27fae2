"""`attn_implementation="thunderkittens"` for the models of Hugging Face's transformers.

    import thunderkittens.integrations.transformers as integration

    integration.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="thunderkittens")

The names that models pass to their attention function are those of transformers 5 (and of 4.48 and
later); masks are made as for PyTorch's `scaled_dot_product_attention`.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.attention import attention
from .sdpa import _fits

NAME = "thunderkittens"


def register(name: str = NAME) -> None:
    """Makes `attention_forward` known to transformers under a name.

    Raises:
        ImportError: transformers is not installed, or has no attention interface.
    """
    transformers = importlib.import_module("transformers")
    masks = importlib.import_module("transformers.masking_utils")
    transformers.AttentionInterface.register(name, attention_forward)
    masks.AttentionMaskInterface.register(name, masks.sdpa_mask)


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention of a layer, as transformers calls it.

    Calls without a mask tensor, in bfloat16 or float16 on a GPU, go to `tk.attention`: causal,
    with windows, softcap and sinks. Masks of padded batches, dropout, other dtypes and CPU tensors
    go to `torch.nn.functional.scaled_dot_product_attention`.

    Args:
        module: the layer; its `is_causal` is used when the argument is None.
        query: (B, Hq, Sq, D).
        key: (B, Hkv, Sk, D).
        value: (B, Hkv, Sk, Dv).
        attention_mask: None, or a mask as `scaled_dot_product_attention` takes it.
        dropout: probability of dropping a weight.
        scaling: factor of the scores; None is 1 / sqrt(D).
        is_causal: whether a row sees no later keys, where there is no mask.
        sliding_window: a row sees so many keys, its own included.
        softcap: cap of the scores.
        s_aux: (Hq,), logits of attention sinks.
        kwargs: what else models pass is not needed.

    Returns:
        (B, Sq, Hq, Dv), and None for the weights.

    Raises:
        ValueError: a softcap or sinks together with what goes to PyTorch's function, which has
            neither.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if attention_mask is None and not dropout and _fits(query, key, value, True):
        out = attention(
            query,
            key,
            value,
            causal=bool(causal),
            window_size=(sliding_window - 1 if sliding_window else -1, -1),
            softcap=softcap or 0.0,
            sink=None if s_aux is None else s_aux.to(query.dtype),
            scale=scaling,
        )
        return out.transpose(1, 2), None
    if softcap or s_aux is not None:
        raise ValueError(
            "thunderkittens: softcap and sinks need a call without mask tensor and dropout, in "
            "bfloat16 or float16 on a GPU; attn_implementation='eager' has them elsewhere"
        )
    out = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        dropout_p=dropout,
        is_causal=bool(causal) and attention_mask is None and query.shape[2] > 1,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.transpose(1, 2).contiguous(), None
