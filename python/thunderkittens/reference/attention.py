"""`tk.attention` and its gradient in plain PyTorch.

`attention` is the definition, with the whole matrix of scores in memory. `attention_backward` is
the gradient as the library computes it: block by block, with memory that is linear in the lengths.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Scores that one block of the backward pass holds at once: 256 MiB per float32 buffer.
_BLOCK_SCORES = 1 << 26


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
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
    """`softmax(scale * q @ k.T + mask) @ v`, in float32 (in float64 when q is float64), rounded
    once to q's dtype.

    Args:
        q: (B, Hq, Sq, D), any floating-point dtype.
        k: (B, Hkv, Sk, D); Hq is a multiple of Hkv, and head h of q reads head h // (Hq / Hkv) of k
            and v.
        v: (B, Hkv, Sk, Dv).
        causal: False; True or "lower_right": row i sees the keys j <= i + Sk - Sq; "upper_left":
            j <= i.
        window_size: (left, right): row i, whose diagonal is d = i + Sk - Sq (d = i with
            "upper_left"), sees the keys d - left <= j <= d + right; -1 is unbounded. A causal mask
            puts 0 for `right`.
        softcap: if positive, a scaled score s becomes softcap * tanh(s / softcap).
        alibi_slopes: (Hq,) or (B, Hq): slope * |d - j| is subtracted, after the softcap.
        sink: (Hq,), one logit per head, which takes part in the softmax like the score of a key
            whose value is 0.
        scale: factor of the scores; None is 1 / sqrt(D).
        deterministic: without effect; this formula always is.
        return_lse: also return the natural logarithm of the sum of the exponentials of each row's
            scores, the sink among them.

    Returns:
        out (B, Hq, Sq, Dv), or (out, lse) with lse (B, Hq, Sq) in the format of the computation. A
        row that sees no key gives 0 and an LSE of -inf (of the sink's logit with a sink).
    """
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    length_q, length_k = q.shape[2], k.shape[2]
    group = q.shape[1] // max(k.shape[1], 1)
    keys, values = k.to(wide), v.to(wide)
    if group != 1:
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    low, high, diagonal = band(causal, window_size, length_q, length_k)

    scores = torch.matmul(q.to(wide), keys.mT) * _scale(scale, q.shape[3])
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    offset = _offsets(length_q, length_k, q.device)
    if alibi_slopes is not None:
        slopes = alibi_slopes.to(wide).unsqueeze(-1).unsqueeze(-1)
        scores = scores - slopes * (offset - diagonal).abs()
    if low is not None or high is not None:
        scores = scores.masked_fill(_hidden(offset, low, high), -math.inf)
    lse = scores.logsumexp(3)
    if sink is not None:
        lse = torch.logaddexp(lse, sink.to(wide).unsqueeze(1))
    weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(3))
    out = torch.matmul(weights, values).to(q.dtype)
    return (out, lse) if return_lse else out


def attention_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool | str = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    scale: float | None = None,
    needs: tuple[bool, bool, bool, bool] = (True, True, True, True),
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of `attention` with respect to q, k, v and the sink, in blocks of queries and keys.

    With P = exp(scores - lse), dP = dO V^T and delta = rowsum(dO * O) - dLSE, the gradient of the
    scores is dS = P * (dP - delta), and dQ = scale * dS K, dK = scale * dS^T Q, dV = P^T dO (Dao et
    al., FlashAttention, arXiv:2205.14135, appendix B; the term of the LSE follows from d lse / d
    scores = P). A softcap multiplies dS by the derivative of its tanh, 1 - (score / softcap)^2. The
    sink is a score whose value is 0: its gradient is -sum(exp(sink - lse) * delta) over the rows of
    the head.

    The products take operands in q's dtype on a GPU, in float32 (float64) on a CPU, and accumulate
    in float32 (float64); the order of the sums is fixed, so the result is deterministic.

    Args:
        grad_out: gradient of out, (B, Hq, Sq, Dv).
        grad_lse: gradient of the LSE, (B, Hq, Sq), or None.
        q, k, v, causal, window_size, softcap, alibi_slopes, sink, scale: as given to `attention`.
        out, lse: as returned by it.
        needs: which of dQ, dK, dV and the sink's gradient to compute.

    Returns:
        (dQ, dK, dV, dsink), None for what is not needed; shapes, dtypes and order of strides of q,
        k, v and sink.
    """
    batch, heads, length_q, dim = q.shape
    heads_kv, length_k = k.shape[1], k.shape[2]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    scale = _scale(scale, dim)
    low, high, diagonal = band(causal, window_size, length_q, length_k)
    grad_q, grad_k, grad_v = (
        torch.zeros_like(x) if needed else None for x, needed in zip((q, k, v), needs, strict=False)
    )
    delta = (grad_out.to(wide) * out.to(wide)).sum(3)
    if grad_lse is not None:
        delta = delta - grad_lse.to(wide)
    # Rows that see nothing: their weights become 0, and so must what multiplies them.
    empty = lse == -math.inf
    delta = delta.masked_fill(empty, 0.0)
    lse = lse.masked_fill(empty, math.inf)
    grad_sink = None
    if sink is not None and needs[3]:
        weights = torch.exp(sink.to(wide).unsqueeze(1) - lse)
        grad_sink = -(weights * delta).sum((0, 2)).to(sink.dtype)
    if batch * heads * length_q * length_k == 0 or not any(needs[:3]):
        return grad_q, grad_k, grad_v, grad_sink

    # A batch element and a head of k make one matrix; the heads of q that share it become further
    # rows of a query block.
    keys, values = (x.reshape(batch * heads_kv, length_k, x.shape[3]) for x in (k, v))
    sum_k, sum_v = (
        torch.zeros_like(x, dtype=wide) if needed else None
        for x, needed in zip((keys, values), needs[1:3], strict=True)
    )
    slopes = None
    if alibi_slopes is not None:
        slopes = alibi_slopes.to(wide).expand(batch, heads).reshape(batch * heads_kv, -1, 1, 1)

    block = _block_length(batch * heads)
    for start_q in range(0, length_q, block):
        stop_q = min(start_q + block, length_q)
        rows = stop_q - start_q

        def fold(x: Tensor, start: int = start_q, stop: int = stop_q) -> Tensor:
            return x[:, :, start:stop].reshape(batch * heads_kv, -1, *x.shape[3:])

        queries, grad_rows = fold(q), fold(grad_out)
        lse_rows, delta_rows = fold(lse).unsqueeze(2), fold(delta).unsqueeze(2)
        sum_q = None if grad_q is None else torch.zeros_like(queries, dtype=wide)
        first = 0 if low is None else max(start_q + low, 0) // block * block
        last = length_k if high is None else min(length_k, stop_q + high)
        for start_k in range(first, last, block):
            stop_k = min(start_k + block, length_k)
            window = slice(start_k, stop_k)
            scores = _product(queries, keys[:, window].mT).mul_(scale)
            slope = None
            if softcap:
                scores = scores.div_(softcap).tanh_()
                slope = 1.0 - scores * scores
                scores.mul_(softcap)
            by_head = scores.unflatten(1, (-1, rows))
            offset = _offsets(rows, stop_k - start_k, q.device) + (start_k - start_q)
            if slopes is not None:
                by_head.sub_(slopes * (offset - diagonal).abs())
            if (low is not None and start_k < stop_q - 1 + low) or (
                high is not None and stop_k - 1 > start_q + high
            ):
                by_head.masked_fill_(_hidden(offset, low, high), -math.inf)
            weights = scores.sub_(lse_rows).exp_()
            if sum_v is not None:
                sum_v[:, window] += _product(weights.mT, grad_rows)
            if sum_q is None and sum_k is None:
                continue
            grad_scores = _product(grad_rows, values[:, window].mT).sub_(delta_rows).mul_(weights)
            if slope is not None:
                grad_scores.mul_(slope)
            if sum_q is not None:
                sum_q += _product(grad_scores, keys[:, window])
            if sum_k is not None:
                sum_k[:, window] += _product(grad_scores.mT, queries)
        if grad_q is not None and sum_q is not None:
            grad_q[:, :, start_q:stop_q] = (sum_q * scale).reshape(batch, heads, rows, dim)
    if grad_k is not None and sum_k is not None:
        grad_k.copy_((sum_k * scale).reshape(k.shape))
    if grad_v is not None and sum_v is not None:
        grad_v.copy_(sum_v.reshape(v.shape))
    return grad_q, grad_k, grad_v, grad_sink


def band(
    causal: bool | str, window_size: tuple[int, int], length_q: int, length_k: int
) -> tuple[int | None, int | None, int]:
    """(low, high, diagonal): row i sees the keys from i + low to i + high (None: no bound), and its
    diagonal is key i + diagonal."""
    left, right = window_size
    right = 0 if causal else right
    diagonal = 0 if causal == "upper_left" else length_k - length_q
    return (
        None if left < 0 else diagonal - left,
        None if right < 0 else diagonal + right,
        diagonal,
    )


def _scale(scale: float | None, dim: int) -> float:
    return 1.0 / math.sqrt(dim) if scale is None else scale


def _offsets(rows: int, columns: int, device: torch.device) -> Tensor:
    """Column minus row."""
    return torch.arange(columns, device=device) - torch.arange(rows, device=device).unsqueeze(1)


def _hidden(offset: Tensor, low: int | None, high: int | None) -> Tensor:
    """True where a column lies outside a row's band."""
    hidden = torch.zeros_like(offset, dtype=torch.bool)
    if low is not None:
        hidden |= offset < low
    if high is not None:
        hidden |= offset > high
    return hidden


def _block_length(matrices: int) -> int:
    """Side of the square blocks of scores of the backward pass: a power of two from 64 to 4096."""
    side = math.isqrt(max(_BLOCK_SCORES // matrices, 1))
    return min(max(1 << (side.bit_length() - 1), 64), 4096)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Batched product in float32 (float64); on a GPU, `a` is rounded to the dtype of a 16-bit b."""
    if torch.float64 in (a.dtype, b.dtype):
        return torch.bmm(a.double(), b.double())
    if a.is_cuda and b.dtype in (torch.bfloat16, torch.float16):
        return torch.bmm(a.to(b.dtype), b, out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float())
