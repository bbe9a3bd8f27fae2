"""Softmax attention of packed sequences.

`attention_varlen` checks the operands and calls `attention_varlen_forward`, or the op
`attention_varlen`, which also returns the LSE and is differentiable, when a gradient or the LSE is
wanted. Its gradient is the op `attention_varlen_backward`; what has no kernel there goes to its
overload `blocked`, the PyTorch code of `reference/attention_varlen.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal, overload

import torch
from torch import Tensor

from .. import emulation
from ..reference.attention_varlen import attention_varlen as reference_attention
from ..reference.attention_varlen import (
    attention_varlen_backward as reference_attention_backward,
)
from . import _attention as shared
from . import _attention_autograd as autograd
from . import _registration as registration
from ._attention import UNBOUNDED, Causal, Options
from ._gradient_call import refuse_double_backward
from ._registration import (
    autocast_active,
    autocast_operands,
    forward_mode_active,
    refuse_forward_mode,
    register,
    require_device,
    require_operands,
    transform_active,
)

_NAME = "attention_varlen"
_forward = torch.ops.thunderkittens.attention_varlen_forward.default
_differentiable = torch.ops.thunderkittens.attention_varlen.default
_gradient = torch.ops.thunderkittens.attention_varlen_backward.default
_blocked = registration.overload("attention_varlen_backward", "blocked")


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: Causal = ...,
    window_size: tuple[int, int] = ...,
    softcap: float = ...,
    alibi_slopes: Tensor | None = ...,
    sink: Tensor | None = ...,
    scale: float | None = ...,
    deterministic: bool | None = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: Causal = ...,
    window_size: tuple[int, int] = ...,
    softcap: float = ...,
    alibi_slopes: Tensor | None = ...,
    sink: Tensor | None = ...,
    scale: float | None = ...,
    deterministic: bool | None = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: Causal = False,
    window_size: tuple[int, int] = UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    scale: float | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
    **unknown: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """`tk.attention` of each of B sequences that are packed one after the other.

    The cumulative lengths stay on the GPU: no call waits for them, and a CUDA graph or compiled
    code serves all lengths up to the two maxima. A tile at the end of a sequence neither reads nor
    writes its neighbour. Strides, gradient, autocast, `torch.compile` and `torch.func` are as for
    `tk.attention` (vmap shares the cumulative lengths); on CPU tensors it runs
    `tk.reference.attention_varlen`.

    Args:
        q: (Tq, Hq, D), bfloat16 or float16; sequence b has the tokens cu_seqlens_q[b] to
            cu_seqlens_q[b + 1] - 1.
        k: (Tk, Hkv, D), dtype and device of q, likewise by cu_seqlens_k. Heads and head dimensions
            are as for `tk.attention`.
        v: (Tk, Hkv, Dv), dtype and device of q.
        cu_seqlens_q: (B + 1,), int32, on q's device: 0, then the sums of the first lengths; they do
            not decrease and do not exceed Tq. A sequence may have no tokens, in q, in k or in both.
        cu_seqlens_k: likewise of k.
        max_seqlen_q: at least the length of q's longest sequence. Tokens beyond it in a longer one
            have undefined results (on a CPU, an error).
        max_seqlen_k: at least the length of k's longest sequence, likewise.
        causal: as for `tk.attention`, by the lengths of each sequence.
        window_size: as for `tk.attention`, likewise.
        softcap: as for `tk.attention`.
        alibi_slopes: (Hq,) or (B, Hq), float32, as for `tk.attention`.
        sink: (Hq,), as for `tk.attention`.
        scale: as for `tk.attention`; None is 1 / sqrt(D).
        deterministic: as for `tk.attention`.
        return_lse: also return the LSE.

    Returns:
        out (Tq, Hq, Dv) of q's dtype; with return_lse (out, lse), where lse is (Hq, Tq), float32.
        Tokens after the last sequence give 0, and -inf as their LSE.

    Raises:
        TypeError: as `tk.attention`; cu_seqlens_q or cu_seqlens_k is not an int32 tensor, or a
            maximum is no integer.
        ValueError: as `tk.attention`; cumulative lengths of different or no sequences, a negative
            maximum, and, on a CPU, cumulative lengths or maxima that do not fit.

    The formula is `tk.reference.attention_varlen`.
    """
    if unknown:
        shared.refuse_keywords(_NAME, list(unknown))
    mode = 0 if causal is False else 1 if causal is True else shared.causal_mode(_NAME, causal)
    if autocast_active():
        q, k, v = autocast_operands(q, k, v)
    packing = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    attention_varlen_shape(q, k, v, packing, mode, scale)
    options: tuple[Any, ...] = ()
    if not (
        alibi_slopes is None
        and sink is None
        and deterministic is None
        and softcap == 0.0
        and window_size == UNBOUNDED
    ):
        batch = cu_seqlens_q.shape[0] - 1
        options = shared.call_options(
            _NAME, q, batch, scale, window_size, softcap, alibi_slopes, sink, deterministic
        )
        sink = options[4]
    if forward_mode_active():
        refuse_forward_mode(_NAME, q, k, v, alibi_slopes, sink)
    if (
        return_lse
        or (
            torch.is_grad_enabled()
            and (
                q.requires_grad
                or k.requires_grad
                or v.requires_grad
                or (sink is not None and sink.requires_grad)
            )
        )
        or transform_active()
    ):
        out, lse = _recorded(q, k, v, *packing, mode, scale, *options)
        return (out, lse) if return_lse else out
    result: Tensor | tuple[Tensor, Tensor] = _forward(q, k, v, *packing, mode, scale, *options)
    return result


shared.hide_catch_all(attention_varlen)


def attention_varlen_shape(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packing: Sequence[Any],
    causal: int = 0,
    scale: float | None = None,
) -> tuple[int, int]:
    """Shape of the LSE, (Hq, Tq); raises what `attention_varlen` documents. `packing` holds
    cumulative lengths and maxima."""
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = packing
    require_operands(_NAME, ("q", "k", "v"), q, k, v)
    shape_q, shape_k, shape_v = q.shape, k.shape, v.shape
    if not len(shape_q) == len(shape_k) == len(shape_v) == 3:
        raise ValueError(
            f"tk.{_NAME}: q has shape {tuple(shape_q)}, k has {tuple(shape_k)}, v has "
            f"{tuple(shape_v)}; they must have 3 dimensions, (tokens, H, D)"
        )
    tokens, heads, dim = shape_q
    tokens_k, heads_k, dim_k = shape_k
    tokens_v, heads_v, dim_v = shape_v
    if dim_k != dim or dim_v != dim or dim % 8 != 0 or dim < 8 or dim > shared.MAX_DIM:
        shared.require_dims(_NAME, dim, dim_k, dim_v)
    if heads_v != heads_k or tokens_v != tokens_k:
        raise ValueError(
            f"tk.{_NAME}: k has {tokens_k} tokens of {heads_k} heads, v has {tokens_v} of "
            f"{heads_v}; they must be equal"
        )
    if heads != heads_k:
        shared.require_heads(_NAME, heads, heads_k)
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        _require_edges(name, x, q)
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            f"tk.{_NAME}: cu_seqlens_q has {cu_seqlens_q.shape[0]} elements, cu_seqlens_k has "
            f"{cu_seqlens_k.shape[0]}; they must be equal"
        )
    for name, n in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if not isinstance(n, shared.INTEGERS):
            raise TypeError(f"tk.{_NAME}: {name} must be an integer, got {type(n).__name__}")
        if n < 0:
            raise ValueError(f"tk.{_NAME}: {name} is {n}; it must not be negative")
        if isinstance(n, int) and n >= 1 << 63:
            raise ValueError(f"tk.{_NAME}: {name} is {n}; it must be below 2**63")
    if scale is not None or causal not in (0, 1, 2):
        shared.require_mask(_NAME, causal, scale)
    return (heads, tokens)


def _require_edges(name: str, x: Any, q: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"tk.{_NAME}: {name} must be a torch.Tensor, got {type(x).__name__}")
    if x.dtype is not torch.int32:
        raise TypeError(f"tk.{_NAME}: {name} is {x.dtype}; it must be torch.int32")
    require_device(_NAME, name, x, "q", q)
    if x.dim() != 1 or x.shape[0] < 1 or (x.shape[0] > 1 and x.stride(0) != 1):
        raise ValueError(
            f"tk.{_NAME}: {name} has shape {tuple(x.shape)} and strides {x.stride()}; it must be "
            "(sequences + 1,), contiguous"
        )


def _require_lengths(name: str, edges: list[int], tokens: int, longest: int) -> None:
    """Raises ValueError for cumulative lengths that contradict the other arguments."""
    lengths = [stop - start for start, stop in pairwise(edges)]
    if edges[0] != 0 or min(lengths, default=0) < 0 or edges[-1] > tokens:
        raise ValueError(
            f"tk.{_NAME}: cu_seqlens_{name} is {edges}; it must start with 0, not decrease and not "
            f"exceed the {tokens} tokens"
        )
    if max(lengths, default=0) > longest:
        raise ValueError(
            f"tk.{_NAME}: max_seqlen_{name} is {longest}; a sequence has {max(lengths)} tokens"
        )


# What the ops do beside the CUDA implementation.


def _checked(args: tuple[Any, ...]) -> tuple[list[Any], list[Any], Options, tuple[int, int]]:
    operands, packing, options = shared.split(args, 3, True)
    q, k, v = operands
    shape = attention_varlen_shape(q, k, v, packing, options.causal, options.scale)
    shared.require_op_options(_NAME, q, packing[0].shape[0] - 1, options)
    return operands, packing, options, shape


def _empty_out(q: Tensor, v: Tensor) -> Tensor:
    """Memory for the output: q's strides, or packed where v has another head dimension."""
    if v.shape[2] == q.shape[2]:
        return torch.empty_like(q)
    return q.new_empty((*q.shape[:2], v.shape[2]))


