"""Padded batches as packed sequences, without packing them.

A batch (B, S, H, D), seen as B * S tokens, is a packed sequence already, if its padding counts as
sequences too. Where the tokens of a row that are not padding stand together, four sequences per row
do: what must not be attended to has keys or queries, but not both. Their edges are computed on
the device of the mask, so that nothing is moved and nothing waits:

    queries before the row's tokens, with the keys after the tokens of the row before;
    no queries, with the keys before the row's tokens;
    the row's tokens: queries with keys, aligned at their ends;
    the queries after them, without keys.

The first has both only where one row is padded on the right and the next one on the left.
"""

from __future__ import annotations

import torch
from torch import Tensor

PARTS = 4


def token_range(
    real: Tensor | None, batch: int, keys: int, past_last: int | Tensor, device: torch.device | str
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Of each row, the first key that is no padding and the one past the last, (B,) int32 each, and
    whether padding stands between them.

    Args:
        real: (B, keys), bool: which keys are no padding; None if all are not.
        batch: B.
        keys: how many keys there are.
        past_last: keys from here on count as padding.
        device: where the results are.
    """
    if real is None:
        end = torch.zeros(batch, dtype=torch.int32, device=device) + past_last
        end = end.clamp(0, keys).to(torch.int32)
        return torch.zeros_like(end), end, None
    place = torch.arange(keys, dtype=torch.int32, device=device)
    real = real & (place < past_last)
    end = (real * (place + 1)).amax(1).to(torch.int32)
    begin = (keys - (real * (keys - place)).amax(1)).to(torch.int32).minimum(end)
    return begin, end, real.sum(1) != end - begin


def packed_edges(
    begin: Tensor, end: Tensor, first: int | Tensor, queries: int, keys: int, *, every: bool = False
) -> Tensor:
    """Cumulative lengths of queries and keys, (2, 4 * B + 1) int32.

    Args:
        begin: (B,), int32: the first key of a row that is no padding.
        end: (B,), int32: the key past the last one.
        first: the key that the first query belongs to.
        queries: how many queries a row has, padding included.
        keys: how many keys.
        every: whether no query is padding.
    """
    rows = torch.arange(begin.shape[0], dtype=torch.int32, device=begin.device)
    of_q, of_k = rows * queries, rows * keys
    if every:
        begin_q, end_q = of_q, of_q + queries
    else:
        begin_q = of_q + (begin - first).clamp(0, queries)
        end_q = of_q + (end - first).clamp(0, queries)
    edges = torch.stack(
        [
            torch.stack([begin_q, begin_q, end_q, of_q + queries], 1),
            torch.stack([of_k, of_k + begin, of_k + end, of_k + end], 1),
        ]
    )
    return torch.nn.functional.pad(edges.flatten(1), (1, 0)).to(torch.int32)


def dense_mask(
    edges: Tensor | None,
    batch: int,
    queries: int,
    keys: int,
    causal: bool,
    window: tuple[int, int],
    device: torch.device,
) -> Tensor:
    """What every query sees, (B or 1, 1, queries, keys) bool. One that sees nothing, padding for
    example, sees everything here, so that its softmax is finite."""
    i = torch.arange(queries, device=device)[:, None]
    j = torch.arange(keys, device=device)
    if edges is None:
        seen = torch.ones(1, queries, keys, dtype=torch.bool, device=device)
        diagonal = i + (keys - queries)
    else:
        rows = torch.arange(batch, device=device)
        of_row = edges[:, 1:].unflatten(1, (batch, PARTS))
        begin_q, end_q = ((of_row[0, :, n] - rows * queries)[:, None, None] for n in (0, 2))
        begin, end = ((of_row[1, :, n] - rows * keys)[:, None, None] for n in (1, 2))
        seen = (j >= begin) & (j < end) & (i >= begin_q) & (i < end_q)
        diagonal = i - end_q + end
    if causal:
        seen = seen & (j <= diagonal)
    if window[0] >= 0:
        seen = seen & (j >= diagonal - window[0])
    if window[1] >= 0 and not causal:
        seen = seen & (j <= diagonal + window[1])
    return (seen | ~seen.any(-1, keepdim=True)).unsqueeze(1)
