"""Softmax attention.

`attention` checks the operands and calls `attention_forward`, or the op `attention`, which also
returns the LSE and is differentiable, when a gradient or the LSE is wanted. Its gradient is the op
`attention_backward`; what has no kernel there goes to its overload `blocked`, the PyTorch code of
`reference/attention.py`.
"""

from __future__ import annotations

import math
from typing import Any, Literal, overload

import torch
from torch import Tensor

from .. import emulation
from ..reference.attention import attention as reference_attention
from ..reference.attention import attention_backward as reference_attention_backward
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
    require_operands,
    transform_active,
)

_forward = torch.ops.thunderkittens.attention_forward.default
_differentiable = torch.ops.thunderkittens.attention.default
_gradient = torch.ops.thunderkittens.attention_backward.default
_blocked = registration.overload("attention_backward", "blocked")


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
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
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
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


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
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
    """Softmax attention, `softmax(scale * q @ k.T + mask) @ v`, without storing the scores.

    Scores, softmax and sums are computed in float32, and the result is rounded once. Every stride
    is accepted: slices of a packed projection, (B, S, H, D) tensors seen as (B, H, S, D) and
    expanded heads are read where they are as long as the last stride is 1 and the base and the
    other strides are multiples of 16 bytes, and are copied otherwise. The memory of the gradient is
    linear in the lengths; it cannot be differentiated again, and only what requires one is
    computed. Under autocast, q, k and v are converted to the autocast dtype. Works under
    `torch.compile`, `torch.export`, `torch.func.vmap` and `torch.func.grad`; on CPU tensors it runs
    `tk.reference.attention`.

    A score is, in this order, multiplied by the scale, capped, lowered by ALiBi, and masked. The
    diagonal of row i is key d = i + Sk - Sq, or d = i with causal="upper_left".

    Dropout, arbitrary masks and changes of the scores by functions are not supported:
    `torch.nn.functional.scaled_dot_product_attention` has the former two, and
    `torch.nn.attention.flex_attention.flex_attention` the latter.

    Args:
        q: (B, Hq, Sq, D), bfloat16 or float16; D a multiple of 8 from 8 to 256. Sq may be 0.
        k: (B, Hkv, Sk, D), dtype and device of q. Hq is a multiple of Hkv: head h of q reads head
            h // (Hq / Hkv) (grouped-query attention; Hkv = 1 is multi-query attention). Sk may be
            0 and may differ from Sq.
        v: (B, Hkv, Sk, Dv), dtype and device of q; Dv, a multiple of 8 from 8 to 256, may differ
            from D.
        causal: False: no mask. True or "lower_right": row i sees the keys j <= i + Sk - Sq, so that
            the last row sees every key (what decoding with a cache and chunked prefill need).
            "upper_left": row i sees the keys j <= i (`is_causal` of
            `torch.nn.functional.scaled_dot_product_attention`).
        window_size: (left, right): row i sees the keys d - left <= j <= d + right; -1 is
            unbounded. With a causal mask, `right` has no effect.
        softcap: if positive, a scaled score s becomes softcap * tanh(s / softcap); from 2^-30 to
            2^100, in float16 to 2^11.
        alibi_slopes: (Hq,) or (B, Hq), float32: slope * |d - j| is subtracted from the scores. They
            have no gradient.
        sink: (Hq,), float32 or q's dtype: one logit per head, which takes part in the softmax like
            the score of a key whose value is 0. Differentiable.
        scale: factor of the scores, finite in float32, with alibi_slopes 0 or at least 2^-50 in
            magnitude; None is 1 / sqrt(D).
        deterministic: whether the gradient must have the same bits in every run; False allows a
            faster order of sums. None: as `torch.use_deterministic_algorithms` says. The forward
            pass always is deterministic.
        return_lse: also return the LSE.

    Returns:
        out (B, Hq, Sq, Dv) of q's dtype, with strides in the order of q's; with return_lse (out,
        lse), where lse (B, Hq, Sq), float32, is the natural logarithm of the sum of the
        exponentials of each row's scores and of the sink. A row that sees no key gives 0, and as
        its LSE -inf, or the sink's logit. Both are differentiable.

    Raises:
        TypeError: an operand is no dense tensor, has an unsupported dtype (float32 included) or one
            that differs from q's, or is on another device; an option is of the wrong type; a
            keyword of another attention, whose message names the alternative.
        ValueError: a shape that does not fit the above, an unknown causal alignment, a scale or
            softcap out of range, a negative window, or slopes that require a gradient.

    The formula is `tk.reference.attention`; the algorithm is that of Dao et al., FlashAttention,
    arXiv:2205.14135. ALiBi: Press et al., arXiv:2108.12409. Sinks: Xiao et al., arXiv:2309.17453,
    with a learned logit in place of a token.
    """
    if unknown:
        shared.refuse_keywords("attention", list(unknown))
    mode = (
        0 if causal is False else 1 if causal is True else shared.causal_mode("attention", causal)
    )
    if autocast_active():
        q, k, v = autocast_operands(q, k, v)
    attention_shape(q, k, v, mode, scale)
    options: tuple[Any, ...] = ()
    if not (
        alibi_slopes is None
        and sink is None
        and deterministic is None
        and softcap == 0.0
        and window_size == UNBOUNDED
    ):
        options = shared.call_options(
            "attention",
            q,
            q.shape[0],
            scale,
            window_size,
            softcap,
            alibi_slopes,
            sink,
            deterministic,
        )
        sink = options[4]
    if forward_mode_active():
        refuse_forward_mode("attention", q, k, v, alibi_slopes, sink)
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
        out, lse = _recorded(q, k, v, mode, scale, *options)
        return (out, lse) if return_lse else out
    result: Tensor | tuple[Tensor, Tensor] = _forward(q, k, v, mode, scale, *options)
    return result


