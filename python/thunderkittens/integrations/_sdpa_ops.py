"""What `tk.sdpa` puts in place of the ops behind `scaled_dot_product_attention`.

PyTorch's function chooses one of several ops of aten, each with a backward of its own, which
autograd calls with what the forward has returned. A pair of kernels here has the op's signature and
results: shapes, strides and the padding of the LSE are those that PyTorch's own kernels give, and
that compiled graphs were planned with. In each of them the LSE is the natural logarithm. So every
forward fits every backward, PyTorch's or ours, and no mark has to say which one has run: both sides
ask `refusal` about the same arguments, and a backward whose answer differs, because `tk.sdpa` was
enabled or disabled in between, takes what it gets. The one exception would be rows that see no key,
whose LSE is +inf in one and -inf in the other; such calls are left to PyTorch in both directions.

Dropout is left to PyTorch, so the state of the random numbers that ops return is never read.
"""

from __future__ import annotations

import functools
import math
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _build, _load, emulation
from ..ops import _attention as shared
from ..ops._eager_autograd import below_autocast
from ..ops._registration import autocast_active

Kernel = Callable[..., Any]

_forward = torch.ops.thunderkittens.attention_forward.default
_with_lse = torch.ops.thunderkittens.attention.default
_gradient = torch.ops.thunderkittens.attention_backward.default

_BF16, _FP16 = torch.bfloat16, torch.float16
_NONE, _LOWER_RIGHT, _UPPER_LEFT = 0, 1, 2  # as the ops take `causal`
_UNBOUNDED = (-1, -1, 0.0, None, None)  # window, softcap, slopes and sink of a plain call
_MOST_ROWS = 1 << 28  # of all heads and batches together; the kernels count tiles of 64 in as much
_EFFICIENT_ROWS = 32  # the efficient op rounds the rows of its LSE up to a multiple

# Ops of which csrc/autograd/sdpa.cpp, where it is built, takes the plain calls, before the kernels
# below; in the order in which it counts.
IN_CPP = tuple(
    f"_scaled_dot_product_{name}_attention{backward}"
    for name in ("flash", "cudnn")
    for backward in ("", "_backward")
)

MASK = "a mask tensor"
DEBUG_MASK = "the debug mask is asked for"
EMPTY_ROWS = "rows that see no key"


# What is counted.


class SdpaCall(NamedTuple):
    """A line of `tk.sdpa_report`."""

    op: str  # of aten, that PyTorch has chosen
    taken: bool  # by the kernels of this package, not left to PyTorch's
    reason: str  # why it was left to PyTorch, else empty
    calls: int


class SdpaReport(tuple[SdpaCall, ...]):
    """The lines of `tk.sdpa_report`; as text, a table."""

    __slots__ = ()

    def __str__(self) -> str:
        if not self:
            return "no call of scaled_dot_product_attention has come by"
        width = max(len(call.op) for call in self)
        return "\n".join(
            f"{call.calls:>8}  {call.op:<{width}}  "
            + ("thunderkittens" if call.taken else f"PyTorch: {call.reason}")
            for call in self
        )


class _Tally(threading.local):
    """The counts of one thread, which needs no lock to count."""

    def __init__(self) -> None:
        self.counts: dict[tuple[str, str | None], int] = {}
        with _lock:
            _tallies.append(self.counts)


_lock = threading.Lock()
_tallies: list[dict[tuple[str, str | None], int]] = []
_reported: Counter[tuple[str, str | None]] = Counter()  # by a report that was the last of its kind
_tally = _Tally()


def _count(op: str, reason: str | None) -> None:
    counts, key = _tally.counts, (op, reason)
    counts[key] = counts.get(key, 0) + 1


