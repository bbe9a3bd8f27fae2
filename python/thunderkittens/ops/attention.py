"""Softmax attention.

`attention` checks the operands and calls `attention_forward`, or the op `attention`, which also
returns the LSE and is differentiable, when a gradient or the LSE is wanted. Its gradient is the op
`attention_backward`: for now the blocked PyTorch code of `reference/attention.py` on every device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NoReturn, overload

import torch
from torch import Tensor

from .. import emulation
from ..reference.attention import attention as reference_attention
from ..reference.attention import attention_backward as reference_attention_backward
from ._registration import (
    autocast_active,
    autocast_operands,
    forward_mode_active,
    refuse_forward_mode,
    register,
    require_operands,
    transform_active,
)

Causal = bool | Literal["upper_left", "lower_right"]

# Indexed by the integer that the ops take as `causal`.
_ALIGNMENTS: tuple[Causal, ...] = (False, "lower_right", "upper_left")
_MAX_DIM = 256
_NUMBERS = (int, float, torch.SymInt, torch.SymFloat)
_forward = torch.ops.thunderkittens.attention_forward.default
_differentiable = torch.ops.thunderkittens.attention.default
_gradient = torch.ops.thunderkittens.attention_backward.default


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: Causal = ...,
    scale: float | None = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: Causal = ...,
    scale: float | None = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: Causal = False,
    scale: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention, `softmax(scale * q @ k.T + mask) @ v`, without storing the scores.

    Scores, softmax and sums are computed in float32, and the result is rounded once. Every stride
    is accepted: slices of a packed projection, (B, S, H, D) tensors seen as (B, H, S, D) and
    expanded heads are read where they are as long as the last stride is 1 and the base and the
    other strides are multiples of 16 bytes, and are copied otherwise. The gradient (also of the
    LSE) is deterministic, and its memory is linear in the lengths; it cannot be differentiated
    again. Under autocast, q, k and v are converted to the autocast dtype. Works under
    `torch.compile`, `torch.export`, `torch.func.vmap` and `torch.func.grad`; on CPU tensors it runs
    `tk.reference.attention`.

    Args:
        q: (B, Hq, Sq, D), bfloat16 or float16; D a multiple of 8 from 8 to 256. Sq may be 0.
        k: (B, Hkv, Sk, D), dtype and device of q. Hq is a multiple of Hkv: head h of q reads head
            h // (Hq / Hkv) (grouped-query attention; Hkv = 1 is multi-query attention). Sk may be
            0 and may differ from Sq.
        v: (B, Hkv, Sk, D), dtype and device of q.
        causal: False: no mask. True or "lower_right": row i sees the keys j <= i + Sk - Sq, so that
            the last row sees every key (what decoding with a cache and chunked prefill need).
            "upper_left": row i sees the keys j <= i (`is_causal` of
            `torch.nn.functional.scaled_dot_product_attention`).
        scale: factor of the scores, finite; None is 1 / sqrt(D).
        return_lse: also return the LSE.

    Returns:
        out, of q's shape and dtype, with strides in the order of q's; with return_lse (out, lse),
        where lse (B, Hq, Sq), float32, is the natural logarithm of the sum of the exponentials of
        each row's scores. A row that sees no key gives 0, and -inf as its LSE.

    Raises:
        TypeError: an operand is no dense tensor, has an unsupported dtype (float32 included) or one
            that differs from q's, or is on another device; causal or scale is of the wrong type.
        ValueError: a shape that does not fit the above, an unknown causal alignment, or a scale
            that is not finite.

    The formula is `tk.reference.attention`; the algorithm is that of Dao et al., FlashAttention,
    arXiv:2205.14135.
    """
    mode = 0 if causal is False else 1 if causal is True else _causal_mode(causal)
    if autocast_active():
        q, k, v = autocast_operands(q, k, v)
    attention_shape(q, k, v, mode, scale)
    if forward_mode_active():
        refuse_forward_mode("attention", q, k, v)
    if (
        return_lse
        or (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad))
        or transform_active()
    ):
        out, lse = _with_lse(q, k, v, mode, scale)
        return (out, lse) if return_lse else out
    return _forward(q, k, v, mode, scale)


def _with_lse(
    q: Tensor, k: Tensor, v: Tensor, mode: int, scale: float | None
) -> tuple[Tensor, Tensor]:
    op = _Function.apply if transform_active() else _differentiable
    return op(q, k, v, mode, scale)