def _fake(*args: Any) -> tuple[Tensor, Tensor]:
    operands, _, _, shape = _checked(args)
    q, _, v = operands
    return _empty_out(q, v), q.new_empty(shape, dtype=torch.float32)


def _fake_forward(*args: Any) -> Tensor:
    return _fake(*args)[0]


def _cpu(*args: Any) -> tuple[Tensor, Tensor]:
    operands, packing, options, _ = _checked(args)
    q, k, v = operands
    _require_lengths("q", packing[0].tolist(), q.shape[0], packing[2])
    _require_lengths("k", packing[1].tolist(), k.shape[0], packing[3])
    if emulation.active():
        arrays = {"q": q, "k": k, "v": v, **_edges(packing), **options.arrays()}
        result = emulation.run("attention", arrays, **options.scalars(), **_maxima(packing))
        out, lse = result["out"], result["lse"]
    else:
        out, lse = reference_attention(
            *operands, *packing, **options.of_reference(), return_lse=True
        )
    return _empty_out(q, v).copy_(out), lse


def _edges(packing: list[Any]) -> dict[str, Tensor]:
    return dict(zip(("cu_seqlens_q", "cu_seqlens_k"), packing[:2], strict=True))


def _maxima(packing: list[Any]) -> dict[str, int]:
    return dict(zip(("max_seqlen_q", "max_seqlen_k"), packing[2:], strict=True))


