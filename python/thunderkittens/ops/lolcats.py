"""LoLCATS: softmax attention over a terraced window, linear attention before it, one denominator.

`lolcats` checks the operands and calls `lolcats_forward`, or the differentiable op `lolcats` when a
gradient is wanted, whose gradient is the op `lolcats_backward`.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from .. import emulation
from ..reference.lolcats import CACHE, PROMPT_ONLY, WINDOW, LolcatsState, Window
from ..reference.lolcats import lolcats_rows as reference_rows
from ._lolcats_published import published_prompt
from ._registration import (
    autocast_active,
    autocast_operands,
    forward_mode_active,
    of_any_size,
    refuse_forward_mode,
    register,
    require_operands,
)

HEAD_DIMS, FEATURES = (64, 128), (32, 64)
NAMES = ("q", "k", "v", "q_map", "k_map")
_forward = torch.ops.thunderkittens.lolcats_forward.default
_differentiable = torch.ops.thunderkittens.lolcats.default
State = LolcatsState | tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@overload
def lolcats(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_map: Tensor,
    k_map: Tensor,
    alpha: Tensor,
    beta: Tensor,
    *,
    window: Window = ...,
    initial_state: State | None = ...,
    return_state: Literal[False] = ...,
) -> Tensor: ...


@overload
def lolcats(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_map: Tensor,
    k_map: Tensor,
    alpha: Tensor,
    beta: Tensor,
    *,
    window: Window = ...,
    initial_state: State | None = ...,
    return_state: Literal[True],
) -> tuple[Tensor, LolcatsState]: ...


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


def state_parts(op: str, state: State | None) -> tuple[Tensor | None, ...]:
    """The tensors of a state, or None for each."""
    if state is None:
        return (None,) * 5
    if not isinstance(state, tuple | list) or len(state) != 5:
        raise TypeError(
            f"tk.{op}: a state must be a LolcatsState (numerator, denominator, keys, values, "
            f"lengths), got {type(state).__name__}"
        )
    if state[0] is None:
        raise TypeError(f"tk.{op}: the state's numerator must be a dense tensor, got NoneType")
    return tuple(state)


def require_window(op: str, window: str) -> None:
    if window not in ("terrace", "published"):
        raise ValueError(f'tk.{op}: window must be "terrace" or "published", got {window!r}')


class Sizes(NamedTuple):
    """What a call's tensors are made of."""

    batch: int
    heads: int
    kv_heads: int
    length: int
    dim: int
    features: int

    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        cache = (self.batch, self.kv_heads, CACHE, self.dim)
        sums = (self.batch, self.heads, 2 * self.features)
        return (*sums, self.dim), sums, cache, cache, (self.batch,)


def lolcats_shape(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_map: Tensor,
    k_map: Tensor,
    alpha: Tensor,
    beta: Tensor,
    *state: Tensor | None,
    op: str = "lolcats",
) -> Sizes:
    """The sizes of a call; raises what `lolcats` documents."""
    require_operands(op, NAMES, q, k, v, q_map, k_map)
    shape = q.shape
    for name, x, form in (("q", q, "(B, H, N, D)"), ("k", k, "(B, Hkv, N, D)")):
        if x.dim() != 4:
            raise ValueError(
                f"tk.{op}: {name} has shape {tuple(x.shape)}; it must have 4 dimensions, {form}"
            )
    batch, heads, length, dim = shape
    kv_heads = k.shape[1]
    if dim not in HEAD_DIMS:
        raise ValueError(f"tk.{op}: q has head dimension {dim}; it must be 64 or 128")
    if tuple(k.shape) != (batch, kv_heads, length, dim):
        raise ValueError(
            f"tk.{op}: k has shape {tuple(k.shape)}, q has {tuple(shape)}; batch, length and head "
            "dimension must be equal"
        )
    if (heads % kv_heads != 0 or heads == 0) if kv_heads > 0 else heads > 0:
        raise ValueError(
            f"tk.{op}: k has {kv_heads} heads, q has {heads}; q's heads must be a multiple of k's"
        )
    if v.shape != k.shape:
        raise ValueError(
            f"tk.{op}: v has shape {tuple(v.shape)}, k has {tuple(k.shape)}; they must be equal"
        )
    features = q_map.shape[-1] if q_map.dim() == 3 else 0
    if tuple(q_map.shape) != (heads, dim, features) or features not in FEATURES:
        raise ValueError(
            f"tk.{op}: q_map has shape {tuple(q_map.shape)}; it must be ({heads}, {dim}, F) with "
            "F 32 or 64"
        )
    if k_map.shape != q_map.shape:
        raise ValueError(
            f"tk.{op}: k_map has shape {tuple(k_map.shape)}, q_map has {tuple(q_map.shape)}; they "
            "must be equal"
        )
    for name, factor in (("alpha", alpha), ("beta", beta)):
        _require(op, name, factor, q, torch.float32, (heads,))
    sizes = Sizes(batch, heads, kv_heads, length, dim, features)
    if any(x is not None for x in state):
        dtypes = (torch.float32, torch.float32, q.dtype, q.dtype, torch.int32)
        parts = zip(LolcatsState._fields, state, dtypes, sizes.state_shapes(), strict=True)
        for name, part, dtype, expected in parts:
            _require(op, f"the state's {name}", part, q, dtype, expected)
    return sizes