shared.hide_catch_all(attention)


def attention_shape(
    q: Tensor, k: Tensor, v: Tensor, causal: int = 0, scale: float | None = None
) -> tuple[int, int, int]:
    """Shape of the LSE, (B, Hq, Sq); raises what `attention` documents."""
    require_operands("attention", ("q", "k", "v"), q, k, v)
    shape_q, shape_k, shape_v = q.shape, k.shape, v.shape
    if not len(shape_q) == len(shape_k) == len(shape_v) == 4:
        raise ValueError(
            f"tk.attention: q has shape {tuple(shape_q)}, k has {tuple(shape_k)}, v has "
            f"{tuple(shape_v)}; they must have 4 dimensions, (B, H, S, D)"
        )
    batch, heads, length, dim = shape_q
    batch_k, heads_k, length_k, dim_k = shape_k
    batch_v, heads_v, length_v, dim_v = shape_v
    if batch_k != batch or batch_v != batch:
        raise ValueError(
            f"tk.attention: q has batch size {batch}, k has {batch_k}, v has {batch_v}; they must "
            "be equal"
        )
    if dim_k != dim or dim_v != dim or dim % 8 != 0 or dim < 8 or dim > shared.MAX_DIM:
        shared.require_dims("attention", dim, dim_k, dim_v)
    if heads_v != heads_k or length_v != length_k:
        raise ValueError(
            f"tk.attention: k has {heads_k} heads of length {length_k}, v has {heads_v} of length "
            f"{length_v}; they must be equal"
        )
    if heads != heads_k:
        shared.require_heads("attention", heads, heads_k)
    if scale is not None or causal not in (0, 1, 2):
        shared.require_mask("attention", causal, scale)
    return (batch, heads, length)


# What the ops do beside the CUDA implementation.


def _checked(args: tuple[Any, ...]) -> tuple[Tensor, Tensor, Tensor, Options, tuple[int, ...]]:
    (q, k, v), _, options = shared.split(args, 3, False)
    shape = attention_shape(q, k, v, options.causal, options.scale)
    shared.require_op_options("attention", q, q.shape[0], options)
    return q, k, v, options, shape


def _empty_out(q: Tensor, v: Tensor) -> Tensor:
    """Memory for the output: q's strides, or, where v has another head dimension, packed, with the
    heads inside the rows where q has them there."""
    batch, heads, length, dim = q.shape
    if v.shape[3] == dim:
        return torch.empty_like(q)
    if q.stride(1) >= q.stride(2):
        return q.new_empty((batch, heads, length, v.shape[3]))
    return q.new_empty((batch, length, heads, v.shape[3])).transpose(1, 2)


def _fake(*args: Any) -> tuple[Tensor, Tensor]:
    q, _, v, _, shape = _checked(args)
    return _empty_out(q, v), q.new_empty(shape, dtype=torch.float32)


def _fake_forward(*args: Any) -> Tensor:
    return _fake(*args)[0]


