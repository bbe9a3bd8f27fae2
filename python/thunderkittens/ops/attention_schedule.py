"""How the work of attention over a cache is cut, once for all layers of a model's step."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from .. import emulation
from . import _attention as shared
from . import _cache as cache
from ._registration import call_checked, one_by_one, plain_call, register

_NAME = "attention_schedule"
_op = torch.ops.thunderkittens.attention_schedule.default


def attention_schedule(
    seq_lens: Tensor,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    value_dim: int | None = None,
    *,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int = 1,
    cu_seqlens_k_new: Tensor | None = None,
    new_keys: int = 0,
    cache_leftpad: Tensor | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = shared.UNBOUNDED,
    attention_chunk: int | None = None,
    split_size: int | None = None,
    mask: bool = False,
    codes: bool = False,
) -> Tensor:
    """The schedule of calls of `tk.attention_paged` and `tk.attention_decode` with these lengths,
    which all layers of a step share.

    A kernel of one block makes it from the lengths on the GPU; the host reads nothing. The work of
    all sequences is cut into as many parts of equal cost as there are blocks, or with split_size at
    multiples of it. A call without a schedule makes its own. Results of a call whose lengths, or
    whose arguments below, are not those of the schedule, are NaN.

    Args:
        seq_lens: (B,), int32, as the call has it.
        q_heads: heads of the queries.
        kv_heads: heads of the keys.
        head_dim: D, of queries and keys.
        value_dim: Dv; None is D.
        cu_seqlens_q: as the call has it.
        max_seqlen_q: as the call has it; of queries that are not packed their number, s.
        cu_seqlens_k_new: as the call has it, if it appends.
        new_keys: the number of keys of each sequence that the call appends, if they are not packed.
        cache_leftpad: as the call has it.
        causal: as the call has it.
        window_size: as the call has it.
        attention_chunk: as the call has it.
        split_size: as the call has it.
        mask: whether the call has one.
        codes: whether the cache has 8 or 4 bits.

    Returns:
        a tensor of int32, whose contents are the kernels' own.

    Raises:
        TypeError: tensors of other dtypes or devices, numbers that are no integers.
        ValueError: shapes or numbers that do not fit, or that no kernel supports.
    """
    if value_dim is None:
        value_dim = head_dim
    if (
        not torch.compiler.is_compiling()
        and type(new_keys) is int
        and new_keys == 0
        and cu_seqlens_k_new is None
        and cache_leftpad is None
        and causal is True
        and window_size is shared.UNBOUNDED
        and attention_chunk is None
        and split_size is None
        and not mask
        and not codes
    ):
        # What is left out costs the host no time.
        short = (seq_lens, q_heads, kv_heads, head_dim, value_dim, cu_seqlens_q, max_seqlen_q)
        plain = _plain(*short)
        return cast(Tensor, call_checked(_op, short, _check) if plain is NotImplemented else plain)
    left, right = cache.window(_NAME, window_size)
    args = (
        *(seq_lens, q_heads, kv_heads, head_dim, value_dim),
        *(cu_seqlens_q, max_seqlen_q, cu_seqlens_k_new, new_keys, cache_leftpad, bool(causal)),
        *(
            left,
            right,
            attention_chunk or 0,
            cache.require_split_size(_NAME, split_size),
            bool(mask),
            bool(codes),
        ),
    )
    result: Tensor = call_checked(_op, args, _check)
    return result


_FIELDS = (
    *("seq_lens", "q_heads", "kv_heads", "head_dim", "value_dim", "cu_seqlens_q", "max_seqlen_q"),
    *("cu_seqlens_k_new", "new_keys", "cache_leftpad", "causal", "window_left", "window_right"),
    *("attention_chunk", "split_size", "mask", "codes"),
)
_DEFAULTS = (None, 1, None, 0, None, True, -1, -1, 0, 0, False, False)
_TENSORS = ("seq_lens", "cu_seqlens_q", "cu_seqlens_k_new", "cache_leftpad")


def _check(args: tuple[Any, ...]) -> dict[str, Any]:
    """The arguments by name; raises what `attention_schedule` documents."""
    given = dict(zip(_FIELDS, (*args, *_DEFAULTS[len(args) - 5 :]), strict=True))
    lengths = given["seq_lens"]
    cache.require_integers(_NAME, "seq_lens", lengths, lengths)
    batch = lengths.shape[0]
    for name, extra in (("cu_seqlens_q", 1), ("cu_seqlens_k_new", 1), ("cache_leftpad", 0)):
        if given[name] is not None:
            cache.require_integers(_NAME, name, given[name], lengths, batch + extra)
    for name, least in (
        *(("q_heads", 1), ("kv_heads", 1), ("head_dim", 8), ("value_dim", 8)),
        *(("max_seqlen_q", 0), ("new_keys", 0)),
    ):
        cache.require_size(_NAME, name, given[name], least)
    shared.require_dims(_NAME, given["head_dim"], given["head_dim"], given["value_dim"])
    shared.require_heads(_NAME, given["q_heads"], given["kv_heads"])
    return given


_plain = plain_call(_op, _check)


def _checked(args: tuple[Any, ...]) -> tuple[dict[str, Any], int]:
    """The arguments by name, and how many integers the schedule has."""
    given = _check(args)
    lengths, batch = given["seq_lens"], given["seq_lens"].shape[0]
    emulated = emulation.current()
    names = ("q_heads", "kv_heads", "head_dim", "value_dim", "split_size")
    problem = {name: int(given[name]) for name in names} | {"batch": int(batch)}
    problem |= {"q_length": int(given["max_seqlen_q"]), "codes": bool(given["codes"])}
    sms = 1 if emulated is None else emulated.sm_count
    return given, cache.schedule_numbers(problem, lengths.device, sms)


def _fake(*args: Any) -> Tensor:
    given, numbers = _checked(args)
    result: Tensor = given["seq_lens"].new_empty(numbers)
    return result


def _cpu(*args: Any) -> Tensor:
    given, numbers = _checked(args)
    if emulation.active():
        arrays = {name: given.pop(name) for name in _TENSORS}
        return emulation.run(_NAME, arrays, **given)["schedule"]
    result: Tensor = given["seq_lens"].new_zeros(numbers)
    return result


register(
    _NAME,
    fake=_fake,
    cpu=_cpu,
    vmap=one_by_one(_op),
    differentiable=False,
)
