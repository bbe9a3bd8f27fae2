"""`tk.attention_varlen` and its gradient in plain PyTorch: `attention`, sequence by sequence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .attention import attention, attention_backward


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool | str = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    scale: float | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` on each of the sequences that are packed one after the other.

    Args:
        q: (Tq, Hq, D); sequence b has the tokens cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1.
        k: (Tk, Hkv, D), likewise by cu_seqlens_k.
        v: (Tk, Hkv, Dv).
        cu_seqlens_q: (B + 1,), integers that do not decrease, the first one 0.
        cu_seqlens_k: likewise.
        max_seqlen_q: at least the length of the longest sequence of q; not needed here.
        max_seqlen_k: likewise of k.
        causal, window_size, softcap, alibi_slopes, sink, scale, deterministic, return_lse: those of
            `attention`, for every sequence by its own lengths; alibi_slopes is (Hq,) or (B, Hq).

    Returns:
        out (Tq, Hq, Dv), or (out, lse) with lse (Hq, Tq) in the format of the computation. Tokens
        after the last sequence give 0 and an LSE of -inf.
    """
    heads, tokens = q.shape[1], q.shape[0]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    outs, lses = [], []
    stop = 0
    for index, (rows, columns) in enumerate(sequences(cu_seqlens_q, cu_seqlens_k)):
        result = attention(
            *(_dense(x, part) for x, part in zip((q, k, v), (rows, columns, columns), strict=True)),
            causal=causal,
            window_size=window_size,
            softcap=softcap,
            alibi_slopes=slopes_of(alibi_slopes, index),
            sink=sink,
            scale=scale,
            return_lse=True,
        )
        outs.append(result[0][0].transpose(0, 1))
        lses.append(result[1][0])
        stop = rows.stop
    outs.append(q.new_zeros(tokens - stop, heads, v.shape[2]))
    lses.append(q.new_full((heads, tokens - stop), -torch.inf, dtype=wide))
    out, lse = torch.cat(outs), torch.cat(lses, 1)
    return (out, lse) if return_lse else out


def attention_varlen_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    needs: tuple[bool, bool, bool, bool] = (True, True, True, True),
    **options: Any,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of `attention_varlen` with respect to q, k, v and the sink: those of `attention`,
    sequence by sequence, in blocks.

    Args:
        grad_out: gradient of out, (Tq, Hq, Dv).
        grad_lse: gradient of the LSE, (Hq, Tq), or None.
        q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes, sink: as given to `attention_varlen`.
        out, lse: as returned by it.
        needs: which of dQ, dK, dV and the sink's gradient to compute.
        options: causal, window_size, softcap and scale.

    Returns:
        (dQ, dK, dV, dsink), None for what is not needed; shapes, dtypes and order of strides of q,
        k, v and sink. Tokens outside every sequence have gradients of 0.
    """
    grads = [
        torch.zeros_like(x) if needed else None for x, needed in zip((q, k, v), needs, strict=False)
    ]
    grad_sink = torch.zeros_like(sink) if sink is not None and needs[3] else None
    for index, (rows, columns) in enumerate(sequences(cu_seqlens_q, cu_seqlens_k)):
        parts = attention_backward(
            _dense(grad_out, rows),
            None if grad_lse is None else grad_lse[:, rows].unsqueeze(0),
            _dense(q, rows),
            _dense(k, columns),
            _dense(v, columns),
            _dense(out, rows),
            lse[:, rows].unsqueeze(0),
            alibi_slopes=slopes_of(alibi_slopes, index),
            sink=sink,
            needs=needs,
            **options,
        )
        for grad, part, where in zip(grads, parts, (rows, columns, columns), strict=False):
            if grad is not None and part is not None:
                grad[where] = part[0].transpose(0, 1)
        if grad_sink is not None and parts[3] is not None:
            grad_sink += parts[3]
    return grads[0], grads[1], grads[2], grad_sink


def sequences(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Iterator[tuple[slice, slice]]:
    """The tokens of each sequence in q and in k; it reads the cumulative lengths on the host."""
    edges_q, edges_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for index in range(len(edges_q) - 1):
        yield slice(*edges_q[index : index + 2]), slice(*edges_k[index : index + 2])


def slopes_of(alibi_slopes: Tensor | None, index: int) -> Tensor | None:
    """The slopes of one sequence, (Hq,)."""
    if alibi_slopes is None or alibi_slopes.dim() == 1:
        return alibi_slopes
    return alibi_slopes[index]


def _dense(x: Tensor, tokens: slice) -> Tensor:
    """A sequence of (T, H, D) as (1, H, S, D)."""
    return x[tokens].transpose(0, 1).unsqueeze(0)