def report(reset: bool) -> SdpaReport:
    with _lock:
        total: Counter[tuple[str, str | None]] = Counter()
        for counts in _tallies:
            total.update(dict(counts))
        if _load.has_nodes:
            taken = torch.ops.thunderkittens_sdpa.counts()
            total.update({(op, None): n for op, n in zip(IN_CPP, taken, strict=True) if n})
        new = total - _reported
        if reset:
            _reported.clear()
            _reported.update(total)
    return SdpaReport(
        SdpaCall(op, not reason, reason, calls)
        for op, _, reason, calls in sorted((op, -n, why or "", n) for (op, why), n in new.items())
    )


# Which calls are taken.


@functools.cache
def _device_refusal(index: int) -> str | None:
    if _load.cuda_problem is not None:
        return _load.cuda_problem
    if "attention" not in _build.record()["families"]:
        return "this build has no kernels of attention"
    device = shared._device_properties(index)
    reason: str = _load.compiled_module().no_code_for(device, "attention")
    if not reason and _load.has_nodes:
        torch.ops.thunderkittens_sdpa.allow(index)
    return reason or None


def refusal(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float, scale: float | None
) -> str | None:
    """Why a call is left to PyTorch, whatever its mask; None where it is taken.

    It looks at what does not change between a forward and its backward, and reads no values.
    """
    if dropout_p != 0.0:
        return "dropout"
    dtype = query.dtype
    if (dtype is not _BF16 and dtype is not _FP16) or not key.dtype is value.dtype is dtype:
        return f"dtypes {dtype}, {key.dtype}, {value.dtype}"
    shape_q, shape_k, shape_v = query.shape, key.shape, value.shape
    if not len(shape_q) == len(shape_k) == len(shape_v) == 4:
        return "tensors that do not have 4 dimensions"
    batch, heads, length, dim = shape_q
    batch_k, heads_k, length_k, dim_k = shape_k
    batch_v, heads_v, length_v, dim_v = shape_v
    if not (batch == batch_k == batch_v and heads_k == heads_v and length_k == length_v):
        return "shapes that are broadcast"
    if dim != dim_k or dim % 8 or dim_v % 8 or not (8 <= dim <= 256 and 8 <= dim_v <= 256):
        return f"head dims {dim}, {dim_k}, {dim_v}"
    if not (batch and heads and heads_k and length and length_k):
        return "an empty tensor"
    if heads % heads_k:
        return f"{heads} heads that are no multiple of {heads_k}"
    if batch * heads * length > _MOST_ROWS or length_k > _MOST_ROWS:
        return "too many rows"
    if scale is not None and not -shared.FLOAT_MAX <= scale <= shared.FLOAT_MAX:
        return "a scale that is not finite"
    index = query.get_device()
    if index >= 0:
        return _device_refusal(index)
    return None if emulation.active() else "CPU tensors outside of tk.emulate()"


def _flash_refusal(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float, scale: float | None
) -> str | None:
    """The same for the ops whose output has the shape of the query."""
    reason = refusal(query, key, value, dropout_p, scale)
    if reason is None and value.shape[3] != query.shape[3]:
        return "another head dim of the value"
    return reason


# Calls of this package's ops, below autograd, where kernels run.


def _call(op: Kernel, *args: Any) -> Any:
    return below_autocast(op, *args) if autocast_active() else op(*args)


def _gradients(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: int,
    scale: float | None,
) -> Any:
    """The gradients of query, key and value, which the ops return whichever are needed, and an
    empty tensor."""
    args = (grad_out, None, query, key, value, out, lse, causal, scale)
    if torch.are_deterministic_algorithms_enabled():
        return _call(_gradient, *args, *_UNBOUNDED, True)
    return _call(_gradient, *args)


# Results beside those of the kernels: the state of the random numbers, which nothing reads, and for
# flash attention an empty debug mask. PyTorch's efficient attention has its state on the CPU, and
# while a CUDA graph is recorded, whose results must be there, on the GPU; flash attention takes it
# from either, and the gradient of cuDNN's from the GPU alone. As allocations cost more than all
# else here, calls share what is on the CPU. Autograd saves it, which it cannot do with tensors that
# are made in inference mode.

