"""Detects writes outside the outputs of an op on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

_ARENA_BYTES = 256 << 20
_PATTERN = 0xA5


class _Memory:
    """Raw device memory, for `torch.as_tensor`."""

    def __init__(self, address: int, length: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (length,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def assert_guards_intact(function: Callable[[], Any]) -> None:
    """Calls `function` with an allocator whose free memory holds a pattern, and asserts that its
    outputs (over 1 MiB, so that they come from that memory) are written and nothing else is.

    The function must not need large temporary memory.
    """
    function()
    torch.cuda.synchronize()
    poison = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False
    pool = torch.cuda.MemPool()
    try:
        _check(function, pool)
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = poison


def _check(function: Callable[[], Any], pool: torch.cuda.MemPool) -> None:
    with torch.cuda.use_mem_pool(pool):
        arena = torch.full((_ARENA_BYTES,), _PATTERN, dtype=torch.uint8, device="cuda")
        start = arena.data_ptr()
        del arena  # the block stays in the pool, with its contents
        front = torch.empty(1 << 21, dtype=torch.uint8, device="cuda")
        result = function()
    torch.cuda.synchronize()
    outputs = [x for x in _tensors(result) if x.nbytes > 1 << 20]
    assert outputs
    untouched = torch.ones(_ARENA_BYTES, dtype=torch.bool, device="cuda")
    for x in outputs:
        first = x.data_ptr() - start
        assert 0 <= first < _ARENA_BYTES, "the output did not come from the prepared memory"
        untouched[first : first + x.nbytes] = False
    memory = torch.as_tensor(_Memory(start, _ARENA_BYTES), device="cuda")
    written = (memory != _PATTERN) & untouched
    where = written.nonzero().flatten()
    assert where.numel() == 0, (
        f"{where.numel()} bytes outside the outputs were written, the first at offset "
        f"{int(where[0])} of memory in which the outputs lie at "
        f"{[(x.data_ptr() - start, x.nbytes) for x in outputs]}"
    )
    for x in outputs:
        changed = memory[x.data_ptr() - start :][: x.nbytes] != _PATTERN
        assert float(changed.float().mean()) > 0.9, "the output was not written"
    del front


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for x in value:
            yield from _tensors(x)
