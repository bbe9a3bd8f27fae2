"""The functions of flash-attn, on this package's attention.

Names, arguments, layouts, defaults and results are those of flash-attn 2, so a model that imports
them needs another import and nothing else:

    from thunderkittens.compat import flash_attn_func, flash_attn_varlen_func

Where the two differ: dropout is not supported, nor is `block_table` by `flash_attn_varlen_func`; a
`TypeError` says so. The LSE of a row that sees no key is -inf (in flash-attn 2 it is +inf), and
gradients through the LSE are computed, where flash-attn drops them. Head dimensions of value may
differ from those of query and key. A gradient is deterministic also when
`torch.use_deterministic_algorithms` says so. CPU tensors run the reference formula.

Caches of keys and values, paged or not, are those of `flash_attn_with_kvcache` and
`get_scheduler_metadata`, whose arguments and semantics are those of flash-attn 3. `block_table`,
flash-attn 2's name of the page table, is taken, too.
"""

from __future__ import annotations

import math
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ._compat_kvcache import flash_attn_with_kvcache, get_scheduler_metadata
from .ops.attention import attention
from .ops.attention_varlen import attention_varlen

__all__ = [
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]

Result = Tensor | tuple[Tensor, Tensor, Tensor]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Softmax attention of tensors (B, S, H, D).

    Args:
        q: (B, Sq, Hq, D), bfloat16 or float16; D up to 256. Other D than multiples of 8 are padded,
            which is a copy.
        k: (B, Sk, Hkv, D); Hq is a multiple of Hkv.
        v: (B, Sk, Hkv, Dv).
        dropout_p: 0; there is no dropout.
        softmax_scale: factor of the scores; None is 1 / sqrt(D).
        causal: whether row i sees the keys j <= i + Sk - Sq alone.
        window_size: (left, right): row i sees the keys from i + Sk - Sq - left to
            i + Sk - Sq + right; negative numbers are unbounded.
        softcap: if positive, a scaled score s becomes softcap * tanh(s / softcap).
        alibi_slopes: (Hq,) or (B, Hq), float32: slope * |i + Sk - Sq - j| is subtracted.
        deterministic: whether the gradient must have the same bits in every run.
        return_attn_probs: also return the LSE, and an empty tensor in the place of the weights,
            which flash-attn returns for tests of dropout alone.

    Returns:
        out (B, Sq, Hq, Dv), or (out, lse, empty) with lse (B, Hq, Sq), float32.

    Raises:
        TypeError: `dropout_p` is not 0; and as `tk.attention`.
        ValueError: a tensor that does not have 4 dimensions; and as `tk.attention`.
    """
    name = "flash_attn_func"
    _require_no_dropout(name, dropout_p)
    for operand, x in (("q", q), ("k", k), ("v", v)):
        _require_dims(name, operand, x, 4, "(B, S, H, D)")
    options = _options(causal, window_size, softcap, alibi_slopes, deterministic)
    scale, value_dim = _scale(q, softmax_scale), v.shape[-1]
    q, k, v = (_padded(x).transpose(1, 2) for x in (q, k, v))
    lse = None
    if return_attn_probs:
        out, lse = attention(q, k, v, scale=scale, **options, return_lse=True)
    else:
        out = attention(q, k, v, scale=scale, **options)
    return _results(out.transpose(1, 2), lse, value_dim)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Result:
    """The same of B sequences that are packed one after the other.

    Args:
        q: (Tq, Hq, D): all tokens of all sequences.
        k: (Tk, Hkv, D).
        v: (Tk, Hkv, Dv).
        cu_seqlens_q: (B + 1,), int32: 0, then the sums of the first lengths.
        cu_seqlens_k: likewise of k.
        max_seqlen_q: at least the length of q's longest sequence.
        max_seqlen_k: likewise of k.
        dropout_p: as for `flash_attn_func`, and so are all options up to `return_attn_probs`.
        softmax_scale: factor of the scores.
        causal: by the lengths of each sequence.
        window_size: likewise.
        softcap: cap of the scores.
        alibi_slopes: (Hq,) or (B, Hq), float32.
        deterministic: of the gradient.
        return_attn_probs: also return the LSE.
        block_table: None; `flash_attn_with_kvcache` takes paged keys.

    Returns:
        out (Tq, Hq, Dv), or (out, lse, empty) with lse (Hq, Tq), float32.

    Raises:
        TypeError: `dropout_p` is not 0, or `block_table` is given; and as `tk.attention_varlen`.
        ValueError: a tensor that does not have 3 dimensions; and as `tk.attention_varlen`.
    """
    name = "flash_attn_varlen_func"
    _require_no_dropout(name, dropout_p)
    if block_table is not None:
        raise TypeError(
            f"tk.compat.{name}: block_table is given; paged keys are not supported, pass packed "
            "ones and no block_table, or call tk.compat.flash_attn_with_kvcache"
        )
    for operand, x in (("q", q), ("k", k), ("v", v)):
        _require_dims(name, operand, x, 3, "(tokens, H, D)")
    options = _options(causal, window_size, softcap, alibi_slopes, deterministic)
    scale, value_dim = _scale(q, softmax_scale), v.shape[-1]
    q, k, v = (_padded(x) for x in (q, k, v))
    packing = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    lse = None
    if return_attn_probs:
        out, lse = attention_varlen(q, k, v, *packing, scale=scale, **options, return_lse=True)
    else:
        out = attention_varlen(q, k, v, *packing, scale=scale, **options)
    return _results(out, lse, value_dim)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` of q, k and v in one tensor, which are read where they are.

    Args:
        qkv: (B, S, 3, H, D).
        dropout_p: as for `flash_attn_func`, and so are all others.
        softmax_scale: factor of the scores.
        causal: whether a row sees no later keys.
        window_size: (left, right).
        softcap: cap of the scores.
        alibi_slopes: (H,) or (B, H), float32.
        deterministic: of the gradient.
        return_attn_probs: also return the LSE.

    Returns:
        out (B, S, H, D), or (out, lse, empty) with lse (B, H, S), float32.

    Raises:
        TypeError: as `flash_attn_func`.
        ValueError: as `flash_attn_func`, and qkv is not (B, S, 3, H, D).
    """
    name = "flash_attn_qkvpacked_func"
    _require_no_dropout(name, dropout_p)
    q, k, v = _unpacked(name, qkv, 5, "(B, S, 3, H, D)")
    options = (softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    args: tuple[Any, ...] = (dropout_p, *options, return_attn_probs)
    return flash_attn_func(q, k, v, *args)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_varlen_func` of q, k and v in one tensor, which are read where they are.

    Args:
        qkv: (T, 3, H, D): all tokens of all sequences.
        cu_seqlens: (B + 1,), int32: 0, then the sums of the first lengths.
        max_seqlen: at least the length of the longest sequence.
        dropout_p: as for `flash_attn_func`, and so are all others.
        softmax_scale: factor of the scores.
        causal: whether a row sees no later keys.
        window_size: (left, right).
        softcap: cap of the scores.
        alibi_slopes: (H,) or (B, H), float32.
        deterministic: of the gradient.
        return_attn_probs: also return the LSE.

    Returns:
        out (T, H, D), or (out, lse, empty) with lse (H, T), float32.

    Raises:
        TypeError: as `flash_attn_varlen_func`.
        ValueError: as `flash_attn_varlen_func`, and qkv is not (T, 3, H, D).
    """
    name = "flash_attn_varlen_qkvpacked_func"
    _require_no_dropout(name, dropout_p)
    q, k, v = _unpacked(name, qkv, 4, "(tokens, 3, H, D)")
    packing = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    options = (softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    args: tuple[Any, ...] = (*packing, dropout_p, *options, return_attn_probs)
    return flash_attn_varlen_func(q, k, v, *args)


def _require_no_dropout(name: str, dropout_p: Any) -> None:
    if dropout_p != 0:
        raise TypeError(
            f"tk.compat.{name}: dropout_p is {dropout_p}; dropout is not supported, "
            "torch.nn.functional.scaled_dot_product_attention has it"
        )


def _require_dims(name: str, operand: str, x: Any, dims: int, form: str) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(
            f"tk.compat.{name}: {operand} must be a torch.Tensor, got {type(x).__name__}"
        )
    if x.dim() != dims:
        raise ValueError(
            f"tk.compat.{name}: {operand} has shape {tuple(x.shape)}; it must have {dims} "
            f"dimensions, {form}"
        )


def _unpacked(name: str, qkv: Any, dims: int, form: str) -> tuple[Tensor, Tensor, Tensor]:
    _require_dims(name, "qkv", qkv, dims, form)
    if qkv.shape[-3] != 3:
        raise ValueError(f"tk.compat.{name}: qkv has shape {tuple(qkv.shape)}; it must be {form}")
    q, k, v = qkv.unbind(-3)
    return q, k, v


def _options(
    causal: Any, window_size: Any, softcap: float, alibi_slopes: Any, deterministic: Any
) -> dict[str, Any]:
    """As `tk.attention` takes them; what is not asked for is left to PyTorch's global setting."""
    if isinstance(window_size, tuple | list):
        window_size = tuple(max(x, -1) if isinstance(x, int) else x for x in window_size)
    return {
        "causal": bool(causal),
        "window_size": window_size,
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
        "deterministic": True if deterministic else None,
    }


def _scale(q: Tensor, softmax_scale: float | None) -> float | None:
    """The factor of the scores, of the head dimension before it is padded."""
    dim = q.shape[-1]
    if softmax_scale is None and dim % 8 != 0:
        return 1 / math.sqrt(dim)
    return softmax_scale


def _padded(x: Tensor) -> Tensor:
    """`x` with zeros behind each row where its head dimension is no multiple of 8."""
    missing = -x.shape[-1] % 8
    return F.pad(x, (0, missing)) if missing else x


def _results(out: Tensor, lse: Tensor | None, value_dim: int) -> Result:
    if out.shape[-1] != value_dim:
        out = out[..., :value_dim]
    return out if lse is None else (out, lse, out.new_empty(0))