def _require(
    op: str, name: str, x: Any, q: Tensor, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    if not isinstance(x, Tensor) or x.layout is not torch.strided:
        kind = x.layout if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"tk.{op}: {name} must be a dense tensor, got {kind}")
    if x.dtype != dtype:
        raise TypeError(f"tk.{op}: {name} is {x.dtype}; it must be {dtype}")
    if x.device != q.device:
        raise TypeError(
            f"tk.{op}: {name} is on {x.device}, q is on {q.device}; they must be on one device"
        )
    if tuple(x.shape) != shape:
        raise ValueError(f"tk.{op}: {name} has shape {tuple(x.shape)}; it must be {shape}")


# What the ops do beside the CUDA implementation.

# The dispatcher drops trailing arguments that have their default value.
DEFAULTS: tuple[Any, ...] = (None, None, None, None, None, False)


def with_defaults(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """All 13 arguments of `lolcats`: seven operands, five parts of a state, return_state."""
    return (*args, *DEFAULTS[len(args) - 7 :])


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
    for result, value in zip(results, values, strict=True):
        if result.numel() > 0:
            result.copy_(value)
    return results


def _cpu_forward(*args: Any) -> tuple[Tensor, ...]:
    return _cpu(*args)[:6]


def lolcats_flops(q_shape: Any, k_shape: Any, v_shape: Any, map_shape: Any, *_: Any) -> int:
    """Of the features, two blocks of scores and values, and the state, each product as a
    multiplication and an addition."""
    tokens, dim, features = math.prod(q_shape[:3]), q_shape[3], map_shape[2]
    return 2 * tokens * dim * (2 * features + 2 * 2 * WINDOW + 2 * 2 * features)


def _flops(*args: Any, **kwargs: Any) -> int:
    return lolcats_flops(*args)


def fold_rule(call: Any, shared: range) -> Any:
    """The rule for `torch.func.vmap`, by merging the mapped dimension into the batch. The arguments
    in `shared` have no batch and must not be mapped."""

    @of_any_size
    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        size, folded = info.batch_size, []
        for i, (x, dim) in enumerate(zip(args, in_dims, strict=True)):
            if not isinstance(x, Tensor) or i in shared:
                if isinstance(x, Tensor) and dim is not None:
                    raise RuntimeError(
                        "tk.lolcats: torch.func.vmap over maps, alpha or beta is not supported"
                    )
                folded.append(x)
                continue
            x = x.unsqueeze(0).expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
            folded.append(x.flatten(0, 1))
        results = call(*folded)
        unfolded = tuple(x.unflatten(0, (size, x.shape[0] // size)) for x in results)
        return unfolded, (0,) * len(unfolded)

    return rule


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

# The gradient registers itself.
from . import _lolcats_autograd as _lolcats_autograd  # noqa: E402
