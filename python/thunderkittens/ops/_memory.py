"""Whether tensors share memory, for the ops that write to tensors of the caller: what one block
writes, another must neither write nor read.

Ranges of addresses answer at once for tensors of different memory. Where they meet, as those of two
slices of one matrix do, NumPy solves for an address that both have. It reads none of them, so that
they may be a GPU's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

# Steps of the search for a common address. Views that indexing makes take a few; what takes more
# counts as sharing memory.
_MOST_STEPS = 100_000


def has_addresses(x: Tensor) -> bool:
    """Whether a tensor lies in memory: one that stands for another, as while tracing, does not."""
    return not (x.is_meta or isinstance(x, FakeTensor))


def span(x: Tensor) -> tuple[int, int]:
    """The address of a tensor's first byte, and that behind its last."""
    begin = x.data_ptr()
    if x.is_contiguous():  # also without elements
        return begin, begin + x.nbytes
    end = 1
    for n, stride in zip(x.shape, x.stride(), strict=True):
        end += (n - 1) * stride
    return begin, begin + end * x.element_size()


def overlap(x: Tensor, y: Tensor) -> bool:
    """Whether an element of x and one of y share memory."""
    (begin, end), (first, last) = span(x), span(y)
    if end <= first or last <= begin or begin == end or first == last:
        return False
    return _share(_layout(x), _layout(y))


def repeats(x: Tensor) -> bool:
    """Whether two elements of x share memory, as in an expanded tensor."""
    if x.is_contiguous():  # also without elements
        return False
    dims = [(stride, n) for n, stride in zip(x.shape, x.stride(), strict=True) if n > 1]
    # What slicing and transposing make: each stride is beyond what smaller ones reach.
    reach = 1
    for stride, n in sorted(dims):
        if stride < reach:
            break
        reach += stride * (n - 1)
    else:
        return False
    # Two elements differ first in some dimension, by 1 to n - 1 steps, and then in any way.
    begin, size = x.data_ptr(), x.element_size()
    for i, (stride, n) in enumerate(dims):
        strides, counts = zip(*dims[i:], strict=True)
        inner = (begin, (1, *counts[1:]), strides, size)
        if _share(inner, (begin + stride * size, (n - 1, *counts[1:]), strides, size)):
            return True
    return False


def require_apart(op: str, names: Sequence[str], tensors: Sequence[Tensor], written: int) -> None:
    """Raises ValueError where one of the first `written` tensors, which the op writes to, has
    elements that share memory with each other, or with another tensor's."""
    if not has_addresses(tensors[0]):
        return
    spans = []
    for i, x in enumerate(tensors):
        if x.is_contiguous():
            begin = x.data_ptr()
            spans.append((begin, begin + x.nbytes, i))
        else:
            spans.append((*span(x), i))
            if i < written and repeats(x):
                raise ValueError(
                    f"tk.{op}: {names[i]} has shape {tuple(x.shape)} and strides {x.stride()}; "
                    "each element must have a place of its own"
                )
    spans.sort()
    reach = reach_written = 0
    for begin, end, i in spans:
        if begin < (reach if i < written else reach_written):
            break
        if end > reach:
            reach = end
        if i < written:
            reach_written = end
    else:
        return
    for i in range(written):
        for j in range(i + 1, len(tensors)):
            if overlap(tensors[i], tensors[j]):
                raise ValueError(
                    f"tk.{op}: {names[i]} overlaps {names[j]}; it is written in place, and must "
                    "overlap nothing else"
                )


# Address, shape, strides in elements, and bytes of an element.
Layout = tuple[int, Sequence[int], Sequence[int], int]


def _layout(x: Tensor) -> Layout:
    return x.data_ptr(), x.shape, x.stride(), x.element_size()


class _Places:
    """Elements of a layout, as NumPy takes memory of others."""

    def __init__(self, layout: Layout) -> None:
        address, shape, strides, size = layout
        self.__array_interface__ = {
            "data": (address, False),
            "shape": tuple(shape),
            "strides": tuple(stride * size for stride in strides),
            "typestr": f"|V{size}",
            "version": 3,
        }


def _share(x: Layout, y: Layout) -> bool:
    import numpy as np

    # The stubs of NumPy 2.4 know only 0 and -1 for max_work.
    most_steps: Any = _MOST_STEPS
    try:
        return np.shares_memory(np.asarray(_Places(x)), np.asarray(_Places(y)), max_work=most_steps)
    except getattr(np, "exceptions", np).TooHardError:
        return True