def _cpu(*args: Any) -> tuple[Tensor, Tensor]:
    q, k, v, options, _ = _checked(args)
    if emulation.active():
        arrays = {"q": q, "k": k, "v": v, **options.arrays()}
        result = emulation.run("attention", arrays, **options.scalars())
        out, lse = result["out"], result["lse"]
    else:
        out, lse = reference_attention(q, k, v, **options.of_reference(), return_lse=True)
    return _empty_out(q, v).copy_(out), lse


def _cpu_forward(*args: Any) -> Tensor:
    return _cpu(*args)[0]


def _checked_backward(args: tuple[Any, ...]) -> tuple[list[Any], Options, Any]:
    operands, _, options, needs = shared.split_backward(args, False)
    grad_out, grad_lse, q, k, v, out, lse = operands
    shape = attention_shape(q, k, v, options.causal, options.scale)
    shared.require_op_options("attention", q, q.shape[0], options)
    shared.require_shapes(
        "attention_backward",
        (
            ("grad_out", grad_out, (*shape, v.shape[3])),
            ("out", out, (*shape, v.shape[3])),
            ("lse", lse, shape),
            ("grad_lse", lse if grad_lse is None else grad_lse, shape),
        ),
    )
    return operands, options, needs


def _fake_backward(*args: Any) -> tuple[Tensor, ...]:
    operands, options, needs = _checked_backward(args)
    return shared.empty_gradients(operands[2:5], options.sink, needs)


def _blocked_backward(*args: Any) -> tuple[Tensor, ...]:
    operands, options, needs = _checked_backward(args)
    grads = reference_attention_backward(*operands, **options.of_reference(), needs=tuple(needs))
    return shared.filled_gradients(grads, operands[2])


def _cpu_backward(*args: Any) -> tuple[Tensor, ...]:
    operands, options, needs = _checked_backward(args)
    if not (emulation.active() and shared.has_kernel(operands[2], operands[4], options, False)):
        return _blocked_backward(*args)
    arrays = dict(zip(("grad_out", "grad_lse", "q", "k", "v", "out", "lse"), operands, strict=True))
    return shared.emulated_backward(arrays, options, needs)


def _gradient_of(*args: Any) -> tuple[Tensor, ...]:
    """The gradient by its kernel, where there is one."""
    q, v = args[2], args[4]
    if q.is_cuda and not shared.has_kernel(q, v, args[7:], varlen=False):
        result: tuple[Tensor, ...] = _blocked(*args)
    else:
        result = _gradient(*args)
    return result


def _flops(q_shape: Any, k_shape: Any, v_shape: Any, *args: Any, **kwargs: Any) -> int:
    """Two products, masked scores included, as in PyTorch's formula of its own attention."""
    operations: int = 2 * math.prod(q_shape[:3]) * k_shape[2] * (q_shape[3] + v_shape[3])
    return operations


def _flops_backward(*args: Any, **kwargs: Any) -> int:
    _, _, q_shape, k_shape, v_shape, *_ = args
    needs = kwargs.get("needs") or shared.split_backward(args, False)[3]
    operations: int = (
        math.prod(q_shape[:3]) * k_shape[2] * shared.flops_backward(q_shape[3], v_shape[3], needs)
    )
    return operations


_recorded, _ = autograd.functions("attention", _differentiable, _gradient_of, False)

for _name, _op, _fake_op, _cpu_op in (
    ("attention_forward", _forward, _fake_forward, _cpu_forward),
    ("attention", _differentiable, _fake, _cpu),
):
    register(
        _name,
        fake=_fake_op,
        cpu=_cpu_op,
        flops=_flops,
        vmap=autograd.vmap_rule("attention", _op, False),
        autocast=3,
    )
for _name, _op, _cpu_gradient, _cuda_gradient in (
    (
        "attention_backward",
        _gradient,
        _cpu_backward,
        None if registration.compiled("attention_backward") else _blocked_backward,
    ),
    ("attention_backward.blocked", _blocked, _blocked_backward, _blocked_backward),
):
    register(
        _name,
        fake=_fake_backward,
        cpu=_cpu_gradient,
        cuda=_cuda_gradient,
        flops=_flops_backward,
        vmap=autograd.vmap_rule_backward("attention", _op, False),
    )
    torch.library.register_autograd(f"thunderkittens::{_name}", refuse_double_backward("attention"))