def _cpu_forward(*args: Any) -> Tensor:
    return _cpu(*args)[0]


def _checked_backward(args: tuple[Any, ...]) -> tuple[list[Any], list[Any], Options, Any]:
    operands, packing, options, needs = shared.split_backward(args, True)
    grad_out, grad_lse, q, k, v, out, lse = operands
    shape = attention_varlen_shape(q, k, v, packing, options.causal, options.scale)
    shared.require_op_options(_NAME, q, packing[0].shape[0] - 1, options)
    out_shape = (q.shape[0], q.shape[1], v.shape[2])
    shared.require_shapes(
        "attention_varlen_backward",
        (
            ("grad_out", grad_out, out_shape),
            ("out", out, out_shape),
            ("lse", lse, shape),
            ("grad_lse", lse if grad_lse is None else grad_lse, shape),
        ),
    )
    return operands, packing, options, needs


def _fake_backward(*args: Any) -> tuple[Tensor, ...]:
    operands, _, options, needs = _checked_backward(args)
    return shared.empty_gradients(operands[2:5], options.sink, needs)


def _blocked_backward(*args: Any) -> tuple[Tensor, ...]:
    operands, packing, options, needs = _checked_backward(args)
    grads = reference_attention_backward(
        *operands, *packing[:2], **options.of_reference(), needs=tuple(needs)
    )
    return shared.filled_gradients(grads, operands[2])