_capturing = torch.cuda.is_current_stream_capturing
with torch.inference_mode(False):
    _FLASH_STATE = tuple(torch.zeros(n, dtype=torch.uint64, device="cpu") for n in ((2,), ()))
    _STATE = tuple(torch.zeros((), dtype=torch.int64, device="cpu") for _ in range(2))
_debug_masks: dict[tuple[int, torch.dtype], Tensor] = {}


def _random_state(query: Tensor, flash: bool, beside: bool = False) -> tuple[Tensor, ...]:
    """`beside`: on the query's device in any case."""
    state = _FLASH_STATE if flash else _STATE
    if query.is_cuda and (beside or _capturing()):
        return tuple(query.new_empty(x.shape, dtype=x.dtype) for x in state)
    return state


def _debug_mask(query: Tensor) -> Tensor:
    """An empty tensor, which has no memory that could belong to anything."""
    place = (query.get_device(), query.dtype)
    mask = _debug_masks.get(place)
    if mask is None:
        with torch.inference_mode(False):
            mask = _debug_masks[place] = query.new_empty(0)
    return mask


def _laid_out(x: Tensor, order: Sequence[int]) -> Tensor:
    """`x`, copied unless its memory is dense in this order of dimensions, the last one inmost."""
    expected = 1
    for dim in reversed(order):
        size = x.shape[dim]
        if size != 1:
            if x.stride(dim) != expected:
                inverse = sorted(range(len(order)), key=order.__getitem__)
                return x.permute(*order).contiguous().permute(*inverse)
            expected *= size
    return x


@functools.lru_cache(maxsize=256)
def _cudnn_order(shape: torch.Size, strides: tuple[int, ...], value_dim: int) -> list[int]:
    """The dimensions of cuDNN's output, the outermost in memory first, for a query of such strides.

    Versions of PyTorch differ about expanded queries: the function for tensors without data tells.
    """
    query = torch.empty_strided(shape, strides, dtype=_BF16, device="meta")
    value = query.new_empty((*shape[:3], value_dim))
    op = torch.ops.aten._scaled_dot_product_cudnn_attention.default
    planned: tuple[int, ...] = op(query, query, value, None, False)[0].stride()
    return sorted(range(4), key=planned.__getitem__, reverse=True)


_BY_ROWS = (0, 2, 1, 3)  # (B, S, H, D) in memory


# The pairs of kernels, each from the two of PyTorch that take the calls that are left to it.


def flash_attention(torch_forward: Kernel, torch_backward: Kernel) -> tuple[Kernel, Kernel]:
    """For `_scaled_dot_product_flash_attention`, where causal masks are aligned to the lower right
    corner. LSE (B, H, S)."""
    name = "_scaled_dot_product_flash_attention"
    name_backward = f"{name}_backward"

    def refused(is_causal: bool, query: Tensor, key: Tensor, *args: Any) -> str | None:
        reason = _flash_refusal(query, key, *args)
        if reason is None and is_causal and query.shape[2] > key.shape[2]:
            return EMPTY_ROWS
        return reason

    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        return_debug_mask: bool = False,
        *,
        scale: float | None = None,
    ) -> Any:
        reason = refused(is_causal, query, key, value, dropout_p, scale)
        if return_debug_mask:
            reason = DEBUG_MASK
        _count(name, reason)
        if reason is not None:
            return torch_forward(
                query, key, value, dropout_p, is_causal, return_debug_mask, scale=scale
            )
        causal = _LOWER_RIGHT if is_causal else _NONE
        out, lse = _call(_with_lse, query, key, value, causal, scale)
        lengths = (query.shape[2], key.shape[2])
        return out, lse, None, None, *lengths, *_random_state(query, True), _debug_mask(query)

    def backward(
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        cum_seq_q: Tensor | None,
        cum_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        philox_seed: Tensor,
        philox_offset: Tensor,
        *,
        scale: float | None = None,
    ) -> Any:
        reason = refused(is_causal, query, key, value, dropout_p, scale)
        _count(name_backward, reason)
        if reason is not None:
            saved = (out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal)
            state = (philox_seed, philox_offset)
            return torch_backward(grad_out, query, key, value, *saved, *state, scale=scale)
        causal = _LOWER_RIGHT if is_causal else _NONE
        grads = _gradients(grad_out, query, key, value, out, logsumexp, causal, scale)
        return grads[:3]

    return forward, backward


