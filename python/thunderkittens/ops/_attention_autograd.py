"""Autograd of the ops `attention` and `attention_varlen`, and their rules for `torch.func`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ._attention import DEFAULTS, Options, split, split_backward
from ._eager_autograd import differentiable
from ._gradient_call import gradient_call
from ._registration import of_any_size

Gradient = Callable[..., tuple[Tensor, ...]]
_ALIBI, _SINK = (Options._fields.index(name) for name in ("alibi_slopes", "sink"))


def functions(
    op: str, call: Callable[..., Any], gradient: Gradient, varlen: bool
) -> tuple[Callable[..., Any], Gradient]:
    """The op `call`, and its gradient, as what records gradients.

    Trailing options may be missing from a call.
    """
    first = 3 + 4 * varlen  # of the options
    any_gradient = gradient_call(op, gradient, lambda any: vmap_rule_backward(op, any, varlen))
    unneeded = (None,) * (first - 3 + _SINK)
    all_unneeded = (*unneeded, None, None)

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        options = inputs[first:]
        saved = (*inputs[:3], *output, *inputs[3 : min(first, 5)])
        if len(options) > _ALIBI:
            saved = (*saved, options[_ALIBI], (*options, None)[_SINK])
            options = (*options[:_ALIBI], None, None, *options[_SINK + 1 :])
        ctx.maxima, ctx.options = inputs[5:first], options
        ctx.save_for_backward(*saved)
        ctx.set_materialize_grads(False)

    def backward(
        ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        saved, wanted, options = ctx.saved_tensors, ctx.needs_input_grad, ctx.options
        if grad_out is None:
            grad_out = torch.zeros_like(saved[3])
        deterministic = torch.are_deterministic_algorithms_enabled()
        if len(options) <= 2 and not deterministic and wanted[0] and wanted[1] and wanted[2]:
            # Each argument costs; what is left out has its default value.
            of_q, of_k, of_v, _ = any_gradient(grad_out, grad_lse, *saved, *ctx.maxima, *options)
            return (of_q, of_k, of_v, *all_unneeded)
        slopes = sink = None
        if len(options) > _ALIBI:
            *saved, slopes, sink = saved
        if slopes is not None and wanted[first + _ALIBI]:
            raise RuntimeError(f"tk.{op}: the gradient of alibi_slopes is not computed")
        needs = [*wanted[:3], sink is not None and wanted[first + _SINK]]
        every = [*options, *DEFAULTS[len(options) :]]
        if every[-1] is not None:
            deterministic = every[-1]
        operands = (grad_out, grad_lse, *saved, *ctx.maxima)
        grads = any_gradient(*operands, *every[:_ALIBI], slopes, sink, deterministic, needs)
        of_q, of_k, of_v, of_sink = (
            x if needed else None for x, needed in zip(grads, needs, strict=True)
        )
        return (of_q, of_k, of_v, *unneeded, of_sink, None)

    rule = lambda any: vmap_rule(op, any, varlen)  # noqa: E731
    return differentiable(op, call, save, backward, rule), any_gradient


# torch.func.vmap: the mapped dimension is merged into the batch, or, as a sink has no batch and
# packed sequences have none either, into the heads.


def _fold(x: Tensor | None, dim: int | None, size: int, at: int) -> Tensor | None:
    """Merges the mapped dimension into dimension `at`."""
    if x is None:
        return None
    if dim is None:
        x = x.unsqueeze(at).expand(*x.shape[:at], size, *x.shape[at:])
    else:
        x = x.movedim(dim, at)
    return x.flatten(at, at + 1)


def _unfold(x: Tensor, size: int, at: int) -> Tensor:
    result: Tensor = x.unflatten(at, (size, x.shape[at] // size))
    return result


def _fold_options(options: Options, dims: Any, size: int, batch: int, at: int) -> tuple[Any, ...]:
    slopes = options.alibi_slopes
    if slopes is not None and (slopes.dim() > 1 or at == 1):
        dim = dims.alibi_slopes
        slopes = slopes.unsqueeze(0) if dim is None else slopes.movedim(dim, 0)
        slopes = slopes.unsqueeze(1) if slopes.dim() == 2 else slopes
        slopes = slopes.expand(size, batch, slopes.shape[2])
        slopes = _fold(slopes.contiguous(), 0, size, at)
    sink = _fold(options.sink, dims.sink, size, 0) if at == 1 else options.sink
    return tuple(options._replace(alibi_slopes=slopes, sink=sink))


def _require_common_lengths(op: str, dims: Sequence[int | None]) -> None:
    if any(dim is not None for dim in dims):
        raise ValueError(f"tk.{op}: torch.func.vmap cannot map cu_seqlens_q and cu_seqlens_k")


def vmap_rule(op: str, attend: Callable[..., Any], varlen: bool) -> Callable[..., tuple[Any, Any]]:
    """The rule for `torch.func.vmap`, on top of `attend`, which returns the output or a tuple."""

    @of_any_size
    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        size = info.batch_size
        operands, packing, options = split(args, 3, varlen)
        dims, packing_dims, option_dims = split(_dims(in_dims), 3, varlen)
        _require_common_lengths(op, packing_dims)
        at = 1 if varlen or option_dims.sink is not None else 0
        batch = packing[0].shape[0] - 1 if varlen else _length(operands[0], dims[0], 0)
        folded = [_fold(x, dim, size, at) for x, dim in zip(operands, dims, strict=True)]
        result = attend(*folded, *packing, *_fold_options(options, option_dims, size, batch, at))
        if isinstance(result, Tensor):
            return _unfold(result, size, at), at
        places = (at, 0 if varlen else at)
        return tuple(_unfold(x, size, p) for x, p in zip(result, places, strict=True)), places

    return rule


def vmap_rule_backward(op: str, gradient: Gradient, varlen: bool) -> Callable[..., tuple[Any, Any]]:
    @of_any_size
    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        size = info.batch_size
        operands, packing, options, needs = split_backward(args, varlen)
        dims, packing_dims, option_dims, _ = split_backward(_dims(in_dims), varlen)
        _require_common_lengths(op, packing_dims)
        at = 1 if varlen or option_dims.sink is not None or needs[3] else 0
        batch = packing[0].shape[0] - 1 if varlen else _length(operands[2], dims[2], 0)
        # grad_lse and lse have no dimension of values.
        places = [0 if varlen and index in (1, 6) else at for index in range(7)]
        folded = [_fold(x, dim, size, p) for x, dim, p in zip(operands, dims, places, strict=True)]
        grads = gradient(
            *folded, *packing, *_fold_options(options, option_dims, size, batch, at), needs
        )
        result_places = (at, at, at, 0)
        return (
            tuple(
                _unfold(x, size, p) if needed else x
                for x, needed, p in zip(grads, needs, result_places, strict=True)
            ),
            tuple(p if needed else None for p, needed in zip(result_places, needs, strict=True)),
        )

    return rule


def _dims(in_dims: Sequence[Any]) -> list[Any]:
    """The mapped dimension of each argument; in_dims has a list for a list."""
    return [None if isinstance(dim, list | tuple) else dim for dim in in_dims]


def _length(x: Tensor, mapped: int | None, index: int) -> int:
    """The length of a dimension, not counting the mapped one."""
    return [n for i, n in enumerate(x.shape) if mapped is None or i != mapped % x.dim()][index]