def _causal_mode(causal: Any) -> int:
    if not isinstance(causal, str):
        raise TypeError(
            "tk.attention: causal must be False, True, 'lower_right' or 'upper_left', got "
            f"{type(causal).__name__}"
        )
    if causal not in _ALIGNMENTS:
        raise ValueError(
            f"tk.attention: causal is {causal!r}; it must be False, True, 'lower_right' or "
            "'upper_left'"
        )
    return _ALIGNMENTS.index(causal)


def attention_shape(
    q: Tensor, k: Tensor, v: Tensor, causal: int = 0, scale: float | None = None
) -> tuple[int, int, int]:
    """Shape of the LSE, (B, Hq, Sq) (the output has q's); raises what `attention` documents."""
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
    if dim % 8 != 0 or dim < 8 or dim > _MAX_DIM:
        raise ValueError(
            f"tk.attention: q has head dim {dim}; it must be a multiple of 8 from 8 to {_MAX_DIM}"
        )
    if dim_k != dim or dim_v != dim:
        raise ValueError(
            f"tk.attention: q has head dim {dim}, k has {dim_k}, v has {dim_v}; they must be equal"
        )
    if heads_v != heads_k or length_v != length_k:
        raise ValueError(
            f"tk.attention: k has {heads_k} heads of length {length_k}, v has {heads_v} of length "
            f"{length_v}; they must be equal"
        )
    if heads != heads_k and (heads_k == 0 or heads % heads_k != 0):
        raise ValueError(
            f"tk.attention: k has {heads_k} heads, q has {heads}; q's heads must be a multiple of "
            "k's"
        )
    if causal not in (0, 1, 2):
        raise ValueError(
            f"thunderkittens::attention: causal is {causal}; it must be 0 (none), 1 (lower right) "
            "or 2 (upper left)"
        )
    if scale is not None:
        if not isinstance(scale, _NUMBERS):
            raise TypeError(
                f"tk.attention: scale must be a number or None, got {type(scale).__name__}"
            )
        if scale - scale != 0:
            raise ValueError(f"tk.attention: scale is {scale}; it must be finite")
    return (batch, heads, length)


# What the ops do beside the CUDA implementation.


def _fake(
    q: Tensor, k: Tensor, v: Tensor, causal: int, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    shape = attention_shape(q, k, v, causal, scale)
    return torch.empty_like(q), q.new_empty(shape, dtype=torch.float32)


def _fake_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: int, scale: float | None = None
) -> Tensor:
    return _fake(q, k, v, causal, scale)[0]


def _cpu(
    q: Tensor, k: Tensor, v: Tensor, causal: int, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    attention_shape(q, k, v, causal, scale)
    if emulation.active():
        result = emulation.run("attention", {"q": q, "k": k, "v": v}, causal=causal, scale=scale)
        return torch.empty_like(q).copy_(result["out"]), result["lse"]
    out, lse = reference_attention(
        q, k, v, causal=_ALIGNMENTS[causal], scale=scale, return_lse=True
    )
    return torch.empty_like(q).copy_(out), lse


def _cpu_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: int, scale: float | None = None
) -> Tensor:
    return _cpu(q, k, v, causal, scale)[0]


def _check_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: int,
    scale: float | None,
) -> None:
    shape = attention_shape(q, k, v, causal, scale)
    for name, x, expected in (
        ("grad_out", grad_out, q.shape),
        ("out", out, q.shape),
        ("lse", lse, shape),
        ("grad_lse", lse if grad_lse is None else grad_lse, shape),
    ):
        if tuple(x.shape) != tuple(expected):
            raise ValueError(
                f"thunderkittens::attention_backward: {name} has shape {tuple(x.shape)}; it must "
                f"be {tuple(expected)}"
            )


def _fake_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: int,
    scale: float | None,
    needs: Sequence[bool],
) -> tuple[Tensor, ...]:
    _check_backward(grad_out, grad_lse, q, k, v, out, lse, causal, scale)
    return tuple(
        torch.empty_like(x) if needed else x.new_empty(0)
        for x, needed in zip((q, k, v), needs, strict=True)
    )