def cudnn_attention(torch_forward: Kernel, torch_backward: Kernel) -> tuple[Kernel, Kernel]:
    """For `_scaled_dot_product_cudnn_attention`, where causal masks are aligned to the upper left
    corner. LSE (B, H, S, 1)."""
    name = "_scaled_dot_product_cudnn_attention"
    name_backward = f"{name}_backward"

    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_bias: Tensor | None,
        compute_log_sumexp: bool,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        return_debug_mask: bool = False,
        *,
        scale: float | None = None,
    ) -> Any:
        reason = refusal(query, key, value, dropout_p, scale)
        if attn_bias is not None:
            reason = MASK
        elif return_debug_mask:
            reason = DEBUG_MASK
        _count(name, reason)
        if reason is not None:
            options = (attn_bias, compute_log_sumexp, dropout_p, is_causal, return_debug_mask)
            return torch_forward(query, key, value, *options, scale=scale)
        causal = _UPPER_LEFT if is_causal else _NONE
        lengths = (query.shape[2], key.shape[2])
        state: tuple[Any, ...]
        if compute_log_sumexp:
            out, lse = _call(_with_lse, query, key, value, causal, scale)
            random_state = _random_state(query, False, beside=True)
            state = (lse.unsqueeze(3), None, None, *lengths, *random_state, None)
        else:
            out = _call(_forward, query, key, value, causal, scale)
            state = (None, None, None, *lengths, None, None, None)
        if value.shape[3] != query.shape[3]:
            out = _laid_out(out, _cudnn_order(query.shape, query.stride(), value.shape[3]))
        return out, *state

    def backward(
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        philox_seed: Tensor,
        philox_offset: Tensor,
        attn_bias: Tensor | None,
        cum_seq_q: Tensor | None,
        cum_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        *,
        scale: float | None = None,
    ) -> Any:
        reason = refusal(query, key, value, dropout_p, scale)
        if attn_bias is not None:
            reason = MASK
        _count(name_backward, reason)
        if reason is not None:
            saved = (out, logsumexp, philox_seed, philox_offset, attn_bias, cum_seq_q, cum_seq_k)
            options = (max_q, max_k, dropout_p, is_causal)
            return torch_backward(grad_out, query, key, value, *saved, *options, scale=scale)
        causal = _UPPER_LEFT if is_causal else _NONE
        lse = logsumexp.squeeze(3) if logsumexp.dim() == 4 else logsumexp
        return _gradients(grad_out, query, key, value, out, lse, causal, scale)[:3]

    return forward, backward


