"""LoLCATS: softmax attention over a terraced window, linear attention before it, one denominator.

`lolcats` checks the operands and calls `lolcats_forward`, or the differentiable op `lolcats` when a
gradient is wanted, whose gradient is the op `lolcats_backward`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import emulation
from .._signatures import as_lolcats
from ..reference.lolcats import PROMPT_ONLY, LolcatsState, Window
from ..reference.lolcats import lolcats_rows as reference_rows
from . import _lolcats_autograd
from ._lolcats import (
    NAMES,
    State,
    fold_rule,
    lolcats_flops,
    lolcats_shape,
    require_window,
    state_parts,
    with_defaults,
)
from ._lolcats_published import published_prompt
from ._registration import (
    autocast_active,
    autocast_operands,
    filled,
    forward_mode_active,
    refuse_forward_mode,
    register,
)

_forward = torch.ops.thunderkittens.lolcats_forward.default
_differentiable = torch.ops.thunderkittens.lolcats.default


@as_lolcats
def lolcats(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_map: Tensor,
    k_map: Tensor,
    alpha: Tensor,
    beta: Tensor,
    *,
    window: Window = "terrace",
    initial_state: State | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, LolcatsState]:
    """Causal attention that is softmax attention over a window and linear attention before it: with
    `a_ij = q_i . k_j / sqrt(D)` and `phi(x) = [softmax(x W), softmax(-x W)]`, the weights are
    `beta exp(a_ij - max a_i)` in the window, `alpha phi_q(q_i) . phi_k(k_j)` before it, and all of
    a row are divided by their sum.

    The window of a token is its block of 64 tokens, counted from the start of the sequence, up to
    itself, and the whole block before. A result does not depend on later tokens, nor on how a
    sequence is divided into calls. window="published" is for the published models, where it has to
    be what their authors' PyTorch code computes for a prompt: the blocks are counted from its end,
    so that the first one is shorter, and up to 64 tokens every pair has the linear weight as well.
    At more tokens that are a multiple of 64, as in training, both are the same.

    The maximum, over the window, is part of the function. Time
    and memory are linear in N. Sums are kept in float32; operands of products, among them features
    and a copy of the state per 64 tokens, are rounded to q's dtype. Every stride is accepted:
    operands are read where they are as long as the last stride is 1 and the base and the other
    strides are multiples of 16 bytes, and are copied otherwise. Differentiable with respect to q,
    k, v, both maps, alpha and beta, not with respect to states; reruns have the same bits. Under
    autocast, q, k, v and the maps are converted to the autocast dtype. On CPU tensors it runs
    `tk.reference.lolcats`.

    Args:
        q: (B, H, N, D), bfloat16 or float16, D 64 or 128. B and N may be 0, H if Hkv is.
        k: (B, Hkv, N, D), dtype and device of q; H must be a multiple of Hkv.
        v: (B, Hkv, N, D), dtype and device of q.
        q_map: (H, D, F), the features' weights for q, F 32 or 64; dtype and device of q.
        k_map: (H, D, F), those for k, one for each head of q.
        alpha: (H,), float32, factor of the weights before the window.
        beta: (H,), float32, at least 0, factor of the weights in it.
        window: "terrace", or "published".
        initial_state: the state of the tokens before, as `return_state` gives it. Its sequences may
            have different lengths. None with "published", which takes whole prompts.
        return_state: also return the state after the last token: what the next call, or
            `lolcats_decode`, continues from; with "published" only the latter, with the same
            `window`.

    Returns:
        out (B, H, N, D) of q's dtype, contiguous; with return_state (out, state), a `LolcatsState`
        (numerator, denominator, keys, values, lengths).

    Raises:
        TypeError: an operand is no dense tensor, has an unsupported dtype or one that differs from
            q's, or is on another device.
        ValueError: a shape that does not fit the above, another window, or an initial state with
            "published".
        RuntimeError: a gradient with respect to a state is wanted.

    The formula is `tk.reference.lolcats`; Zhang et al., "LoLCATs: On low-rank linearizing of large
    language models", arXiv:2410.10254.
    """
    if autocast_active():
        q, k, v, q_map, k_map = autocast_operands(q, k, v, q_map, k_map)
    state = state_parts("lolcats", initial_state)
    lolcats_shape(q, k, v, q_map, k_map, alpha, beta, *state)
    require_window("lolcats", window)
    operands = (q, k, v, q_map, k_map, alpha, beta)
    if forward_mode_active():
        refuse_forward_mode("lolcats", *operands)
    gradient = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (*operands, *state)
    )
    if gradient and any(x is not None and x.requires_grad for x in state):
        raise RuntimeError(
            "tk.lolcats: there is no gradient with respect to a state; detach initial_state"
        )

    if window == "published":
        if initial_state is not None:
            raise ValueError(PROMPT_ONLY)
        found = published_prompt(operands, partial(_call, gradient), return_state)
        return found if return_state else found[0]
    out, *after = _call(gradient, *operands, *state, bool(return_state))[:6]
    return (out, LolcatsState(*after)) if return_state else out


def _call(gradient: bool, *args: Any) -> Any:
    """The op that is needed."""
    return _lolcats_autograd.recorded(*args) if gradient else _forward(*args)


def hedgehog(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qmap: Tensor,
    kmap: Tensor,
    alphas: Tensor,
    betas: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """`lolcats` under ThunderKittens' name and with its results.

    Args:
        q: (B, H, N, D).
        k: (B, H, N, D), or with fewer heads.
        v: (B, H, N, D), likewise.
        qmap: (H, D, F).
        kmap: (H, D, F).
        alphas: (H,), float32.
        betas: (H,), float32.

    Returns:
        (o, kv_state, k_state): o (B, H, N, D); the sums over all but the last 64 tokens of
        phi(k) v^T, (B, H, 2F, D), and of phi(k), (B, H, 1, 2F), in float32. Where N is no multiple
        of 64, the tokens that are left out are the last 64 + N % 64.

    Raises:
        TypeError, ValueError, RuntimeError: as `lolcats`.
    """
    out, state = lolcats(q, k, v, qmap, kmap, alphas, betas, return_state=True)
    return out, state.numerator, state.denominator.unsqueeze(2)


# What the ops do beside the CUDA implementation.


def _empty(args: tuple[Any, ...], keep_rows: bool) -> tuple[Tensor, ...]:
    *operands, return_state = with_defaults(args)
    sizes = lolcats_shape(*operands)
    q = operands[0]
    rows = (sizes.batch if keep_rows else 0, sizes.heads, sizes.length)
    if not return_state:
        sizes = sizes._replace(batch=0)
    shapes = sizes.state_shapes()
    wide = torch.float32
    return (
        q.new_empty(q.shape),
        *(q.new_empty(shape, dtype=wide) for shape in shapes[:2]),
        *(q.new_empty(shape) for shape in shapes[2:4]),
        q.new_empty(shapes[4], dtype=torch.int32),
        q.new_empty(rows, dtype=wide),
        q.new_empty(rows, dtype=wide),
    )


def _fake(*args: Any) -> tuple[Tensor, ...]:
    return _empty(args, True)


def _fake_forward(*args: Any) -> tuple[Tensor, ...]:
    return _empty(args, False)[:6]


def _cpu(*args: Any) -> tuple[Tensor, ...]:
    results = _empty(args, True)
    *operands, return_state = with_defaults(args)
    names = (*NAMES, "alpha", "beta", *LolcatsState._fields)
    values: list[Any]
    if emulation.active() and results[0].numel() > 0:
        found = emulation.run(
            "lolcats", dict(zip(names, operands, strict=True)), return_state=return_state
        )
        values = [found.get(n) for n in ("out", *LolcatsState._fields, *("maxima", "denominators"))]
    else:
        state = None if operands[7] is None else LolcatsState(*operands[7:])
        out, rows, after = reference_rows(
            *operands[:7], initial_state=state, return_state=return_state
        )
        values = [out, *(after or (None,) * 5), *rows]
    return filled(results, values)


def _cpu_forward(*args: Any) -> tuple[Tensor, ...]:
    return _cpu(*args)[:6]


def _flops(*args: Any, **kwargs: Any) -> int:
    return lolcats_flops(*args)


for _name, _op, _fake_op, _cpu_op in (
    ("lolcats_forward", _forward, _fake_forward, _cpu_forward),
    ("lolcats", _differentiable, _fake, _cpu),
):
    register(
        _name,
        fake=_fake_op,
        cpu=_cpu_op,
        flops=_flops,
        vmap=fold_rule(_op, range(3, 7)),
        autocast=5,
    )