def _blocked_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: int,
    scale: float | None,
    needs: Sequence[bool],
) -> tuple[Tensor, ...]:
    _check_backward(grad_out, grad_lse, q, k, v, out, lse, causal, scale)
    grads = reference_attention_backward(
        grad_out,
        grad_lse,
        q,
        k,
        v,
        out,
        lse,
        causal=_ALIGNMENTS[causal],
        scale=scale,
        needs=(needs[0], needs[1], needs[2]),
    )
    return tuple(q.new_empty(0) if x is None else x for x in grads)


def _flops(q_shape: Any, k_shape: Any, v_shape: Any, causal: int, *args: Any, **kwargs: Any) -> int:
    """Two products, masked scores included, as in PyTorch's formula of its own attention."""
    return 4 * math.prod(q_shape) * k_shape[2]


def _flops_backward(
    grad_out: Any, grad_lse: Any, q_shape: Any, k_shape: Any, *args: Any, **kwargs: Any
) -> int:
    """Scores again, and one product each for dP (for dQ or dK), dQ, dK and dV."""
    needs_q, needs_k, needs_v = kwargs["needs"] if "needs" in kwargs else args[5]
    products = 1 + (needs_q or needs_k) + needs_q + needs_k + needs_v
    return 2 * products * math.prod(q_shape) * k_shape[2]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.causal, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None
) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:3])
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    grads = _any_gradient(grad_out, grad_lse, q, k, v, out, lse, ctx.causal, ctx.scale, needs)
    return (*(x if needed else None for x, needed in zip(grads, needs, strict=True)), None, None)


def _any_gradient(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    return (_GradientFunction.apply if transform_active() else _gradient)(*args)


def _setup_nothing(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    pass


def _backward_twice(ctx: Any, *grads: Any) -> NoReturn:
    raise RuntimeError(
        "tk.attention: the gradient cannot be differentiated again (double backward); "
        "tk.reference.attention can"
    )


def _fold(x: Tensor | None, dim: int | None, size: int) -> Tensor | None:
    """Merges the mapped dimension of `torch.func.vmap` into the batch."""
    if x is None:
        return None
    x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def _vmap_rule(attend: Callable[..., Any]) -> Callable[..., tuple[Any, Any]]:
    """The rule for `torch.func.vmap`, on top of `attend`, which returns the output or a tuple."""

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        size = info.batch_size
        folded = [_fold(x, dim, size) for x, dim in zip(args[:3], in_dims, strict=False)]
        result = attend(*folded, *args[3:])
        if isinstance(result, Tensor):
            return result.unflatten(0, (size, -1)), 0
        return tuple(x.unflatten(0, (size, -1)) for x in result), (0, 0)

    return rule


def _vmap_rule_backward(gradient: Callable[..., Any]) -> Callable[..., tuple[Any, Any]]:
    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        size, needs = info.batch_size, args[9]
        folded = [_fold(x, dim, size) for x, dim in zip(args[:7], in_dims, strict=False)]
        grads = zip(gradient(*folded, *args[7:]), needs, strict=True)
        return (
            tuple(x.unflatten(0, (size, -1)) if needed else x for x, needed in grads),
            tuple(0 if needed else None for needed in needs),
        )

    return rule


class _Function(torch.autograd.Function):
    """The differentiable op under the transforms of `torch.func`."""

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, causal: int, scale: float | None
    ) -> tuple[Tensor, Tensor]:
        return _differentiable(q, k, v, causal, scale)

    setup_context = staticmethod(_setup_context)
    backward = staticmethod(_backward)
    vmap = staticmethod(_vmap_rule(_with_lse))


class _GradientFunction(torch.autograd.Function):
    """Its gradient, likewise."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        return _gradient(*args)

    setup_context = staticmethod(_setup_nothing)
    backward = staticmethod(_backward_twice)
    vmap = staticmethod(_vmap_rule_backward(_any_gradient))


register(
    "attention_forward",
    fake=_fake_forward,
    cpu=_cpu_forward,
    flops=_flops,
    vmap=_vmap_rule(_forward),
    autocast=3,
)
register(
    "attention", fake=_fake, cpu=_cpu, flops=_flops, vmap=_vmap_rule(_differentiable), autocast=3
)
register(
    "attention_backward",
    fake=_fake_backward,
    cpu=_blocked_backward,
    cuda=_blocked_backward,
    flops=_flops_backward,
    vmap=_vmap_rule_backward(_gradient),
)
torch.library.register_autograd(
    "thunderkittens::attention", _backward, setup_context=_setup_context
)
torch.library.register_autograd("thunderkittens::attention_backward", _backward_twice)