def efficient_attention(torch_forward: Kernel, torch_backward: Kernel) -> tuple[Kernel, Kernel]:
    """For `_scaled_dot_product_efficient_attention`, where causal masks are aligned to the upper
    left corner. LSE (B, H, S rounded up), +inf beyond S; output and gradients by rows in memory."""
    name = "_scaled_dot_product_efficient_attention"
    name_backward = f"{name}_backward"

    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_bias: Tensor | None,
        compute_log_sumexp: bool,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
    ) -> Any:
        reason = MASK if attn_bias is not None else refusal(query, key, value, dropout_p, scale)
        _count(name, reason)
        if reason is not None:
            options = (attn_bias, compute_log_sumexp, dropout_p, is_causal)
            return torch_forward(query, key, value, *options, scale=scale)
        causal = _UPPER_LEFT if is_causal else _NONE
        batch, heads, length, _ = query.shape
        if compute_log_sumexp:
            out, lse = _call(_with_lse, query, key, value, causal, scale)
            rows = -(-length // _EFFICIENT_ROWS) * _EFFICIENT_ROWS
            if rows != length:
                padded = lse.new_full((batch, heads, rows), math.inf)
                padded[:, :, :length] = lse
                lse = padded
        else:
            out = _call(_forward, query, key, value, causal, scale)
            lse = out.new_empty((batch, heads, 0), dtype=torch.float32)
        return _laid_out(out, _BY_ROWS), lse, *_random_state(query, False)

    def backward(
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_bias: Tensor | None,
        out: Tensor,
        logsumexp: Tensor,
        philox_seed: Tensor,
        philox_offset: Tensor,
        dropout_p: float,
        grad_input_mask: Sequence[bool],
        is_causal: bool = False,
        *,
        scale: float | None = None,
    ) -> Any:
        reason = MASK if attn_bias is not None else refusal(query, key, value, dropout_p, scale)
        _count(name_backward, reason)
        if reason is not None:
            saved = (attn_bias, out, logsumexp, philox_seed, philox_offset)
            options = (dropout_p, grad_input_mask, is_causal)
            return torch_backward(grad_out, query, key, value, *saved, *options, scale=scale)
        causal = _UPPER_LEFT if is_causal else _NONE
        lse = logsumexp[:, :, : query.shape[2]]
        grads = _gradients(grad_out, query, key, value, out, lse, causal, scale)
        return *(_laid_out(x, _BY_ROWS) for x in grads[:3]), None

    return forward, backward


def flash_attention_for_cpu(torch_forward: Kernel, torch_backward: Kernel) -> tuple[Kernel, Kernel]:
    """For `_scaled_dot_product_flash_attention_for_cpu`, under `tk.emulate`; causal masks are
    aligned to the upper left corner. LSE (B, H, S) with adjacent heads, gradients by rows."""
    name = "_scaled_dot_product_flash_attention_for_cpu"
    name_backward = f"{name}_backward"

    def refused(attn_mask: Tensor | None, *args: Any) -> str | None:
        return MASK if attn_mask is not None else _flash_refusal(*args)

    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        attn_mask: Tensor | None = None,
        scale: float | None = None,
    ) -> Any:
        reason = refused(attn_mask, query, key, value, dropout_p, scale)
        _count(name, reason)
        if reason is not None:
            options = {"attn_mask": attn_mask, "scale": scale}
            return torch_forward(query, key, value, dropout_p, is_causal, **options)
        causal = _UPPER_LEFT if is_causal else _NONE
        out, lse = _call(_with_lse, query, key, value, causal, scale)
        return out, _laid_out(lse, (0, 2, 1))

    def backward(
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        dropout_p: float,
        is_causal: bool,
        *,
        attn_mask: Tensor | None = None,
        scale: float | None = None,
    ) -> Any:
        reason = refused(attn_mask, query, key, value, dropout_p, scale)
        _count(name_backward, reason)
        if reason is not None:
            saved = (out, logsumexp, dropout_p, is_causal)
            options = {"attn_mask": attn_mask, "scale": scale}
            return torch_backward(grad_out, query, key, value, *saved, **options)
        causal = _UPPER_LEFT if is_causal else _NONE
        grads = _gradients(grad_out, query, key, value, out, logsumexp, causal, scale)
        return tuple(_laid_out(x, _BY_ROWS) for x in grads[:3])

    return forward, backward


#: The ops of aten, by the dispatch key of their kernels.
OPS: dict[str, dict[str, Callable[[Kernel, Kernel], tuple[Kernel, Kernel]]]] = {
    "CUDA": {
        "_scaled_dot_product_flash_attention": flash_attention,
        "_scaled_dot_product_cudnn_attention": cudnn_attention,
        "_scaled_dot_product_efficient_attention": efficient_attention,
    },
    "CPU": {"_scaled_dot_product_flash_attention_for_cpu": flash_attention_for_cpu},
}