def _cpu_backward(*args: Any) -> tuple[Tensor, ...]:
    operands, packing, options, needs = _checked_backward(args)
    if not (emulation.active() and shared.has_kernel(operands[2], operands[4], options, True)):
        return _blocked_backward(*args)
    names = ("grad_out", "grad_lse", "q", "k", "v", "out", "lse")
    arrays = {**dict(zip(names, operands, strict=True)), **_edges(packing)}
    return shared.emulated_backward(arrays, options, needs, **_maxima(packing))


def _gradient_of(*args: Any) -> tuple[Tensor, ...]:
    """The gradient by its kernel, where there is one."""
    q, v = args[2], args[4]
    if q.is_cuda and not shared.has_kernel(q, v, args[11:], varlen=True):
        result: tuple[Tensor, ...] = _blocked(*args)
    else:
        result = _gradient(*args)
    return result


def _flops(q_shape: Any, k_shape: Any, v_shape: Any, *args: Any, **kwargs: Any) -> int:
    """Two products, as if every sequence had max_seqlen_k keys, and masked scores included."""
    tokens, heads, dim = q_shape
    operations: int = 2 * tokens * heads * args[3] * (dim + v_shape[2])
    return operations


def _flops_backward(*args: Any, **kwargs: Any) -> int:
    (_, _, q_shape, _, v_shape, _, _), packing, _, needs = shared.split_backward(args, True)
    tokens, heads, dim = q_shape
    operations: int = tokens * heads * packing[3] * shared.flops_backward(dim, v_shape[2], needs)
    return operations


_recorded, _ = autograd.functions(_NAME, _differentiable, _gradient_of, True)

for _name, _op, _fake_op, _cpu_op in (
    (f"{_NAME}_forward", _forward, _fake_forward, _cpu_forward),
    (_NAME, _differentiable, _fake, _cpu),
):
    register(
        _name,
        fake=_fake_op,
        cpu=_cpu_op,
        flops=_flops,
        vmap=autograd.vmap_rule(_NAME, _op, True),
        autocast=3,
    )
for _name, _op, _cpu_gradient, _cuda_gradient in (
    (
        f"{_NAME}_backward",
        _gradient,
        _cpu_backward,
        None if registration.compiled(f"{_NAME}_backward") else _blocked_backward,
    ),
    (f"{_NAME}_backward.blocked", _blocked, _blocked_backward, _blocked_backward),
):
    register(
        _name,
        fake=_fake_backward,
        cpu=_cpu_gradient,
        cuda=_cuda_gradient,
        flops=_flops_backward,
        vmap=autograd.vmap_rule_backward(_NAME, _op, True),
    )
    torch.library.register_autograd(f"thunderkittens::{_name}", refuse_double_backward(_NAME))
