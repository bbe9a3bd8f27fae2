"""`tk.lolcats` of a prompt with window="published", from calls with the window of the kernels.

The blocks are counted from the end of the prompt: the first one is shorter, with r tokens. All that
the first two blocks see is in their windows, as it is in fewer than two blocks of the kernels: a
call of r + 64 tokens. To the other blocks, the first one is a state, of its sums, before the first
whole block: a call of all tokens from r on, with that state, whose first 64 results are left out,
because the second block has the first in its window.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..reference._lolcats_published import last_tokens, published_lolcats
from ..reference.lolcats import CACHE, WINDOW, LolcatsState, lolcats_features


def published_prompt(
    operands: tuple[Tensor, ...], call: Any, return_state: bool
) -> tuple[Tensor, Any]:
    """The output, and the state, without a gradient, if it is asked for.

    Args:
        operands: the seven of `lolcats`, valid.
        call: the op, of operands, a state's parts or none, and return_state: one of six results or,
            if a gradient is wanted, of eight, the last being the denominators of the rows.
        return_state: whether a state is wanted.
    """
    q, k, v, *factors = operands
    length, first = q.shape[2], q.shape[2] % WINDOW
    if length > WINDOW and first == 0:
        out, *after = call(*operands, *(None,) * 5, return_state)[:6]
        return out, LolcatsState(*after)
    if length <= WINDOW:
        # Few tokens, with both weights: the formula as it stands.
        out, state = published_lolcats(*(x.double() for x in operands))
        lengths = state.lengths
        sums = state.numerator.float(), state.denominator.float()
        return out.to(q.dtype), prompt_state(sums, k, v, lengths) if return_state else None
    sums = first_block_sums(k[:, :, :first], v[:, :, :first], factors[1], q.shape[1])
    begin = call(*(x[:, :, : first + WINDOW] for x in (q, k, v)), *factors)[0]
    if length <= CACHE:
        lengths = torch.full((q.shape[0],), length, dtype=torch.int32, device=q.device)
        return begin, prompt_state(sums, k, v, lengths) if return_state else None
    rest = (*(x[:, :, first:] for x in (q, k, v)), *factors)
    end, *after = call(*rest, *state_of_sums(sums, k), return_state)
    end = end[:, :, WINDOW:]
    if len(after) > 5:
        queries, denominators = q[:, :, first + WINDOW :], after[-1][:, :, WINDOW:]
        rows = end.detach(), queries.detach(), denominators.detach()
        through_sums: Callable[..., Tensor] = ThroughSums.apply
        end = end + through_sums(*sums, *rows, factors[0].detach(), factors[2].detach())
    out = torch.cat([begin, end], 2)
    if not return_state:
        return out, None
    return out, prompt_state((after[0], after[1]), k, v, after[4] + first)


def prompt_state(
    sums: tuple[Tensor, Tensor], k: Tensor, v: Tensor, lengths: Tensor
) -> LolcatsState:
    numerator, denominator, keys, values = (
        x.detach() for x in (*sums, last_tokens(k), last_tokens(v))
    )
    return LolcatsState(numerator, denominator, keys, values, lengths)


def first_block_sums(k: Tensor, v: Tensor, k_map: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Of phi(k) v^T and phi(k). Made in float64, which autocast leaves alone."""
    group = heads // max(k.shape[1], 1)
    keys, values = (x.double().repeat_interleave(group, 1) for x in (k, v))
    features = lolcats_features(keys, k_map.double())
    return torch.matmul(features.mT, values).float(), features.sum(2).float()


def state_of_sums(sums: tuple[Tensor, Tensor], k: Tensor) -> LolcatsState:
    """A state of these sums and no tokens in its caches."""
    batch, kv_heads, _, dim = k.shape
    cache = k.new_zeros(batch, kv_heads, CACHE, dim)
    lengths = torch.zeros(batch, dtype=torch.int32, device=k.device)
    numerator, denominator = (x.detach() for x in sums)
    return LolcatsState(numerator, denominator, cache, cache.clone(), lengths)


class ThroughSums(torch.autograd.Function):
    """Zeros, which carry an output's gradient with respect to the sums before it, that the op does
    not have: d out_i = alpha phi(q_i) . (d numerator - out_i d denominator) / denominator_i."""

    generate_vmap_rule = True

    @staticmethod
    def forward(numerator: Tensor, denominator: Tensor, out: Tensor, *rest: Tensor) -> Tensor:
        return torch.zeros_like(out)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[2:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        out, q, denominators, q_map, alpha = ctx.saved_tensors
        with torch.autocast(grad.device.type, enabled=False):
            grad = grad.float()
            features = lolcats_features(q.float(), q_map.float())
            features = features * (alpha[:, None] / denominators)[..., None]
            mean = (grad * out.float()).sum(-1, keepdim=True)
            gradients = torch.matmul(features.mT, grad), -(features * mean).sum(2)
        return (*gradients, *(None,) * 5)
